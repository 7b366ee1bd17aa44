"""Run a call in a thread and give up after a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import TypeVar

_POLL_INTERVAL = 0.1  # seconds after which the limit is looked at again

Returned = TypeVar("Returned")


class OutOfTimeError(TimeoutError):
    """A call has not returned in time; its thread continues without a caller."""


def run_in_thread(call: Callable[[], Returned], name: str) -> Future[Returned]:
    """Start a call in a daemon thread, which does not keep the interpreter alive.

    >>> run_in_thread(lambda: 6 * 7, "answer").result()
    42
    """
    future: Future[Returned] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def limited(
    call: Callable[[], Returned],
    seconds: float | Callable[[], float],
    what: str,
    *,
    undo: Callable[[Returned], object] | None = None,
) -> Returned:
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
    lategrad.support.timeouts.OutOfTimeError: the event did not come within 0.01 s
    """
    limit = seconds if callable(seconds) else lambda: seconds
    begin = time.monotonic()
    if limit() <= 0:
        raise OutOfTimeError(f"{what} within {limit():g} s")
    future = run_in_thread(call, "lategrad-limited")

    def revoke(late: Future[Returned]) -> None:
        if undo is not None and late.exception() is None:
            undo(late.result())

    with ExitStack() as stack:
        stack.callback(future.add_done_callback, revoke)  # also if Ctrl-C ends the wait
        while not future.done():
            left = begin + limit() - time.monotonic()
            if left <= 0:
                raise OutOfTimeError(f"{what} within {limit():g} s")
            wait([future], min(left, _POLL_INTERVAL))
        stack.pop_all()
    return future.result()
