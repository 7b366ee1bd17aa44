"""What is run: models, workers and their speeds, outer rules with their steps, and how much at each scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lategrad.delays.clocks import Barrier, Cluster, Worker
from lategrad.problems import LocalSteps, Synchronous
from lategrad.registry import build_rule
from lategrad.rules import AnyRule
from lategrad.sets import WholeSpace
from lategrad.support.validation import Scalar, require_choice
from reproduction.deep import setup as deep
from reproduction.sweep import half_decades

TUNING_SEED = 1000
"""All steps are chosen with it; no number that is shown comes from it."""


@dataclass(frozen=True)
class Contender:
    """An outer rule and the steps that it may choose from."""

    rule: str
    steps: tuple[float, ...]
    ours: bool = False
    synchronous: str = ""
    """The rule behind an anchor: workers wait for each other, and it gets the mean of what they send."""

    def build(self, steps: Sequence[float] | float, workers: int) -> AnyRule[Any]:
        """The rule with a step, or with a run for each of several.

        Delayed Nesterov's period is the number of workers, as its authors say.
        """
        lr: Scalar = steps if isinstance(steps, float) else torch.tensor(steps, dtype=torch.float64).unsqueeze(-1)
        rule = build_rule(self.synchronous or self.rule, lr, WholeSpace())
        changes: dict[str, Any] = {"period": workers} if self.rule == "delayed-nesterov" else {}
        return dataclasses.replace(rule, **changes) if changes else rule  # type: ignore[type-var]

    def is_at_end(self, place: int) -> bool:
        """Whether a step is the first or the last of the grid."""
        return place in (0, len(self.steps) - 1)


_OUTER, _STEPS = half_decades(-3, 0.5), half_decades(-4, -0.5)
CONTENDERS = (
    Contender("steady-muon", _STEPS, ours=True),
    Contender("steady-adam", _STEPS, ours=True),
    Contender("steady", half_decades(-1.5, 2), ours=True),
    Contender("sgd", _OUTER),
    Contender("nesterov", _OUTER),
    Contender("delayed-nesterov", _OUTER),
    Contender("momentum-look-ahead", _OUTER),
    Contender("fed-buff", _OUTER),
    Contender("fed-async", _OUTER),
    Contender("synchronous-diloco", _OUTER, synchronous="nesterov"),
)
RULES = tuple(contender.rule for contender in CONTENDERS)
ANCHOR = "synchronous-diloco"
MODELS = ("cnn", "gpt")


@dataclass(frozen=True)
class Setting:
    """A model, the steps of a job, and for how long it is trained."""

    model: str
    local_steps: int
    """H."""
    rounds: int
    """Of synchronous training; all others have the virtual time that these take."""
    batch: int
    inner: str
    workers: int = 16
    slowest: float = 6.0
    """Virtual seconds that the slowest worker takes for a gradient; the fastest takes 1, the others lie between."""
    evaluate: int = 4_096
    layers: int = 0
    """Of the GPT, as its width."""
    width: int = 0
    only_by_name: bool = False
    """Whether it is left out unless its model is named, as it takes long."""

    def __post_init__(self) -> None:
        require_choice("model", self.model, MODELS)

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.model}-{self.local_steps}"

    @property
    def seconds(self) -> float:
        """Virtual ones, for everybody."""
        return self.rounds * self.local_steps * self.slowest

    def speeds(self) -> list[Worker]:
        """Equally spaced times for a gradient."""
        spread = torch.linspace(1, self.slowest, self.workers, dtype=torch.float64)
        return [Worker(mean=mean) for mean in spread.tolist()]

    def cluster(self) -> Cluster:
        """All workers, none of which waits."""
        return Cluster(self.speeds(), self.local_steps)

    def alone(self) -> Cluster:
        """The fastest worker by itself: there is no delay."""
        return Cluster(self.speeds()[:1], self.local_steps)

    def together(self) -> Barrier:
        """All workers, who wait for each other."""
        return Barrier(self.speeds(), self.local_steps)

    def pauses(self) -> dict[int, str]:
        """For a real training whose workers wait instead of computing: the milliseconds of each worker's jobs."""
        return {
            number: f"constant:{1000 * self.local_steps * worker.mean:g}" for number, worker in enumerate(self.speeds())
        }

    def updates(self, cluster: Cluster) -> int:
        """How many jobs arrive in time."""
        most = sum(int(self.seconds / (self.local_steps * worker.mean)) for worker in cluster.workers)
        time = cluster.draw(most, 0).time
        assert time is not None
        return int((time <= self.seconds * (1 + 1e-9)).sum())

    def problem(self) -> LocalSteps:
        """The model with its data and the inner optimizer; always the same first parameters."""
        plain = deep.Setting(self.model, 1, self.batch, evaluate=self.evaluate, layers=self.layers, width=self.width)
        return LocalSteps(plain.problem(self.batch), self.local_steps, self.inner)

    def synchronous(self) -> Synchronous:
        """The same in rounds."""
        return Synchronous(self.problem(), self.workers)

    def describe(self) -> dict[str, Any]:
        """What a run depends on."""
        return {name: value for name, value in vars(self).items() if name != "only_by_name"}


