"""The threads of torch: how many a block uses, and how many are worth using. Calls in a thread, with a timeout."""

import threading
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

_SMALL = 2**24  # bytes: what the caches hold is copied as fast by one thread
_WORTH = 1.1  # twice the threads must be faster by this factor
_POLL_INTERVAL = 0.1  # seconds after which a time limit is looked at again

Returned = TypeVar("Returned")


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
        with torch_threads(threads):
            times = timeit.repeat(lambda: target.copy_(source), number=1, repeat=4)
        return min(times[1:])  # the first wakes the threads

    chosen, fastest = 1, seconds(1)
    while 2 * chosen <= most and (faster := seconds(2 * chosen)) * _WORTH < fastest:
        chosen, fastest = 2 * chosen, faster
    return chosen


class OutOfTimeError(TimeoutError):
    """A call has not returned in time; its thread continues without a caller."""


def run_in_thread(
    call: Callable[[], Returned], name: str, future: Future[Returned] | None = None,
    undo: Callable[[Returned], object] | None = None,
) -> Future[Returned]:  # fmt: skip
    """Start a call in a daemon thread, which does not keep the interpreter alive.

    The future takes what the call returns or raises; ``undo`` gets a result that comes after it was canceled.

    >>> run_in_thread(lambda: 6 * 7, "answer").result()
    42
    """
    promise: Future[Returned] = Future() if future is None else future

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # raised again where the result is read
            with suppress(InvalidStateError):
                promise.set_exception(error)
            return
        try:
            promise.set_result(result)
        except InvalidStateError:
            if undo is not None:
                undo(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return promise


def limited(
    call: Callable[[], Returned], seconds: float | Callable[[], float], what: str, *,
    undo: Callable[[Returned], object] | None = None,
) -> Returned:  # fmt: skip
    """What a call returns or raises within a time limit; signals are handled meanwhile, wherever the call hangs.

    Args:
        call: runs in a thread of its own; it is not started where the limit is 0.
        seconds: the limit; a function where it may change meanwhile, as when the run is asked to stop.
        what: how the error message begins: what did not happen in time.
        undo: called by that thread with a result that comes too late.

    >>> limited(lambda: 6 * 7, seconds=60.0, what="the answer did not come")
    42
    >>> limited(threading.Event().wait, seconds=0.01, what="the event did not come")
    Traceback (most recent call last):
    lategrad.support.threads.OutOfTimeError: the event did not come within 0.01 s
    """
    limit = seconds if callable(seconds) else lambda: seconds
    begin = time.monotonic()
    if limit() <= 0:
        raise OutOfTimeError(f"{what} within {limit():g} s")
    promise: Future[Returned] = Future()
    try:
        run_in_thread(call, "lategrad-limited", promise, undo)
        while not promise.done():
            left = begin + limit() - time.monotonic()
            if left <= 0 and promise.cancel():
                raise OutOfTimeError(f"{what} within {limit():g} s")
            wait([promise], min(max(left, 0.0), _POLL_INTERVAL))
        return promise.result()
    finally:
        promise.cancel()  # if Ctrl-C ends the wait: a result that comes is undone
