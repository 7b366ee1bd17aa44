"""Peak memory of `lg.train` with two worker processes, in vectors of the parameters' size.

Proportional set sizes (shared pages are divided among the processes that map them), sampled every 20 ms, above those of
the same run with a thousand parameters. ``python benchmarks/run_memory.py`` takes minutes; Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

import lategrad as lg
from lategrad.problems import ModuleProblem


def set_size(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def children(process: int) -> list[int]:
    own = [int(child) for task in Path(f"/proc/{process}/task").iterdir()
           for child in (task / "children").read_text().split()]  # fmt: skip
    return own + [grandchild for child in own for grandchild in children(child)]


def measure(side: int, rule: str) -> dict[str, int]:
    """The peaks of the server's process, of the largest other one, and of all together, in bytes."""
    peaks, over = {"server": 0, "worker": 0, "all": 0}, threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            try:
                server, others = set_size(os.getpid()), [set_size(child) for child in children(os.getpid())]
            except OSError:  # one of them has just ended
                continue
            now = {"server": server, "worker": max(others, default=0), "all": server + sum(others)}
            peaks.update({name: max(peaks[name], value) for name, value in now.items()})

    torch.manual_seed(0)
    rows = [(torch.randn(side), torch.randn(side)) for _ in range(8)]
    problem = ModuleProblem(nn.Linear(side, side, bias=False), rows, batch=2, evaluate=2)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        lg.train(problem, rule, steps=30, workers=2, record_every=10, checkpoint_every=10, out=folder, progress=False)
    over.set()
    watcher.join()
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=3162, help="of the one matrix: 3162 for 10^7 parameters")
    parser.add_argument("--rules", nargs="+", default=["sgd:0.001", "steady-adam:lr=0.001"])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(int(options.one[0]), options.one[1])))
        return
    print("rule                  server  worker  all (vectors)")
    for rule in options.rules:
        small, large = (
            json.loads(subprocess.run([sys.executable, __file__, "--one", str(side), rule], check=True,
                                      capture_output=True, text=True).stdout)
            for side in (32, options.side)
        )  # fmt: skip
        vectors = [f"{(large[name] - small[name]) / (4 * options.side**2):.1f}" for name in small]
        print(f"{rule:<20}  {vectors[0]:>6}  {vectors[1]:>6}  {vectors[2]:>3}")


if __name__ == "__main__":
    main()
