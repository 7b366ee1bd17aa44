"""Updates per second where records are frequent: evaluated in a thread of their own, and between updates.

Two workers (slow on purpose, so that a core is free where there are only two) train an MLP; every n updates the loss
over 10,000 rows is recorded. Both ways take turns, and leave the same records.

    python benchmarks/bench_evaluation.py [--rounds 3] [--updates 400] [--pause 20]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from unittest import mock

import torch
from torch import nn

import lategrad as lg
from lategrad.problems import Dataset, ModuleProblem
from timing import require_value, verdict

WAYS = {"between updates": math.inf, "in a thread": 0.0}
"""Seconds of an evaluation above which it runs in a thread."""


def mlp_problem() -> ModuleProblem:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(10_000, 784, generator=generator), torch.randint(10, (10_000,), generator=generator)
    mlp = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return ModuleProblem(mlp, Dataset("noise", x, y, x[:1000], y[:1000], 10))


def rate(problem: ModuleProblem, way: str, updates: int, record_every: int, pause: int) -> float:
    """Updates per second from the first to the last."""
    with mock.patch("lategrad.serve.observe.records._WORTH_A_THREAD", WAYS[way]):
        trace = lg.train(problem, lg.Steady(lr=1.0), steps=updates, workers=2, record_every=record_every,
                         progress=False, compile=False, slow=f"constant:{pause}")  # fmt: skip
    expected = sorted({*range(0, updates + 1, record_every), updates})
    require_value(f"all {len(expected)} records, {way}", trace.steps.tolist() == expected)
    assert trace.time is not None
    return (updates - 1) / float(trace.time[-1] - trace.time[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--pause", type=int, default=20, help="milliseconds by which each gradient is delayed")
    options = parser.parse_args()
    torch.manual_seed(0)
    problem = mlp_problem()
    for every in (1, 5, 20, options.updates):
        measured: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for way in WAYS:
                measured[way].append(rate(problem, way, options.updates, every, options.pause))
        between, threaded = (statistics.median(measured[way]) for way in WAYS)
        ratio = threaded / between
        print(f"a record every {every:>3} updates: {between:6.1f} updates/s with evaluation between updates, "
              f"{threaded:6.1f} in a thread, {ratio:.2f}x")  # fmt: skip
        verdict(f"evaluation in a thread does not slow the updates down ({ratio:.2f}x)", ratio >= 0.95)


if __name__ == "__main__":
    main()
