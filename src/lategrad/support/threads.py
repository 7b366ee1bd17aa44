"""How many threads of torch a block uses, and how many are worth using."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALL = 2**24  # bytes: what the caches hold is copied as fast by one thread
_WORTH = 1.1  # twice the threads must be faster by this factor


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` threads inside the block, and the previous number after it.

    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def worthwhile_threads(size: int, most: int) -> int:
    """How many threads, of ``most``, make passes over vectors of ``size`` bytes faster; measured by copying one.

    >>> worthwhile_threads(10**6, most=8)
    1
    """
    if size < _SMALL or most < 2:
        return 1
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def seconds(threads: int) -> float:
        times = []
        with torch_threads(threads):
            for _ in range(4):  # the first wakes the threads
                begin = time.perf_counter()
                target.copy_(source)
                times.append(time.perf_counter() - begin)
        return min(times[1:])

    chosen, fastest = 1, seconds(1)
    while 2 * chosen <= most and (faster := seconds(2 * chosen)) * _WORTH < fastest:
        chosen, fastest = 2 * chosen, faster
    return chosen
