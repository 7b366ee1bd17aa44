"""Runs that are short against the delay: every rule, learning rate frozen, after 1,500 updates and more.

The learning rate is the one of the smallest training loss at delay 0 after as many updates; a second hyper-parameter,
where a rule has one, is granted in hindsight. `--parts` has Steady with one part changed at a time instead of the
baselines. The last row is no rule but an anchor: descent with exact gradients, one for each round, with the learning
rate that is best there.

    python -m benchmarks.short_runs digits --seeds 1 2
    python -m benchmarks.short_runs digits --seeds 0 --parts
    python -m benchmarks.short_runs letters --seeds 100 --rules steady-short steady ada-delay
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import lategrad as lg
from benchmarks.mlbench import UNSEEN
from lategrad.learners.learner import safe_ratio, squared_norm
from lategrad.problems import SoftmaxRegression
from lategrad.rules.rule import average_in
from lategrad.rules.steady import SteadyState
from lategrad.simulator import simulate
from reproduction.baselines.plan import CANDIDATES as BASELINES
from reproduction.baselines.plan import SoftmaxSetting
from reproduction.study import Candidate
from reproduction.style import TITLES, three_digits

DELAYS = [100, 300, 1000]
SETTINGS = {"digits": SoftmaxSetting("digits", 20_000, 16), "letters": UNSEEN[0]}
STEADY = next(candidate for candidate in BASELINES if candidate.rule == "steady")
SGD = next(candidate for candidate in BASELINES if candidate.rule == "sgd-linear")
CANDIDATES = (
    dataclasses.replace(STEADY, rule="steady-short"),
    *BASELINES,
    dataclasses.replace(SGD, rule="sgd"),
)


@dataclass(frozen=True, eq=False)
class Changed(lg.Steady):
    """Steady with other weights of the gradients, other weights in S, or without the shortened step."""

    weight_of_query: bool = True
    """Gradients weighed by their query's time s, as Steady does; else by t."""
    squares_of_query: bool = False
    """The same in S; Steady has t."""
    shortened: bool = True

    def update(self, state: SteadyState, grad: Tensor, delay: Tensor) -> SteadyState:
        """As Steady, but for what was changed."""
        t = state.t + 1
        s = (t - delay).clamp_min(1)
        lr = self._step(state.w, t, delay) if self.shortened else self.lr
        squares = state.squares + (s if self.squares_of_query else t) ** 2 * squared_norm(grad)
        step = safe_ratio(lr * (s if self.weight_of_query else t), squares.sqrt())
        w = self.domain.project(state.w - (step * grad).to(state.w.dtype))
        return SteadyState(w=w, x=average_in(state.x, w, 2 / (t + 2)), squares=squares, t=t)


PARTS = {
    "Steady": {},
    "gradients weighed by t": {"weight_of_query": False},
    "S weighed by s": {"squares_of_query": True},
    "no shortened step": {"shortened": False},
    "weighed by t, no shortened step": {"weight_of_query": False, "shortened": False},
    "query is the iterate": {"c": 1e9},
    "query is the average": {"c": 0.0},
}


def build(candidate: Candidate, lrs: Tensor) -> object:
    """The rule with these learning rates, ``(knobs or 1, n, 1)``, and all values of its knob."""
    return Changed(lrs, **PARTS[candidate.rule]) if candidate.rule in PARTS else candidate.build(lrs)


def at(trace: lg.Trace, updates: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Loss and accuracy after these updates, means over seeds; what diverged has accuracy 0."""
    records = [trace.steps.tolist().index(T) for T in updates]
    loss = torch.nan_to_num(trace.loss[records], nan=torch.inf)
    accuracy = torch.where(loss.isfinite(), trace.accuracy[records], 0.0)
    return loss.mean(1), accuracy.mean(1)


def frozen_accuracy(problem: SoftmaxRegression, candidate: Candidate, updates: list[int], seeds: list[int]) -> Tensor:
    """Accuracies, (updates, 1 + delays), with the rate of the smallest training loss at delay 0 after as many."""
    last, every = max(updates), math.gcd(*updates)
    grid = torch.tensor(candidate.lrs, dtype=torch.float64)
    trace = simulate(problem, build(candidate, grid.view(1, -1, 1)), [0], last, seed=seeds, record_every=every)
    loss, undelayed = at(trace, updates)  # (updates, 1, knobs, lrs)
    chosen = loss.squeeze(1).argmin(-1)  # (updates, knobs)
    rule = build(candidate, grid[chosen.T].unsqueeze(-1))  # every run has the rates of all horizons
    _, late = at(simulate(problem, rule, DELAYS, last, seed=seeds, record_every=every), updates)
    rows = []
    for i in range(len(updates)):
        knob = int(late[i, :, :, i].mean(0).argmax())
        rows.append(torch.cat([undelayed[i, :, knob, chosen[i, knob]], late[i, :, knob, i]]))
    return torch.stack(rows)


def descent(problem: SoftmaxRegression, rounds: int, step: float, momentum: bool) -> Tensor:
    """The point of gradient descent, or Nesterov's method, after n exact gradients."""
    x = before = problem.start().double()
    for k in range(1, rounds + 1):
        y = x + momentum * (k - 1) / (k + 2) * (x - before)
        before, x = x, y - step * problem.value_and_gradient(y)[1]
    return x.float()


def anchor(problem: SoftmaxRegression, rounds: int, steps: Sequence[float]) -> float:
    """Accuracy of descent with exact gradients, momentum and rate chosen by the training loss at the end."""
    ends = torch.stack([descent(problem, rounds, step, momentum) for step in steps for momentum in (False, True)])
    return problem.accuracy(ends)[problem.loss(ends).squeeze(-1).argmin()].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=sorted(SETTINGS))
    parser.add_argument("--updates", type=int, nargs="+", default=[1500, 5000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--rules", nargs="+", help="these only, in this order")
    parser.add_argument("--out", type=Path, default=Path("out/short"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    setting = SETTINGS[args.data]
    problem = setting.problem()
    candidates = [dataclasses.replace(STEADY, rule=name) for name in PARTS] if args.parts else list(CANDIDATES)
    if args.rules:
        named = {candidate.rule: candidate for candidate in candidates}
        candidates = [named[rule] for rule in args.rules]
    found: dict[str, Tensor] = {}
    for candidate in candidates:
        words = (args.data, candidate.rule, *args.updates, "seeds", *args.seeds)
        path = args.out / ("-".join(map(str, words)).replace(" ", "_") + ".pt")
        if not path.exists():
            torch.save(frozen_accuracy(problem, candidate, args.updates, args.seeds), path)
        found[TITLES.get(candidate.rule, candidate.rule)] = torch.load(path)
    for i, T in enumerate(args.updates):
        columns = " | ".join(map(str, [0, *DELAYS]))
        print(f"\n**{args.data}, {T:,} updates**\n\n| rule | {columns} |\n|" + "---|" * 5)
        for title, accuracy in sorted(found.items(), key=lambda row: -row[1][i, 1:].mean().item()):
            print(f"| {title} | " + " | ".join(map(three_digits, accuracy[i].tolist())) + " |")
        rounds = [math.ceil(T / (1 + tau)) for tau in DELAYS]
        best = [anchor(problem, k, STEADY.lrs) for k in rounds]
        print("| exact gradients, " + ", ".join(map(str, rounds)) + " rounds | | "
              + " | ".join(map(three_digits, best)) + " |")  # fmt: skip


if __name__ == "__main__":
    main()