@dataclass(frozen=True)
class Config:
    """Everything that was chosen."""

    settings: tuple[Setting, ...]
    rules: tuple[str, ...]
    seeds: int
    every_step: int = 1
    """Take every n-th step of the grids: 1 for half decades, 2 for decades."""
    targets: bool = True
    """Whether the run is long enough to be held against the targets."""

    def limited(self, models: Sequence[str], rules: Sequence[str]) -> Config:
        """The same with these models and rules alone; none given means all."""
        for model in models:
            require_choice("--models", model, MODELS)
        for rule in rules:
            require_choice("--rules", rule, RULES)
        return dataclasses.replace(
            self,
            settings=tuple(s for s in self.settings if (s.model in models if models else not s.only_by_name)),
            rules=tuple(rule for rule in self.rules if not rules or rule in rules),
        )

    @cached_property
    def contenders(self) -> list[Contender]:
        """The rules, with the steps of this scale."""
        return [
            dataclasses.replace(contender, steps=contender.steps[:: self.every_step])
            for contender in CONTENDERS
            if contender.rule in self.rules
        ]

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        """Those that are shown."""
        return tuple(range(self.seeds))


_CNN, _GPT = "adamw:lr=0.003", "adamw:lr=0.001"
"""AdamW's best steps without delay on these models (docs/deep.md)."""
_SMALL_GPT: dict[str, Any] = {"layers": 2, "width": 64}


def _both(model: str, batch: int, inner: str, seconds: int, **options: Any) -> tuple[Setting, ...]:
    """20 and 100 local steps, for the same time."""
    return tuple(Setting(model, h, seconds // h, batch, inner, **options) for h in (20, 100))


CONFIGS = {
    "quick": Config(
        (
            Setting("cnn", 10, 6, 32, _CNN, evaluate=1_000),
            Setting("gpt", 10, 6, 8, _GPT, evaluate=64, only_by_name=True, **_SMALL_GPT),
        ),
        rules=("steady-muon", "sgd", "nesterov", "delayed-nesterov", "momentum-look-ahead", "fed-buff", ANCHOR),
        seeds=1, every_step=2, targets=False,
    ),
    "paper": Config(
        (*_both("gpt", 8, _GPT, 600, evaluate=512, **_SMALL_GPT), *_both("cnn", 32, _CNN, 600)), rules=RULES, seeds=3
    ),
    "full": Config(
        (*_both("gpt", 8, _GPT, 2_000, evaluate=1_024, **_SMALL_GPT), *_both("cnn", 32, _CNN, 2_000)),
        rules=RULES, seeds=3,
    ),
}  # fmt: skip
