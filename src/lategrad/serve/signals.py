"""Controls a run from outside: a file in its folder sets the number of workers, and signals stop or save it."""

import contextlib
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lategrad.serve.settings import MAX_WORKERS
from lategrad.support.files import read_plain

if TYPE_CHECKING:
    from lategrad.serve.training import Training

_MAX_BYTES = 64  # of the number and the blanks around it
_BOUNCE = 1.0  # seconds in which a second signal changes nothing: a key that bounces, or two senders


class ControlFile:
    """The file ``workers`` in a run's folder: the number of workers; anything else in it is removed with a warning."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "workers"
        self._cannot_remove = False

    def read(self) -> int | None:
        """The number in the file, which is then removed; None if there is none."""
        if self._path is None or not os.path.lexists(self._path):
            return None
        count, problem = _parse(self._path)
        if count is None and problem is None:
            return None
        try:
            self._path.unlink()
        except OSError as error:
            if self._cannot_remove:
                return None
            self._cannot_remove, problem = True, problem or f"cannot be removed ({error})"
        if problem is None:
            return count
        warnings.warn(f"{str(self._path)!r} {problem}: ignored", stacklevel=2)
        return None


def _parse(path: Path) -> tuple[int | None, str | None]:
    """The number in the file, or what is wrong with it; neither if the file is still empty."""
    valid = f"must hold an integer in 1..{MAX_WORKERS}"
    try:
        content = read_plain(path, _MAX_BYTES + 1).decode(errors="replace")
    except OSError as error:
        return None, f"{valid}, and cannot be read ({error})"
    text = content.strip()
    if text.isdecimal() and len(text) <= _MAX_BYTES and 1 <= int(text) <= MAX_WORKERS:
        return int(text), None
    return None, f"{valid}, got {text[:_MAX_BYTES]!r}" if content else None


STOP_REASONS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""The signals that end a run in an orderly way, and what ``trace.config["stopped"]`` says then."""


@contextlib.contextmanager
def handle_signals(run: "Training") -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP stop the run in an orderly way, a later second one at once; SIGUSR1 saves it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    stopped_at = math.inf

    def on_stop(number: int, frame: object) -> None:
        nonlocal stopped_at
        if time.monotonic() > stopped_at + _BOUNCE:
            raise KeyboardInterrupt
        stopped_at = min(stopped_at, time.monotonic())
        if run.stopping is None:
            run.stop(STOP_REASONS[signal.Signals(number)])

    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stops = [number for number in STOP_REASONS if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, on_stop) for number in stops}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: run.save_soon())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
