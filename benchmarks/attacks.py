"""Workers that are not to be trusted: what bad gradients do to training, without a defence and with each.

Printed by ``python -m benchmarks.faults --only attacks``. The accuracy of softmax regression on digits after 3,000
updates. In the simulator the delay is 7, and 1 or 2 of 8 gradients are bad, picked by what is in their minibatch; in
real runs of 8 workers, 1 or 2 of them are bad.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lategrad as lg
from lategrad.problems import SoftmaxRegression, load
from lategrad.rules import AnyRule

STEPS, WORKERS = 3000, 8
_NOISE = torch.Generator().manual_seed(0)

ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda grad: grad,
    "sign flipped, x 10": lambda grad: -10 * grad,
    "scaled by 1000": lambda grad: 1000 * grad,
    "random": lambda grad: torch.randn(grad.shape, generator=_NOISE).to(grad),
    "constant": lambda grad: torch.linspace(-1, 1, grad.shape[-1]).to(grad).expand_as(grad),
}


class Defence(NamedTuple):
    """A rule, and options of the simulator and of real training alike."""

    rule: AnyRule[Any]
    options: dict[str, float]


PLAIN = lg.SGD(lr=0.05)
DEFENCES = {
    "SGD": Defence(PLAIN, {}),
    "max_norm_ratio=5": Defence(PLAIN, {"max_norm_ratio": 5.0}),
    "clip=0.5": Defence(PLAIN, {"clip": 0.5}),
    "clip=0.2": Defence(PLAIN, {"clip": 0.2}),
    "CenteredClipping, radius=0.2": Defence(lg.CenteredClipping(lr=0.05, radius=0.2), {}),
}


class Attacked(SoftmaxRegression):
    """Some of whose gradients are bad: ``bad`` of 8."""

    def __init__(self, attack: str, bad: int) -> None:
        super().__init__(load("digits"), batch=32)
        self.attack, self.bad = ATTACKS[attack], bad

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """As it is sent."""
        grad = super().gradient(x, sample)
        return torch.where(self.is_bad(sample), self.attack(grad), grad)

    def is_bad(self, sample: Tensor) -> Tensor:
        """By the rows of the minibatch."""
        return sample.sum(dim=-1, keepdim=True) % WORKERS < self.bad


class Infiltrated(Attacked):
    """The first workers are bad, which they can tell by the names of their threads."""

    def is_bad(self, sample: Tensor) -> Tensor:
        """By the worker."""
        return torch.tensor(int(threading.current_thread().name.rpartition("-")[2]) < self.bad)


def simulated(attack: str, bad: int, defence: Defence) -> float:
    """The accuracy at the end."""
    problem = Attacked(attack, bad)
    return _accuracy(lg.simulate(problem, defence.rule, 7, STEPS, progress=False, **defence.options))


def trained(attack: str, bad: int, defence: Defence) -> float:
    """The same with real workers; one all of whose gradients are refused goes on sending them."""
    problem = Infiltrated(attack, bad)
    return _accuracy(lg.train(problem, defence.rule, steps=STEPS, workers=WORKERS, engine="threads", progress=False,
                              record_every=STEPS, max_refusals=None, **defence.options))  # fmt: skip


def _accuracy(trace: lg.Trace) -> float:
    assert trace.accuracy is not None
    return float(trace.accuracy[-1])


def show_attacks() -> None:
    """Both tables."""
    for where, accuracy in (("simulated", simulated), ("real", trained)):
        print(f"| {where}: bad gradients | {' | '.join(DEFENCES)} |\n|---|{'---|' * len(DEFENCES)}")
        for attack in ATTACKS:
            for bad in (1, 2) if attack != "none" else (0,):
                row = " | ".join(f"{accuracy(attack, bad, defence):.3f}" for defence in DEFENCES.values())
                print(f"| {attack}, {bad} of {WORKERS} | {row} |", flush=True)
