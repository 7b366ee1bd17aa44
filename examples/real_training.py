"""A small network trained by worker processes, one of them slow; then SGD on the same delays.

The delays are real, so no two runs are the same; but each run is recorded, and the recording is replayed with other
rules on the same delays and samples.

    python examples/real_training.py --workers 3 --steps 3000
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import lategrad as lg
from lategrad.problems import ModuleProblem, load


def train_and_replay(workers: int, steps: int) -> dict[str, float]:
    """The test accuracy of a real run, and of other rules on its recording."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    problem = ModuleProblem(mlp, load("digits"))
    rule = lg.Steady(lr=1.0)
    trace = lg.train(problem, rule, steps=steps, workers=workers, slow={0: "constant:20"})
    delays = trace.delay_summary()
    print(f"{steps} updates, delays: mean {delays.mean:.1f}, max {delays.max}")
    replayed = lg.replay(trace, problem, rule)
    assert torch.equal(replayed.output, trace.output), "a replay ends in the same parameters, to the bit"
    others = {f"SGD, lr {lr}": lg.replay(trace, problem, lg.SGD(lr=lr)) for lr in (0.01, 0.1, 1.0)}
    return {name: float(t.accuracy[-1]) for name, t in {"Steady, trained": trace, **others}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    for name, accuracy in train_and_replay(options.workers, options.steps).items():
        print(f"{name:<16} test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
