"""What is run: models, delays, rules with their steps, and how much at each scale."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from lategrad.delays import by_stage
from lategrad.problems import LanguageProblem, ModuleProblem, Text
from lategrad.registry import build_rule
from lategrad.rules import AnyRule
from lategrad.sets import WholeSpace
from lategrad.simulator import Delays
from lategrad.support.validation import Scalar, require, require_choice
from reproduction.deep.models import GPT, cnn, mlp
from reproduction.sweep import dataset, half_decades
from reproduction.text import load_shakespeare

DELAYS: dict[str, Delays] = {"0": 0, "8": 8, "64": 64, "256": 256, "lognormal": "lognormal:3.847,0.8"}
"""By their names in tables; the first is the one that steps are frozen from. The last has mean 64, median 46, and one
in a hundred above 300."""
PIPELINE = "pipeline"
"""One more: each stage of the model is late by its own number of updates, the first by 64, the last by none."""
STAGES = {"mlp": 2, "cnn": 3, "gpt": 8}
"""Of the pipeline."""
MEAN_DELAY = {"0": 0, "8": 8, "64": 64, "256": 256, "lognormal": 64, PIPELINE: 64}
"""Of a pipeline, the first stage's: in a round as many microbatches go through it as were on their way."""
LATE = ("8", "64", "256")
"""The delays that targets are stated for."""


@dataclass(frozen=True)
class Contender:
    """A rule and the nine steps that it may choose from."""

    rule: str
    steps: tuple[float, ...]
    ours: bool = False
    elementwise: bool = True
    """Whether it looks at single entries alone, not at matrices."""
    synchronous: str = ""
    """The rule behind an anchor: it gets the same gradients in as many rounds as there are, and no delay."""

    @property
    def base(self) -> str:
        """The name in the registry."""
        return self.synchronous or self.rule

    def build(self, steps: Sequence[float], updates: int) -> AnyRule[Any]:
        """The rule with a run for each step.

        PipeMare's K is a quarter of the run, as its authors choose it; anchors output the linearly weighted average.
        """
        lr: Scalar = torch.tensor(steps, dtype=torch.float64).unsqueeze(-1)
        rule = build_rule(self.base, lr, WholeSpace())
        changes: dict[str, Any] = {"annealing": updates / 4} if self.base == "pipemare" else {}
        changes |= {"average": "linear"} if self.synchronous else {}
        return dataclasses.replace(rule, **changes) if changes else rule  # type: ignore[type-var]


_SGD, _ADAM, _AVERAGED = half_decades(-4, 0), half_decades(-5, -1), half_decades(-4, 0)
CONTENDERS = (
    Contender("steady-muon", _AVERAGED, ours=True, elementwise=False),
    Contender("steady-adam", _AVERAGED, ours=True),
    Contender("sgd-momentum", _SGD),
    Contender("adamw", _ADAM),
    Contender("nadam", _ADAM),
    Contender("schedule-free-adamw", _AVERAGED),
    Contender("muon", _ADAM, elementwise=False),
    Contender("staleness-aware", half_decades(-3, 1)),
    Contender("gap-aware", _SGD),
    Contender("dana-slim", _SGD),
    Contender("pipemare", _ADAM),
    Contender("weight-prediction", _ADAM),
    Contender("ringmaster-muon", _AVERAGED, elementwise=False),
    Contender("synchronous-adamw", _AVERAGED, synchronous="adamw"),
    Contender("synchronous-muon", _AVERAGED, elementwise=False, synchronous="muon"),
)
RULES = tuple(contender.rule for contender in CONTENDERS)


@dataclass(frozen=True)
class Setting:
    """A model, how it is trained, and which rules train it."""

    model: str
    updates: int
    batch: int
    tuned_at: tuple[str, ...] = (*DELAYS, PIPELINE)
    """Delays at which all steps are run; at the others, the frozen one alone."""
    tuning_seeds: int = 1
    """Seeds that all steps are run with; steps are chosen by the first alone."""
    rules: tuple[str, ...] = RULES
    evaluate: int = 10_000
    """Rows or windows that the training loss is the mean over."""
    micro_batch: int = 2048
    """Rows of a large minibatch that are taken at once."""
    layers: int = 0
    """Of the GPT, as its width."""
    width: int = 0
    only_by_name: bool = False
    """Whether it is left out unless its model is named, as it takes long."""

    def __post_init__(self) -> None:
        require_choice("model", self.model, tuple(MODELS))
        require("tuned_at", self.tuned_at, self.tuned_at[:1] == ("0",), "delays of which the first is '0'")

    @property
    def by_loss(self) -> bool:
        """Whether the model is judged by its loss on held-out data; else by its accuracy."""
        return self.model == "gpt"

    def rounds(self, delay: str) -> int:
        """How many steps one after another the delay leaves time for."""
        return self.updates // (1 + MEAN_DELAY[delay])

    def problem(self, batch: int) -> ModuleProblem:
        """The model with its data; always the same first parameters."""
        if self.model == "gpt":
            text = shakespeare()
            module: torch.nn.Module = GPT(len(text.vocabulary), layers=self.layers, width=self.width)
            return LanguageProblem(module, text, batch=batch, evaluate=self.evaluate, micro_batch=self.micro_batch)
        data = dataset("fashion-mnist", "standardise-globally")
        return ModuleProblem(
            _image_module(self.model), data, batch=batch, evaluate=self.evaluate, micro_batch=self.micro_batch
        )

    def delays(self, name: str) -> Delays:
        """What a delay's name in the tables means for this model."""
        if name != PIPELINE:
            return DELAYS[name]
        return by_stage(self.problem(1), STAGES[self.model], delay=MEAN_DELAY[PIPELINE])

    def describe(self) -> dict[str, Any]:
        """What a run depends on."""
        names = ("model", "updates", "batch", "evaluate", "layers", "width")
        return {name: getattr(self, name) for name in names}


