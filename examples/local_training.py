"""Four workers that take local steps, two of them slow: asynchronous DiLoCo on one machine.

Each worker takes 20 local steps of AdamW on a copy of the network and sends their sum; the server's rule, the outer
optimizer, applies it at once, while other workers continue. With ``--seconds`` a job lasts that long instead, and slow
workers take fewer local steps. Replace module and data by your own.

    python examples/local_training.py --rule delayed-nesterov --updates 200
    python examples/local_training.py --seconds 0.2 --compression int8
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import lategrad as lg
from lategrad.problems import LocalSteps, ModuleProblem, load

SLOW = {2: "constant:150", 3: "constant:300"}
"""Milliseconds by which two of the workers delay their results."""


def train(rule: str, updates: int, compression: str = "none", seconds: float | None = None) -> lg.Trace:
    """A real run; its replay ends in the same parameters."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    problem = LocalSteps(ModuleProblem(mlp, load("digits"), batch=32), 20, inner="adamw:lr=0.003", seconds=seconds)
    trace = lg.train(problem, rule, steps=updates, workers=4, slow=SLOW, compression=compression)
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output), "the state of workers is replayed, too"
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="delayed-nesterov")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    trace = train(options.rule, options.updates, options.compression, options.seconds)
    assert trace.worker is not None
    assert trace.local_steps is not None
    for worker in range(4):
        mine = trace.worker == worker
        jobs, steps = int(mine.sum()), trace.local_steps[mine].double().mean()
        delay = trace.delays[mine].double().mean()
        print(f"worker {worker}: {jobs:4} jobs of {steps:4.1f} local steps, mean delay {delay:4.1f}")
    sent, received = (trace.config["bytes"][way] / 1e6 for way in ("up", "down"))
    print(f"{sent:.1f} MB of pseudo-gradients, {received:.1f} MB of queries")
    print(f"test accuracy {trace.accuracy[-1]:.3f} after {options.updates} updates")


if __name__ == "__main__":
    main()
