"""Ranks of ``torch.distributed`` for tests: real processes, forked from one that has imported torch already.

``python -m helpers.ranks`` reads one job a line from standard input, forks its ranks, and prints how each ended.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class Ended(NamedTuple):
    """How a rank ended."""

    value: object
    """What its function returned."""
    error: str | None
    """The last line of its traceback."""
    code: int
    """Its exit code; that of a signal is negative."""


class Ranks:
    """Runs functions on several ranks.

    Args:
        modules: imported before the ranks are forked.
    """

    def __init__(self, *modules):
        here = Path(__file__).parents[1]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        paths = [str(here.parent / "src"), str(here), str(here / "pipeline"), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(paths)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.ranks", *modules], env=self.environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, function, world, limit=300, kill=None, **arguments):
        """How each rank ended that ran ``function(**arguments)``, a name such as ``"cases.train"``.

        A rank that has not ended after ``limit`` seconds is killed, which its exit code shows.
        ``kill`` is a rank and a signal, which it gets when it has made the file ``ready``.
        """
        with tempfile.TemporaryDirectory() as folder:
            torch.save(arguments, Path(folder) / "arguments")
            job = {"function": function, "world": world, "folder": folder, "timeout": limit, "kill": kill}
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            codes = json.loads(self.process.stdout.readline())
            results = [Path(folder) / str(rank) for rank in range(world)]
            saved = [torch.load(r, weights_only=False) if r.exists() else (None, None) for r in results]
        return [Ended(*one, code) for one, code in zip(saved, codes, strict=True)]

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def _run(rank, job):
    """In a forked process: run the function and save what it returns or raises."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is the answer's
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    folder, value, error = Path(job["folder"]), None, None
    os.chdir(folder)
    os.environ["READY"] = str(folder / "ready")
    module, _, name = job["function"].rpartition(".")
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=job["world"])
        value = getattr(importlib.import_module(module), name)(**torch.load(folder / "arguments", weights_only=False))
    except BaseException as raised:
        error = traceback.format_exception_only(raised)[-1].strip()
        if "VERBOSE" in os.environ:
            traceback.print_exc()
    torch.save((value, error), folder / f"{rank}.part")
    os.replace(folder / f"{rank}.part", folder / str(rank))
    os._exit(0 if error is None else 1)


def _serve():
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(job["world"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                _run(rank, job)
        codes, deadline, kill = {}, time.monotonic() + job["timeout"], job["kill"]
        while len(codes) < len(pids):
            time.sleep(0.005)
            for pid in set(pids) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
            if kill and (Path(job["folder"]) / "ready").exists():
                os.kill(pids[kill[0]], kill[1])
                kill = None
        print(json.dumps([codes[pid] for pid in pids]), flush=True)
    os._exit(0)  # without the seconds that unloading takes


if __name__ == "__main__":
    _serve()
