"""Random numbers that depend on a key alone, and the list of what keys stand for.

A key is a seed, a :class:`Stream` and the numbers that distinguish two draws of that stream, so that two streams with
one seed share no random numbers. The values are part of every recorded result: they must never change.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What random numbers are for."""

    IID_ROWS = 1  # minibatches drawn with replacement
    EPOCHS = 2  # the order of the rows in each epoch
    NOISE = 3  # Gaussian noise of gradients
    DELAYS = 0x64656C6179  # delay distributions
    PARTS = 0x7061727473  # the parts of a composed delay model
    COMPUTING = 0x636F6D70  # computing times of a virtual cluster
    PREEMPTION = 0x646F776E  # when workers of a virtual cluster leave and return
    OWN_SAMPLES = 0x73747265616D  # runs of a simulation that do not share samples
    WORKER = 0x776F726B6572  # the samples of a real worker
    PAUSES = 0x7061757365  # artificial pauses of a real worker
    VALIDATION = 0x76616C6964  # which training rows are held out
    LAYERS = 0x6C6179657273  # random layers of a module, such as dropout
    STEPS = 0x7374657073  # where on a step OnlineToNonconvex queries


_GLOBAL_GENERATORS = threading.RLock()


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


@contextmanager
def seeded(seed: int) -> Iterator[list[torch.Generator]]:
    """Torch's global generators draw from this seed, and continue afterwards as if nothing had been drawn.

    One thread at a time: they belong to the process.
    """
    generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    with _GLOBAL_GENERATORS:
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield generators
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
