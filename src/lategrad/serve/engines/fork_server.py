"""Imported by the fork server alone: what it does so that it outlives a signal, and leaves nothing behind.

Signals that batch systems and terminals send to all processes of a run are for the run's server. When the fork server
ends because the process that started it was killed, it removes the socket that it listened on, with its folder, which
otherwise is that process's to do.
"""

import atexit
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

_ORPHANED_WITHIN = 10.0  # seconds in which a dead parent's children get another, also on a busy machine


def _listeners() -> list[Path]:
    """The addresses of the Unix sockets that this process was started with."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as opened:
            if opened.family == socket.AF_UNIX and opened.getsockname():
                found.append(Path(opened.getsockname()))
    return found


def _remove(paths: list[Path], parent: int) -> None:
    deadline = time.monotonic() + _ORPHANED_WITHIN
    while os.getppid() == parent:
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


_THEIRS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
for _number in _THEIRS:  # workers that are just starting inherit it
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, _THEIRS)  # they were blocked while this process imported torch
atexit.register(_remove, _listeners(), os.getppid())
