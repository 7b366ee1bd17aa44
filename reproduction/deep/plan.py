"""What is run: models, delays, rules with their learning rates, and how much at each scale."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lategrad.delays import by_stage
from lategrad.delays.stages import StageDelays
from lategrad.problems import ModuleProblem
from lategrad.rules import AnyRule
from lategrad.support.validation import require, require_choice
from reproduction.deep import large, models
from reproduction.study import Candidate, Plan, column, lr_grid
from reproduction.text import VOCABULARY, Tokens, load_characters, load_tokens

LOGNORMAL, PIPELINE = "lognormal", "pipeline"  # in a pipeline each stage has a delay of its own
DELAYS = ("0", "8", "64", "256", LOGNORMAL, PIPELINE)
"""By their names in tables; learning rates are frozen from the first."""
RANDOM_DELAYS = "lognormal:3.847,0.8"  # mean 64, median 46, and one in a hundred above 300
STAGES = {"mlp": 2, "cnn": 3, "gpt": 8}  # of the pipeline
TARGET_DELAYS = ("8", "64", "256")  # the delays that targets are stated for

_SGD, _ADAM, _AVERAGED = lr_grid(-4, 0), lr_grid(-5, -1), lr_grid(-4, 0)
CANDIDATES = (
    Candidate("steady-muon", _AVERAGED, ours=True, elementwise=False),
    Candidate("steady-adam", _AVERAGED, ours=True),
    Candidate("sgd-momentum", _SGD),
    Candidate("adamw", _ADAM),
    Candidate("nadam", _ADAM),
    Candidate("schedule-free-adamw", _AVERAGED),
    Candidate("muon", _ADAM, elementwise=False),
    Candidate("staleness-aware", lr_grid(-3, 1)),
    Candidate("gap-aware", _SGD),
    Candidate("pipemare", _ADAM),
    Candidate("weight-prediction", _ADAM),
    Candidate("ringmaster-muon", _AVERAGED, elementwise=False),
    Candidate("synchronous-adamw", _AVERAGED, synchronous="adamw"),
    Candidate("synchronous-muon", _AVERAGED, elementwise=False, synchronous="muon"),
)
RULES = tuple(candidate.rule for candidate in CANDIDATES)


@dataclass(frozen=True)
class DeepSetting:
    """A model, how it is trained, and which rules train it."""

    model: str
    updates: int
    batch: int
    delays: tuple[str, ...] = DELAYS
    tuned_at: tuple[str, ...] = DELAYS
    """Delays at which all learning rates are run; at the others, the frozen one alone."""
    tuning_seeds: int = 1  # seeds that all learning rates are run with; they are chosen by the first alone
    rules: tuple[str, ...] = RULES
    evaluate: int = 10_000  # rows or windows that the training loss is the mean over
    micro_batch: int = 2048  # rows of a large minibatch that are computed at once
    layers: int = 0  # of the GPT, as its width
    width: int = 0
    only_by_name: bool = False  # whether it is left out unless its model is named, as it takes long
    vocabulary: int = 84  # of the GPT
    protocols: tuple[str, ...] = ("frozen", "tuned", "drift")  # of the tables

    def __post_init__(self) -> None:
        require_choice("model", self.model, tuple(models.MODELS))
        require("tuned_at", self.tuned_at, self.tuned_at[:1] == ("0",), "delays of which the first is '0'")

    @property
    def name(self) -> str:
        return self.model

    @property
    def title(self) -> str:
        model = models.model_title(self.model, self.layers, self.width)
        return f"{model}; batch {self.batch}, {self.updates:,} updates"

    @property
    def by_loss(self) -> bool:
        """Whether the model is judged by its loss on held-out data; else by its accuracy."""
        return self.model.startswith("gpt")

    def mean_delay(self, delay: str) -> int:
        """Of a pipeline, the first stage's: the number of microbatches on their way through it."""
        return int(delay) if delay.isdecimal() else 64

    def rounds(self, delay: str) -> int:
        """How many updates one after another the delay leaves time for."""
        return self.updates // (1 + self.mean_delay(delay))

    def problem(self, batch: int) -> ModuleProblem:
        return models.build_problem(self.model, batch, evaluate=self.evaluate, micro_batch=self.micro_batch,
                                    layers=self.layers, width=self.width)  # fmt: skip

    def delay_model(self, delay: str) -> int | str | StageDelays:
        if delay == PIPELINE:
            return by_stage(self.problem(1), STAGES[self.model], delay=self.mean_delay(delay))
        return RANDOM_DELAYS if delay == LOGNORMAL else int(delay)

    def build(self, candidate: Candidate, lrs: Sequence[float]) -> AnyRule[Any]:
        """The rule with a run for each learning rate.

        PipeMare's K is a quarter of the run, as its authors choose it; anchors output the linearly weighted average.
        """
        changes: dict[str, Any] = {"annealing": self.updates / 4} if candidate.rule == "pipemare" else {}
        changes |= {"average": "linear"} if candidate.synchronous else {}
        return candidate.build(column(lrs), **changes)

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "updates", "batch", "evaluate", "layers", "width")}


