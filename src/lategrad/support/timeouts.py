"""Calls that might never return: how long they are waited for is decided here, and not by them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import TypeVar

_GLANCE = 0.1  # seconds between two looks at how long is still to be waited

Returned = TypeVar("Returned")


class OutOfTimeError(TimeoutError):
    """What was called has not returned in time; it is left to itself."""


def limited(
    call: Callable[[], Returned],
    seconds: float | Callable[[], float],
    what: str,
    *,
    undo: Callable[[Returned], object] | None = None,
) -> Returned:
    """What a call returns or raises, if it does so in time; signals are heeded meanwhile, wherever the call is stuck.

    Args:
        call: made by a thread of its own, which does not keep the interpreter from ending.
        seconds: how long it is waited for; a function where that may change meanwhile, as when the run is to end.
        what: the beginning of the sentence that says what did not happen in time.
        undo: called by that thread, with what came when nobody waited for it any more.

    >>> limited(lambda: 6 * 7, seconds=60.0, what="the answer did not come")
    42
    >>> limited(threading.Event().wait, seconds=0.01, what="the event did not come")
    Traceback (most recent call last):
    lategrad.support.timeouts.OutOfTimeError: the event did not come within 0.01 s
    """
    limit = seconds if callable(seconds) else lambda: seconds
    promise: Future[Returned] = Future()
    begin = time.monotonic()
    try:
        if limit() > 0:
            threading.Thread(target=_keep, args=(promise, call, undo), name="lategrad-limited", daemon=True).start()
        while not promise.done():
            left = begin + limit() - time.monotonic()
            if left <= 0 and promise.cancel():
                raise OutOfTimeError(f"{what} within {limit():g} s")
            wait([promise], min(max(left, 0.0), _GLANCE))
        return promise.result()
    finally:
        promise.cancel()  # if Ctrl-C has ended the wait: what comes is to be undone


def _keep(promise: Future[Returned], call: Callable[[], Returned], undo: Callable[[Returned], object] | None) -> None:
    """Make the call; a promise that was cancelled takes nothing any more."""
    try:
        returned = call()
    except BaseException as error:  # whatever it is, it is raised where the call is waited for
        with suppress(InvalidStateError):
            promise.set_exception(error)
        return
    try:
        promise.set_result(returned)
    except InvalidStateError:
        if undo is not None:
            undo(returned)
