"""How a run is told something while it goes on: a file in its folder, and signals."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

CONTROL_FILE = "workers"
"""In the run's folder: write a number into it and the run goes on with so many workers."""


def requested_workers(folder: Path | None) -> int | None:
    """The number in the control file, which is taken away; None if there is none."""
    if folder is None:
        return None
    path = folder / CONTROL_FILE
    try:
        text = path.read_text(errors="replace").strip()
        if not text:
            return None  # whoever made it has not written yet
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"the control file cannot be used: {error}", stacklevel=2)
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    warnings.warn(f"{str(path)!r} must hold an integer >= 1, got {text!r}: ignored", stacklevel=2)
    return None


class Stoppable(Protocol):
    """A run that signals end."""

    stopping: str | None
    """Why it is to end, if it is."""

    def stop(self, reason: str) -> None:
        """End the run soon."""
        ...


@contextlib.contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """SIGINT and SIGTERM stop the run in an orderly way; a second one is not waited for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: object) -> None:
        if run.stopping is not None:
            raise KeyboardInterrupt
        run.stop("interrupted" if number == signal.SIGINT else "terminated")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
