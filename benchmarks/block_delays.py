"""Pipelines whose rule is told one delay, the longest, against rules that are told the delay of each tensor.

A network of eight layers on scikit-learn's digits, as a pipeline of 4 stages with delays from 64 evenly down to 0, and
of 8 stages with delays from 7 down to 0. The learning rate is the one of the smallest training loss without delay, and
stays. Training losses at the end, means over seeds; "tuned" is the best of all learning rates in hindsight.

    python -m benchmarks.block_delays             # about 4 minutes on one core
    python -m benchmarks.block_delays --steps 500 --seeds 0 --rules steady-muon
    python -m benchmarks.block_delays --speed     # processor time of an optimizer's step instead
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad.delays import by_stage
from lategrad.problems import ModuleProblem, load
from lategrad.sets import ConvexSet

LAYERS, WIDTH, BATCH = 8, 32, 16
PIPELINES = {"4 stages, 64 to 0": (4, 64), "8 stages, 7 to 0": (8, 7)}
LRS = torch.logspace(-4, -1, 7, dtype=torch.float64)
RULES = {
    "steady-muon": lg.SteadyMuon,
    "steady-adam": lg.SteadyAdam,
    "pipemare": lg.baselines.PipeMare,
    "weight-prediction": lg.baselines.WeightPrediction,
}


@dataclass(frozen=True, eq=False)
class OneDelay:
    """A rule that is told the longest delay alone, because it says nothing of blocks."""

    rule: Any

    @property
    def domain(self) -> ConvexSet:
        return self.rule.domain

    def init(self, x0: Tensor) -> Any:
        return self.rule.init(x0)

    def query(self, state: Any) -> Tensor:
        return self.rule.query(state)

    def update(self, state: Any, grad: Tensor, delay: Any) -> Any:
        return self.rule.update(state, grad, delay)

    def output(self, state: Any) -> Tensor:
        return self.rule.output(state)


def digits(seed: int) -> ModuleProblem:
    """Eight layers with skips between those of equal width."""
    torch.manual_seed(seed)
    hidden = [Residual(WIDTH) for _ in range(LAYERS - 2)]
    return ModuleProblem(
        nn.Sequential(nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 10)), load("digits"), batch=BATCH
    )


class Residual(nn.Module):
    """A layer whose input is added to what it returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(x))


def build(problem: ModuleProblem, name: str, told: str) -> Any:
    shapes = {"blocks": problem.blocks} if name == "steady-muon" else {}
    rule = RULES[name](lr=LRS[:, None], **shapes)
    return rule if told == "each" else OneDelay(rule)


def losses(problem: ModuleProblem, rule: Any, delays: Any, steps: int, seeds: list[int]) -> Tensor:
    """Training losses at the end by learning rate, ``(..., lrs)``, means over seeds; infinite where one diverged."""
    trace = lg.simulate(problem, rule, delays, steps, seed=seeds, record_every=steps, axes=["lr"], compile=False)
    return torch.nan_to_num(trace.loss[-1], nan=torch.inf).mean(0)


def step_milliseconds(make: Any, told: str, steps: int = 20) -> float:
    """Processor time of a step on 60 matrices of 128 x 128."""
    params = [nn.Parameter(torch.randn(128, 128)) for _ in range(60)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer, delay = make(params), 3 if told == "one" else list(range(60))
    for _ in range(3):
        optimizer.step(delay=delay)
    begin = time.process_time()
    for _ in range(steps):
        optimizer.step(delay=delay)
    return 1e3 * (time.process_time() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        for make in (lg.optim.SteadyMuon, lg.optim.SteadyAdam):
            one, each = step_milliseconds(make, "one"), step_milliseconds(make, "each")
            print(f"{make.__name__}: {one:.3g} ms with one delay, {each:.3g} ms with one for each tensor")
        return
    problem = digits(0)
    profiles = [by_stage(problem, stages, delay=delay) for stages, delay in PIPELINES.values()]
    print("| rule | lr | no delay | pipeline | one delay | each its own | tuned: one | tuned: each |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.rules:
        undelayed = losses(problem, build(problem, name, "one"), 0, options.steps, options.seeds)
        frozen = int(undelayed.argmin())
        one, each = (losses(problem, build(problem, name, told), profiles, options.steps, options.seeds)
                     for told in ("one", "each"))  # fmt: skip
        for i, pipeline in enumerate(PIPELINES):
            cells = undelayed[frozen], one[i, frozen], each[i, frozen], one[i].min(), each[i].min()
            start, *rest = [f"{float(cell):.2g}" for cell in cells]
            print(f"| {name} | {float(LRS[frozen]):.2g} | {start} | {pipeline} | {' | '.join(rest)} |", flush=True)


if __name__ == "__main__":
    main()
