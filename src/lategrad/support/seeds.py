"""Random numbers that depend on a key alone, and the list of what keys stand for.

A key is a seed, a :class:`Stream` and the numbers that distinguish two draws of that stream, so that two streams with
one seed share no random numbers. The values are part of every recorded result: they must never change.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What random numbers are for."""

    IID_ROWS = 1
    """Minibatches drawn with replacement."""
    EPOCHS = 2
    """The order of the rows in each epoch."""
    NOISE = 3
    """Gaussian noise of gradients."""
    DELAYS = 0x64656C6179
    """Delay distributions."""
    PARTS = 0x7061727473
    """The parts of a composed delay model."""
    COMPUTING = 0x636F6D70
    """Computing times of a virtual cluster."""
    PREEMPTION = 0x646F776E
    """When workers of a virtual cluster leave and return."""
    OWN_SAMPLES = 0x73747265616D
    """Runs of a simulation that do not share samples."""
    WORKER = 0x776F726B6572
    """The samples of a real worker."""
    PAUSES = 0x7061757365
    """Artificial pauses of a real worker."""
    VALIDATION = 0x76616C6964
    """Which training rows are held out."""


def generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(key))


def torch_generator(*key: int) -> torch.Generator:
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def derived_seed(*key: int) -> int:
    """An integer seed that depends on the key.

    >>> derived_seed(0, Stream.WORKER, 1) == derived_seed(0, Stream.WORKER, 1) != derived_seed(0, Stream.WORKER, 2)
    True
    """
    return int(np.random.SeedSequence(key).generate_state(1)[0])
