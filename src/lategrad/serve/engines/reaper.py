"""A small process beside a Ray of our own: when the driver ends, for whatever reason, it removes all that is left.

    python -I -S reaper.py FOLDER

It waits for the end of its standard input, which only the driver holds open. Then it kills the processes that were
started with FOLDER in their environment, and removes FOLDER. It imports nothing of lategrad, to start at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "LATEGRAD_RAY_FOLDER"
"""The environment variable that marks a process of a Ray of our own."""
_TIMEOUT = 8.0  # seconds for all processes to end
_POLL_INTERVAL = 0.1


def processes_of(folder: str) -> list[int]:
    """The ids of all processes that carry the mark; a zombie does not."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def clean_up(folder: str) -> None:
    """Kill the processes of a Ray, and remove its folder."""
    end = time.monotonic() + _TIMEOUT
    while (processes := processes_of(folder)) and time.monotonic() < end:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    while sys.stdin.buffer.read(1):
        pass
    clean_up(sys.argv[1])
