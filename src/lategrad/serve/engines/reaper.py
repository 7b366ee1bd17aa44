"""Runs beside a Ray of our own, as a small process: when the driver has ended, however it did, nothing of it stays.

    python -I -S ray_cleanup.py FOLDER

It waits for the end of its standard input, which the driver alone holds open. Then it ends the processes that were
started with FOLDER in their environment, and removes FOLDER. It imports nothing of lategrad, to start at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "LATEGRAD_RAY_FOLDER"
"""The variable by which a process is known to belong to a Ray of our own."""
_PATIENCE = 8.0  # seconds for all processes to be gone
_PAUSE = 0.1


def _processes_of(folder: str) -> list[int]:
    """All that carry the mark; a zombie does not any more."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue  # it has ended, or is somebody else's
            if mark in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def clean_up(folder: str) -> None:
    """End the processes of a Ray, and remove its folder."""
    end = time.monotonic() + _PATIENCE
    while (processes := _processes_of(folder)) and time.monotonic() < end:
        for pid in processes:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    while sys.stdin.buffer.read(1):
        pass
    clean_up(sys.argv[1])