MODELS = {"mlp": "MLP 784-64-10, Fashion-MNIST", "cnn": "CNN, Fashion-MNIST", "gpt": "character GPT, Shakespeare"}
"""By their names on the command line: what is trained, on what."""


def model_title(model: str, layers: int, width: int) -> str:
    """The same, with the size of a GPT."""
    return MODELS[model] + (f", {layers} layers of width {width}" if model == "gpt" else "")


_DRAWING = threading.Lock()


def _image_module(model: str) -> torch.nn.Module:
    """An own copy of the model with the first parameters of seed 0; threads that simulate share nothing."""
    with _DRAWING, torch.random.fork_rng(devices=[]):  # torch's layers draw from the one generator that all share
        torch.default_generator.manual_seed(0)
        return {"mlp": mlp, "cnn": cnn}[model]()


@lru_cache(maxsize=1)
def shakespeare() -> Text:
    """The text, loaded once."""
    return load_shakespeare()


@dataclass(frozen=True)
class Config:
    """Everything that was chosen."""

    settings: tuple[Setting, ...]
    seeds: int
    delays: tuple[str, ...] = (*DELAYS, PIPELINE)
    every_step: int = 1
    """Take every n-th step of the grids: 1 for half decades, 2 for decades."""
    targets: bool = True
    """Whether the run is long enough to be held against the targets."""

    def limited(self, models: Sequence[str], rules: Sequence[str]) -> Config:
        """The same with these models and rules alone; none given means all."""
        mine = tuple(setting.model for setting in self.settings)
        for model in models:
            require_choice("--models", model, mine)
        for rule in rules:
            require_choice("--rules", rule, RULES)
        settings = [
            dataclasses.replace(setting, rules=tuple(rule for rule in setting.rules if not rules or rule in rules))
            for setting in self.settings
            if (setting.model in models if models else not setting.only_by_name)
        ]
        return dataclasses.replace(self, settings=tuple(settings))

    def contenders(self, setting: Setting) -> list[Contender]:
        """The rules of a setting, with the steps of this scale."""
        return [
            dataclasses.replace(contender, steps=contender.steps[:: self.every_step])
            for contender in CONTENDERS
            if contender.rule in setting.rules
        ]

    @cached_property
    def all_seeds(self) -> tuple[int, ...]:
        """0, 1, ..."""
        return tuple(range(self.seeds))


QUICK_RULES = ("steady-muon", "steady-adam", "adamw", "schedule-free-adamw", "muon", "synchronous-muon")
GPT_RULES = (
    "steady-muon", "steady-adam", "adamw", "nadam", "schedule-free-adamw", "muon", "staleness-aware",
    "weight-prediction", "ringmaster-muon", "synchronous-adamw", "synchronous-muon",
)  # fmt: skip
_SOME = ("0", "64")


def _images(updates: int, **options: Any) -> tuple[Setting, ...]:
    return tuple(Setting(model, updates, 32, **options) for model in ("mlp", "cnn"))


CONFIGS = {
    "quick": Config(
        (
            *_images(1_500, rules=QUICK_RULES, tuned_at=("0", "64"), evaluate=2_000),
            Setting("gpt", 1_000, 8, ("0", "64"), rules=QUICK_RULES, evaluate=128, layers=2, width=64, micro_batch=64,
                    only_by_name=True),
        ),
        seeds=1, delays=("0", "64"), every_step=2, targets=False,
    ),
    "paper": Config(
        (
            *_images(20_000),
            Setting("gpt", 5_000, 16, _SOME, rules=GPT_RULES, evaluate=1024, layers=4, width=144, micro_batch=128,
                    only_by_name=True),
        ),
        seeds=3,
    ),
    "full": Config(
        (
            *_images(20_000, tuning_seeds=3),
            Setting("gpt", 20_000, 16, evaluate=1024, layers=4, width=144, micro_batch=128),
        ),
        seeds=3,
    ),
}  # fmt: skip