_LARGE_LRS = {"steady-muon": (-3, -2), "steady-adam": (-3.5, -2.5), "muon": (-3, -2), "synchronous-muon": (-3, -1.5),
              "adamw": (-4, -3), "weight-prediction": (-4, -3), "synchronous-adamw": (-3.5, -2)}  # fmt: skip
"""Of the rules for the large model, log10 of the smallest and the largest learning rate."""
LARGE_CANDIDATES = tuple(replace(candidate, lrs=lr_grid(*_LARGE_LRS[candidate.rule]))
                         for candidate in CANDIDATES if candidate.rule in _LARGE_LRS)  # fmt: skip
_FEW = ("0", "64")


@dataclass(frozen=True)
class LargeSetting(DeepSetting):
    """A GPT on tokens of Python sources, trained in a plain loop: see :mod:`reproduction.deep.large`."""

    delays: tuple[str, ...] = ("0", "8", "64", LOGNORMAL, PIPELINE)
    tuned_at: tuple[str, ...] = _FEW
    rules: tuple[str, ...] = tuple(_LARGE_LRS)
    candidates: tuple[Candidate, ...] = LARGE_CANDIDATES
    characters: bool = False  # Shakespeare's, instead of tokens
    seed_count: int = 1
    evaluate: int = 1_024
    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 256
    parts: int = 1  # after each of which losses are recorded
    vocabulary: int = VOCABULARY
    only_by_name: bool = True

    def mean_delay(self, delay: str) -> int:
        kind, _, stages = delay.partition("-")
        return int(stages or large.STAGES) - 1 if kind == PIPELINE else super().mean_delay(delay)

    def delay_model(self, delay: str) -> int | str | StageDelays:
        return by_stage(self.gpt(), large.STAGES) if delay == PIPELINE else super().delay_model(delay)

    def gpt(self) -> nn.Module:
        return large.LargeGPT(self.vocabulary, self.context, self.layers, self.width, self.heads)

    @property
    def text(self) -> Tokens:
        return load_characters() if self.characters else load_tokens()

    def build(self, candidate: Candidate, lrs: Sequence[float]) -> AnyRule[Any]:
        return candidate.build(lrs[0] if len(lrs) == 1 else column(lrs))

    def describe(self) -> dict[str, Any]:
        own = {"context": self.context, "vocabulary": self.vocabulary, "text": self.text.sha256}
        return super().describe() | own

    def train(self, candidate: Candidate, delay: str, lr: float, seed: int, device: str) -> list[large.Losses]:
        """One run. Our rules average what they output; the learning rates of all others decay."""
        late, batches = (0, 1 + self.mean_delay(delay)) if candidate.synchronous else (self.delay_model(delay), 1)
        model = late.model if isinstance(late, StageDelays) else self.gpt()
        assert model is not None
        return [*large.train(
            model, self.text, self.build(candidate, [lr]), late, updates=self.updates // batches, batch=self.batch,
            micro_batches=batches, context=self.context, evaluate=self.evaluate, scheduled=not candidate.ours,
            seed=seed, device=device, parts=self.parts)]  # fmt: skip


_PIPELINE_LRS = {"steady-muon": -3, "muon": -3, "muon-prediction": -3, "rotated-adam": -3.5, "nadam": -3.5,
                 "adamw": -3.5}  # log10 of the smallest of three  # fmt: skip
PIPELINE_CANDIDATES = tuple(Candidate(rule, lr_grid(low, low + 1), rule == "steady-muon",
                                      elementwise=rule in ("nadam", "adamw"),
                                      undelayed="muon" if rule == "muon-prediction" else "")
                            for rule, low in _PIPELINE_LRS.items())  # fmt: skip
