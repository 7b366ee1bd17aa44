"""A connection to Ray: neither its beginning nor its end is waited for in vain."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import ray

from lategrad.support.timeouts import OutOfTimeError, limited

_SHUTDOWN = 20.0  # seconds; it takes one or two, where the machine is not busy and Ray does not hang


@contextlib.contextmanager
def session(init: Callable[[], object], seconds: Callable[[], float], what: str) -> Iterator[None]:
    """Be connected; :class:`OutOfTimeError` if that takes too long.

    One thread begins and ends it: processes that Ray starts are killed by the system when the thread ends that started
    them. As it is not the main one, Ray leaves SIGTERM to the run.

    Args:
        init: connects.
        seconds: that it has.
        what: the beginning of the sentence that says what did not happen in time.
    """
    connected: Future[None] = Future()
    over, ended = threading.Event(), threading.Event()

    def live() -> None:
        try:
            _connect(init)
        except BaseException as error:  # it is raised where the connection is waited for
            connected.set_exception(error)
        else:
            connected.set_result(None)
            over.wait()
            ray.shutdown()
        ended.set()

    threading.Thread(target=live, name="lategrad-ray", daemon=True).start()
    try:
        limited(connected.result, seconds, what)
        yield
    finally:
        over.set()  # also where it has not begun yet, and nobody waits for it any more
        if connected.done():
            _wait_for(ended)


def _connect(init: Callable[[], object]) -> None:
    """As a whole, or leave nothing behind."""
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


def _wait_for(ended: threading.Event) -> None:
    try:
        limited(ended.wait, _SHUTDOWN, "Ray has not given the connection back")
    except OutOfTimeError as error:
        atexit.unregister(ray.shutdown)  # it would be waited for again, and for ever
        warnings.warn(str(error), stacklevel=4)
