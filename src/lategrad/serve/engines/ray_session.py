"""A connection to Ray: neither its beginning nor its end is waited for in vain."""

from __future__ import annotations

import atexit
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

import ray

from lategrad.support.limited import OutOfTimeError, limited

_SHUTDOWN = 10.0  # seconds


@contextlib.contextmanager
def session(init: Callable[[], object], seconds: Callable[[], float], what: str) -> Iterator[None]:
    """Be connected; :class:`OutOfTimeError` if that takes too long.

    Args:
        init: connects. It is called by another thread than the main one, so that Ray leaves SIGTERM to the run.
        seconds: that it has.
        what: the beginning of the sentence that says what did not happen in time.
    """
    limited(lambda: _whole(init), seconds, what, undo=lambda _: ray.shutdown())
    try:
        yield
    finally:
        try:
            limited(ray.shutdown, _SHUTDOWN, "Ray has not given the connection back")
        except OutOfTimeError as error:
            atexit.unregister(ray.shutdown)  # it would be waited for again, and for ever
            warnings.warn(str(error), stacklevel=3)


def _whole(init: Callable[[], object]) -> None:
    """Connect, or leave nothing behind."""
    logger = logging.getLogger("ray._private.worker")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it would say that SIGTERM is left to others
    try:
        init()
    except BaseException:
        ray.shutdown()
        raise
    finally:
        logger.setLevel(before)