SMALL_PIPELINE_CANDIDATES = tuple(replace(candidate, lrs=lr_grid(-3, -2)) for candidate in PIPELINE_CANDIDATES)
LENGTHS = (0.1, 0.25, 0.5)  # of further runs without delay, and of their schedules: how much sooner is a loss reached?


@dataclass(frozen=True)
class PipelineSetting(LargeSetting):
    """A deep GPT as a pipeline of P stages: how many times the updates of one stage does it need?

    Stage k has a delay of P - 1 - k and 1/P of the blocks, the first also the embeddings and the last the last layer.
    """

    delays: tuple[str, ...] = ("0", "pipeline-8", "pipeline-16", "pipeline-32")  # by the number of stages
    tuned_at: tuple[str, ...] = ("0",)
    rules: tuple[str, ...] = tuple(_PIPELINE_LRS)
    candidates: tuple[Candidate, ...] = PIPELINE_CANDIDATES
    protocols: tuple[str, ...] = ("frozen", "slowdown", "drift")
    layers: int = 32
    parts: int = 10

    def delay_model(self, delay: str) -> int | StageDelays:
        first = self.mean_delay(delay)
        blocks = {f"blocks.{i}.*": first - i * (first + 1) // self.layers for i in range(self.layers)}
        return by_stage(self.gpt(), {**blocks, "norm.*": 0, "scores.*": 0, "*": first}) if first else 0

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"heads": self.heads, "parts": self.parts}


QUICK_RULES = ("steady-muon", "steady-adam", "adamw", "muon", "synchronous-muon")
GPT_RULES = (
    "steady-muon", "steady-adam", "adamw", "nadam", "schedule-free-adamw", "muon", "staleness-aware",
    "weight-prediction", "ringmaster-muon", "synchronous-adamw", "synchronous-muon",
)  # fmt: skip


_QUICK: dict[str, Any] = {"delays": _FEW, "tuned_at": _FEW, "rules": QUICK_RULES}
_GPT: dict[str, Any] = {"evaluate": 1024, "layers": 4, "width": 144, "micro_batch": 128}
_SMALL: dict[str, Any] = {
    "delays": ("0", "pipeline-8", "pipeline-32"), "candidates": SMALL_PIPELINE_CANDIDATES, "width": 64, "heads": 4,
    "context": 64, "evaluate": 64, "vocabulary": 84, "characters": True,
}  # fmt: skip
_LARGE = (LargeSetting("gpt-34m", 2_000, 16), LargeSetting("gpt-34m-long", 6_000, 16),
          LargeSetting("gpt-1m", 5_000, 16, delays=("0", "8", "64"), layers=4, width=144, heads=4, context=64,
                       vocabulary=84, characters=True),
          PipelineSetting("gpt-63m", 1_500, 8, width=384, heads=6, context=512, evaluate=128),
          PipelineSetting("gpt-2m", 400, 8, **_SMALL))  # fmt: skip
PLANS = {
    "quick": Plan(
        (
            DeepSetting("mlp", 1_000, 32, evaluate=2_000, **_QUICK),
            DeepSetting("cnn", 1_000, 32, evaluate=2_000, only_by_name=True, **_QUICK),
            DeepSetting("gpt", 1_000, 8, evaluate=128, layers=2, width=64, micro_batch=64, only_by_name=True, **_QUICK),
            LargeSetting("gpt-34m", 60, 4, delays=("0", "8", PIPELINE), tuned_at=("0",), evaluate=64, context=64,
                         layers=2, width=64),
            PipelineSetting("gpt-63m", 40, 8, parts=2, **_SMALL),
        ),
        CANDIDATES, seeds=1, lr_stride=2, judged=False,
    ),
    "paper": Plan(
        (DeepSetting("mlp", 20_000, 32), DeepSetting("cnn", 20_000, 32),
         DeepSetting("gpt", 5_000, 16, tuned_at=_FEW, rules=GPT_RULES, only_by_name=True, **_GPT), *_LARGE),
        CANDIDATES, seeds=3,
    ),
    "full": Plan((*(DeepSetting(model, 20_000, 32, tuning_seeds=3) for model in ("mlp", "cnn")),
                  DeepSetting("gpt", 20_000, 16, **_GPT), *_LARGE), CANDIDATES, seeds=3),
}  # fmt: skip
