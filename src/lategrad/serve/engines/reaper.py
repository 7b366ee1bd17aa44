"""A small process beside a Ray of our own: when the driver ends, for whatever reason, it removes all that is left.

    python -I -S reaper.py FOLDER

It waits for the end of its standard input, which only the driver holds open. Then it kills the processes that have
FOLDER in their environment or a file of it open, and removes FOLDER. It imports nothing of lategrad, to start at once.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "LATEGRAD_RAY_FOLDER"  # the environment variable that marks a process of a Ray of our own
_TIMEOUT = 8.0  # seconds for all processes to end
_POLL_INTERVAL = 0.1


def processes_of(folder: str) -> list[int]:
    """The ids of all processes that carry the mark, or write to the folder; a zombie does neither."""
    # Both are looked for: processes of Ray set their titles, which are written over their environment.
    mark = f"{MARK}={folder}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
                for opened in os.listdir(entry / "fd"):
                    with contextlib.suppress(FileNotFoundError):  # it is closed again
                        if os.readlink(entry / "fd" / opened).startswith(f"{folder}/"):
                            found.add(int(entry.name))
    return sorted(found)


def clean_up(folder: str, driver: int) -> None:
    """Kill the processes of a Ray, but not its driver, which may have ended or not, and remove its folder."""
    end = time.monotonic() + _TIMEOUT
    while (processes := {*processes_of(folder)} - {driver}) and time.monotonic() < end:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parent = os.getppid()
    while sys.stdin.buffer.read(1):
        pass
    clean_up(sys.argv[1], parent)
