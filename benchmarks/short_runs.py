"""Where runs are short against the delay: Steady, and the changes to it that docs/steady.md reports on.

Digits, choosing on a validation part of the training rows (the test part is not looked at), and Fashion-MNIST with
`--fashion`. About five minutes on one core, ten more with Fashion-MNIST.

    python benchmarks/short_runs.py --fashion
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import lategrad as lg
from lategrad.learners.learner import safe_ratio
from lategrad.problems import SoftmaxRegression, load
from lategrad.rules.rule import average_in, first_query
from lategrad.simulate import simulate
from lategrad.support.runs import per_run

DELAYS = [0, 100, 250, 500, 1000]


class AgreeingState(NamedTuple):
    """State of `Agreeing`; w, x and t as Steady's."""

    w: Tensor
    x: Tensor
    recent: Tensor
    """About the mean of the last 1 + tau weighted gradients."""
    squares: Tensor
    t: Tensor


@dataclass(frozen=True, eq=False)
class Agreeing:
    """Steady with weights t and a normaliser that counts how much late gradients agree with those they missed.

    With `first` > 0 the gradients of the first query are one step of length first * lr along their mean.
    """

    lr: Tensor
    first: float = 0.0
    c: float = 30.0
    domain: lg.sets.ConvexSet = lg.WholeSpace()

    def init(self, x0: Tensor) -> AgreeingState:
        """As Steady."""
        w = first_query(self, x0)
        return AgreeingState(w, w.clone(), 0 * w.double(), per_run(w, 0), per_run(w, 0))

    def query(self, state: AgreeingState) -> Tensor:
        """As Steady's."""
        theta = (self.c / (state.t + 1).sqrt()).clamp_max(1)
        return torch.lerp(state.x, state.w, theta.to(state.x.dtype))

    def update(self, state: AgreeingState, grad: Tensor, delay: Tensor) -> AgreeingState:
        """One step on t g; the normaliser grows with what the gradient shares with those it missed."""
        t = state.t + 1
        weighted = t * grad.double()
        missed = delay * state.recent
        agreement = (weighted * missed).sum(-1, keepdim=True).clamp_min(0)
        squares = state.squares + weighted.square().sum(-1, keepdim=True) + agreement
        eta = safe_ratio(1.0, squares.sqrt())
        move = eta * weighted
        if self.first:
            before = torch.where(state.squares > 0, safe_ratio(1.0, state.squares.sqrt()), eta)
            together = self.first * (eta * weighted - (before - eta) * missed)
            move = torch.where(delay == t - 1, together, move)
        w = self.domain.project(state.w - (self.lr * move).to(state.w.dtype))
        recent = state.recent + (weighted - state.recent) / (1 + delay)
        return AgreeingState(w, average_in(state.x, w, 2 / (t + 2)), recent, squares, t)

    def output(self, state: AgreeingState) -> Tensor:
        """As Steady's."""
        return state.x


RULES = {
    "Steady": lg.Steady,
    "agreement counted": Agreeing,
    "and a first step of 10 lr": lambda lr: Agreeing(lr, first=10.0),
    "and a first step of 4 lr": lambda lr: Agreeing(lr, first=4.0),
}


def validation() -> SoftmaxRegression:
    """Digits without the test part: the last fifth of the training rows is what accuracies are measured on."""
    from sklearn.model_selection import train_test_split

    digits = load("digits", "standardise-globally")
    parts = train_test_split(
        digits.x_train.numpy(), digits.y_train.numpy(), test_size=287, random_state=1, stratify=digits.y_train.numpy()
    )
    x_train, x_held, y_train, y_held = map(torch.from_numpy, parts)
    held = digits._replace(x_train=x_train, y_train=y_train, x_test=x_held, y_test=y_held)
    return SoftmaxRegression(held, batch=16)


def steps(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = validation()
    fashion = SoftmaxRegression(load("fashion-mnist", "standardise-globally"), batch=64) if args.fashion else None
    for name, build in RULES.items():
        trace = simulate(
            digits, build(steps(0.01, 0.1, 1.0, 10.0, 100.0)), DELAYS, 5000, seed=[100, 101], record_every=500
        )
        for updates in (1500, 5000):
            at = trace.steps.tolist().index(updates)
            loss, accuracy = trace.loss[at].mean(0), trace.accuracy[at].mean(0)
            best = loss[0].argmin()  # the step of the smallest training loss at delay 0
            print(f"{name}: digits, {updates} updates: " + " / ".join(f"{a:.3f}" for a in accuracy[:, best]))
        if fashion is not None:
            trace = simulate(fashion, build(1.0), [0, 500, 1000], 15_000, seed=7, record_every=15_000)
            print(f"{name}: Fashion-MNIST, 15,000 updates: " + " / ".join(f"{a:.3f}" for a in trace.accuracy[-1]))


if __name__ == "__main__":
    main()
