"""What is run: kinds of delays, rules with the steps that they may choose from, data, and how much at each scale."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from lategrad.delays import ByClass
from lategrad.problems import SoftmaxRegression
from lategrad.registry import build_rule, parse_set
from lategrad.rules import AnyRule
from lategrad.simulator import Delays
from reproduction.part import Run
from reproduction.sweep import LOGNORMAL, dataset, half_decades

SCENARIOS: dict[str, Delays] = {
    "0": 0,
    "100": 100,
    "250": 250,
    "500": 500,
    "1000": 1000,
    "lognormal": LOGNORMAL,
    "10-1000-10": "regimes:0.33*10;0.34*1000;10",
    "slow worker": "cluster:workers=50,speed=lognormal,spread=0.4,slow=1x100",
    "by class": ByClass((0,) * 5 + (1000,) * 5, reduce="mean"),
}
"""Kinds of delays by their names in tables; the first is the one that steps are frozen from."""


def scenarios_for(classes: int) -> dict[str, Delays]:
    """The same kinds for a data set with another number of classes, the last half of which is late."""
    late = classes // 2
    return SCENARIOS | {"by class": ByClass((0,) * (classes - late) + (1000,) * late, reduce="mean")}


@dataclass(frozen=True)
class Contender:
    """A rule, the steps it may choose from, and a second number that only delays can tell apart."""

    rule: str
    steps: tuple[float, ...]
    knob: str = ""
    """The name of the second number, if it has one that neither its paper nor its theory settles."""
    values: tuple[float, ...] = ()
    projected: bool = False
    """Whether its theory covers the projection onto a ball."""

    def build(self, domain: str, every_step: int) -> AnyRule[Any]:
        """All its combinations as one rule; runs have the shape (values of the knob, steps)."""
        steps = torch.tensor(self.steps[::every_step], dtype=torch.float64)
        rule = build_rule(self.rule, steps.view(1, -1, 1), parse_set(domain))
        if not self.knob:
            return rule
        values = torch.tensor(self.values, dtype=torch.float64).view(-1, 1, 1)
        return dataclasses.replace(rule, **{self.knob: values})  # type: ignore[type-var]


_LOW, _MIDDLE, _HIGH = half_decades(-3, 1), half_decades(-2, 2), half_decades(-1, 3)
CONTENDERS = (
    Contender("sgd-linear", _LOW),
    Contender("anytime-sgd", _HIGH, projected=True),
    Contender("optimistic-anytime", _HIGH, projected=True),
    Contender("steady", _MIDDLE, projected=True),
    Contender("steady-coordinate", _MIDDLE),
    Contender("adaptive-revision", _LOW),
    Contender("async-adagrad", _LOW),
    Contender("ada-delay", _LOW, "smoothness", (1.0, 10.0, 100.0)),
    Contender("dc-asgd", _LOW),
    Contender("dc-asgd-a", _LOW),
    Contender("staleness-aware", half_decades(-3, 1)),
    Contender("delay-adaptive", _LOW),
    Contender("picky-sgd", _LOW, "distance", (0.1, 1.0, 10.0)),
    Contender("ringmaster", _LOW, "threshold", (1.0, 10.0, 100.0)),
    Contender("rennala", half_decades(-3, 1), "batch", (1.0, 10.0, 100.0)),
    Contender("clipped-sgd", half_decades(-3, 1), "clip", (0.1, 0.5, 2.0)),
    Contender("schedule-free", _LOW),
    Contender("unixgrad", _HIGH, projected=True),
)


@dataclass(frozen=True)
class Setting:
    """A data set, how many updates are made on it, and how many rows each uses."""

    data: str
    updates: int
    batch: int
    preprocessing: str = "standardise-globally"
    first_seed: int = 0


@dataclass(frozen=True)
class Config:
    """Everything that was chosen."""

    settings: tuple[Setting, ...]
    seeds: int
    every_step: int = 1
    """Take every n-th step of the grids: 1 for half decades, 2 for decades."""
    domains: tuple[tuple[str, str], ...] = (("unconstrained", "whole"), ("constrained", "ball:10"))
    """Names and sets."""
    contenders: tuple[Contender, ...] = CONTENDERS

    def problem(self, setting: Setting) -> SoftmaxRegression:
        """Softmax regression."""
        return SoftmaxRegression(dataset(setting.data, setting.preprocessing), batch=setting.batch)


UNSEEN = tuple(Setting(name, 20_000, 16, "standardise", first_seed=100) for name in ("letters", "satellite"))
"""Data and seeds on which nothing was chosen, neither a rule nor a constant."""

CONFIGS = {
    "quick": Config((Setting("digits", 20_000, 16),), seeds=1, every_step=2),
    "paper": Config((Setting("fashion-mnist", 46_875, 64), Setting("digits", 20_000, 16)), seeds=3),
    "full": Config((Setting("fashion-mnist", 187_500, 16), Setting("digits", 50_000, 16), *UNSEEN), seeds=3),
}


TOO_LARGE = ("fashion-mnist",)
"""Data sets on which the comparison takes hours on a CPU."""


def config_for(run: Run) -> Config:
    """What is run: without a GPU, not on the data sets that would take hours."""
    config = CONFIGS[run.scale]
    if run.device != "cpu":
        return config
    return dataclasses.replace(config, settings=tuple(s for s in config.settings if s.data not in TOO_LARGE))
