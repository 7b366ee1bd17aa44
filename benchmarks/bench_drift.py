"""The price of measuring drift: simulations in C and by torch, updates of a server, and a delayed optimizer.

python benchmarks/bench_drift.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import lategrad as lg
from lategrad.problems import Quadratic, SoftmaxRegression, load
from lategrad.serve import Server, Settings
from timing import report, side_by_side

DIM = 2_000_000


def simulation(compile: bool, drift: bool) -> Callable[[], object]:
    problem, rule = SoftmaxRegression(load("digits"), batch=16), lg.Steady(lr=torch.tensor([[0.1], [1.0], [10.0]]))
    return lambda: lg.simulate(problem, rule, [10, 100], 2000, compile=compile, drift=drift, record_every=2000)


def server(drift: bool) -> Callable[[], object]:
    """Two workers in turn, with gradients that cost nothing: an update and the copy of the next query alone."""
    problem, rule = Quadratic(dim=DIM), lg.Anytime(lg.OGD(lr=0.1))
    one = Server(problem, rule, Settings(steps=10**6, record_every=10**6, drift=drift, compile=True, threads=1))
    grad = torch.randn(DIM, dtype=problem.start().dtype)
    jobs = [one.join(0), one.join(1)]

    def deliver() -> None:
        for i, job in enumerate(jobs):
            assert job is not None
            jobs[i] = one.deliver(i, job.version, job.sequence, grad)

    return deliver


def optimizer(drift: bool) -> Callable[[], object]:
    """AdamW at a delay of 4, gradients computed beforehand."""
    params = [torch.nn.Parameter(torch.randn(DIM // 8)) for _ in range(8)]
    delayed = lg.optim.Delayed(torch.optim.AdamW(params), 4, drift=drift)
    for p in params:
        p.grad = torch.randn_like(p)
    return delayed.step


def main() -> None:
    torch.set_num_threads(1)
    pairs = {
        "a simulation in C, 6 runs, 2,000 updates": lambda drift: simulation(compile=True, drift=drift),
        "the same by torch": lambda drift: simulation(compile=False, drift=drift),
        f"two updates of a server, {DIM:,} entries": server,
        f"a step of Delayed(AdamW), {DIM:,} entries": optimizer,
    }
    for title, build in pairs.items():
        contenders = {"without drift": build(False), "with drift": build(True)}
        report(title, side_by_side(contenders, rounds=7, clock=time.thread_time), "without drift")


if __name__ == "__main__":
    main()
