"""Controls a run from outside: a file in its folder sets the number of workers, and signals stop or save it."""

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

from lategrad.serve.settings import MAX_WORKERS

CONTROL_FILE = "workers"
"""In the run's folder: a number written to it becomes the number of workers."""
_MAX_BYTES = 64  # of the number and the blanks around it


class ControlFile:
    """The file in a run's folder that sets the number of workers.

    Anything else under that name is removed, where possible, and warned of once.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / CONTROL_FILE
        self._ignored: tuple[int, int, int] | None = None  # a file that could not be removed

    def read(self) -> int | None:
        """The number in the file, which is then removed; None if there is none."""
        if self._path is None:
            return None
        try:
            status = os.lstat(self._path)
        except OSError:
            return None  # no such file, or no folder, which checkpoints warn of
        identity = (status.st_ino, status.st_mode, status.st_mtime_ns)
        if identity == self._ignored or (stat.S_ISREG(status.st_mode) and status.st_size == 0):
            return None  # an empty file is still to be written
        count, problem = self._parse(status)
        try:
            self._path.unlink()
        except OSError as error:
            problem = problem or f"cannot be removed ({error})"
            self._ignored = identity
        if problem is None:
            return count
        warnings.warn(f"{str(self._path)!r} {problem}: ignored", stacklevel=2)
        return None

    def _parse(self, status: os.stat_result) -> tuple[int | None, str | None]:
        """The number, or what is wrong with the file."""
        assert self._path is not None
        valid = f"must hold an integer in 1..{MAX_WORKERS}"
        if not stat.S_ISREG(status.st_mode):
            return None, f"{valid}, and is not a file"
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                text = file.read(_MAX_BYTES + 1).decode(errors="replace").strip()
        except OSError as error:
            return None, f"cannot be read ({error})"
        if text.isdecimal() and len(text) <= _MAX_BYTES and 1 <= int(text) <= MAX_WORKERS:
            return int(text), None
        return None, f"{valid}, got {text[:_MAX_BYTES]!r}"


class Controllable(Protocol):
    """A run that signals can stop or save."""

    stopping: str | None
    """Why the run is ending, if it is."""

    def stop(self, reason: str) -> None: ...

    def save_soon(self) -> None: ...


STOP_REASONS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""The signals that end a run in an orderly way, and what ``trace.config["stopped"]`` says then."""


@contextlib.contextmanager
def handle_signals(run: Controllable) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP stop the run in an orderly way, a second one at once; SIGUSR1 makes a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_stop(number: int, frame: object) -> None:
        if run.stopping is not None:
            raise KeyboardInterrupt
        run.stop(STOP_REASONS[signal.Signals(number)])

    def on_save(number: int, frame: object) -> None:
        run.save_soon()

    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stops = [number for number in STOP_REASONS if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, on_stop) for number in stops}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, on_save)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
