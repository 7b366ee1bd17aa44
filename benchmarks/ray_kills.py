"""Kill the driver of a training on a Ray of its own, again and again, and count what each kill leaves behind.

    python benchmarks/ray_kills.py [KILLS]

Each run is a session of its own, in which all processes of its Ray stay; it is killed at a random moment: one in three
while Ray starts, the others once its agents have set their titles. A kill is clean if 20 seconds later no process of
the session is alive and the folder of Ray is gone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PATIENCE = 20.0  # seconds
_LATEST = 6.0  # seconds after that
_START = 120.0  # seconds for it


def alive(session: int) -> dict[int, str]:
    """The names of the processes of a session that are no zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
            except OSError:
                continue
            if rest.split()[0] != "Z" and int(rest.split()[3]) == session:
                found[int(entry.name)] = name
    return found


def kill_once(seconds: float, sign: str) -> tuple[int, dict[int, str], list[Path]]:
    """The processes at the moment of the kill, and the processes and folders that are left."""
    with tempfile.TemporaryDirectory(prefix="r") as own:
        command = [sys.executable, "-m", "lategrad", "train", "--problem", "quadratic", "--engine", "ray", "--workers",
                   "2", "--steps", "1000000", "--slow", "constant:10"]  # fmt: skip
        environment = {**os.environ, "RAY_TMPDIR": own, "RAY_USAGE_STATS_ENABLED": "0"}
        driver = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        end = time.monotonic() + _START
        while not any(name.startswith(sign) for name in alive(driver.pid).values()) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(seconds)
        before = len(alive(driver.pid))
        driver.kill()
        driver.wait()
        end = time.monotonic() + _PATIENCE
        while (alive(driver.pid) or list(Path(own).glob("lategrad-ray-*"))) and time.monotonic() < end:
            time.sleep(0.1)
        left, folders = alive(driver.pid), list(Path(own).glob("lategrad-ray-*"))
        for pid in left:
            os.kill(pid, 9)
        return before, left, folders


def main() -> None:
    """Kill, and print what is left."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    moments, unclean = random.Random(0), 0
    for kill in range(1, kills + 1):
        seconds = moments.uniform(0.0, _LATEST)
        before, left, folders = kill_once(seconds, "gcs_server" if kill % 3 == 0 else "ray::")
        unclean += bool(left or folders)
        print(f"{kill}: after {seconds:.1f} s with {before} processes; left: {left or 'none'}, {len(folders)} folders",
              flush=True)  # fmt: skip
    print(f"{unclean} of {kills} kills left something")


if __name__ == "__main__":
    main()
