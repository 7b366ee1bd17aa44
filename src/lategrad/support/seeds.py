"""Random numbers that depend on a key alone, and the list of what keys stand for.

A key is a seed, a :class:`Stream` and the numbers that distinguish two draws of that stream, so that two streams with
one seed share no random numbers. The values are part of every recorded result: they must never change.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

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
def seeded(seed: int) -> Iterator[Callable[[], list[float]]]:
    """The global generators of torch, Python and numpy draw from this seed, and then continue as if nothing was drawn.

    Yields a function that draws a number from each. One thread at a time: they belong to the process.
    """
    generators = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
    functions: list[Any] = [(one.get_state, one.manual_seed, one.set_state) for one in generators]
    functions += [(random.getstate, random.seed, random.setstate),
                  (np.random.get_state, np.random.seed, np.random.set_state)]  # fmt: skip

    def draw() -> list[float]:
        of_torch = [torch.rand((), generator=one, device=one.device).item() for one in generators]
        return [*of_torch, random.random(), np.random.random()]

    with _GLOBAL_GENERATORS:
        before = [get() for get, _, _ in functions]
        try:
            for _, reseed, _ in functions:
                reseed(seed)
            yield draw
        finally:
            for (_, _, restore), state in zip(functions, before, strict=True):
                restore(state)
