"""How a run is told something while it goes on: a file in its folder, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lategrad.serve.settings import MOST_WORKERS

CONTROL_FILE = "workers"
"""In the run's folder: write a number into it and the run goes on with so many workers."""
_LONGEST = 64  # bytes of a number and the blanks around it


class ControlFile:
    """The file in a run's folder that says how many workers there shall be.

    Whatever else lies there under that name is removed, where that can be, and warned of once.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / CONTROL_FILE
        self._ignored: tuple[int, int, int] | None = None
        """What could not be removed, and was warned of."""

    def requested(self) -> int | None:
        """The number in the file, which is taken away; None if there is none."""
        if self._path is None:
            return None
        try:
            found = os.lstat(self._path)
        except OSError:
            return None  # there is none, or the folder is gone, which checkpoints tell of
        identity = (found.st_ino, found.st_mode, found.st_mtime_ns)
        if identity == self._ignored or (stat.S_ISREG(found.st_mode) and found.st_size == 0):
            return None  # whoever made it has not written yet
        problem, wanted = self._read(found)
        try:
            self._path.unlink()
        except OSError as error:
            problem = problem or f"cannot be removed ({error})"
            self._ignored = identity
        if problem is None:
            return wanted
        warnings.warn(f"{str(self._path)!r} {problem}: ignored", stacklevel=2)
        return None

    def _read(self, found: os.stat_result) -> tuple[str | None, int | None]:
        """What is wrong with it, if anything, and the number."""
        assert self._path is not None
        valid = f"must hold an integer in 1..{MOST_WORKERS}"
        if not stat.S_ISREG(found.st_mode):
            return f"{valid}, and is not a file", None
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                text = file.read(_LONGEST + 1).decode(errors="replace").strip()
        except OSError as error:
            return f"cannot be read ({error})", None
        if text.isdecimal() and len(text) <= _LONGEST and 1 <= int(text) <= MOST_WORKERS:
            return None, int(text)
        return f"{valid}, got {text[:_LONGEST]!r}", None


class Controlled(Protocol):
    """A run that signals reach."""

    stopping: str | None
    """Why it is to end, if it is."""

    def stop(self, reason: str) -> None:
        """End the run soon."""
        ...

    def save_soon(self) -> None:
        """Make a checkpoint soon."""
        ...


STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""The signals that end a run in an orderly way, and what the trace says then."""


@contextlib.contextmanager
def listen_to_signals(run: Controlled) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP stop the run in an orderly way, a second one at once; SIGUSR1 makes a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_stop(number: int, frame: object) -> None:
        if run.stopping is not None:
            raise KeyboardInterrupt
        run.stop(STOPPED[signal.Signals(number)])

    def on_save(number: int, frame: object) -> None:
        run.save_soon()

    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stops = [number for number in STOPPED if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, on_stop) for number in stops}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, on_save)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
