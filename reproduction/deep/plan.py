"""What is run: models, delays, rules with their learning rates, and how much at each scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lategrad.delays import by_stage
from lategrad.problems import ModuleProblem
from lategrad.rules import AnyRule
from lategrad.simulator import Delays
from lategrad.support.validation import require, require_choice
from reproduction.deep import models
from reproduction.study import Candidate, Plan, column, lr_grid

PIPELINE = "pipeline"  # each stage of the model has a delay of its own, from 64 for the first down to 0 for the last
CONSTANT_OR_RANDOM: dict[str, Delays] = {"0": 0, "8": 8, "64": 64, "256": 256, "lognormal": "lognormal:3.847,0.8"}
"""By their names in tables; learning rates are frozen from the first. The last has mean 64, median 46, and one in a
hundred above 300."""
DELAYS = (*CONSTANT_OR_RANDOM, PIPELINE)
STAGES = {"mlp": 2, "cnn": 3, "gpt": 8}  # of the pipeline
MEAN_DELAY = {"0": 0, "8": 8, "64": 64, "256": 256, "lognormal": 64, PIPELINE: 64}
"""Of a pipeline, the first stage's: the number of microbatches on their way through it."""
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
        return self.model == "gpt"

    def rounds(self, delay: str) -> int:
        """How many updates one after another the delay leaves time for."""
        return self.updates // (1 + MEAN_DELAY[delay])

    def problem(self, batch: int) -> ModuleProblem:
        return models.build_problem(self.model, batch, evaluate=self.evaluate, micro_batch=self.micro_batch,
                                    layers=self.layers, width=self.width)  # fmt: skip

    def delay_model(self, name: str) -> Delays:
        if name != PIPELINE:
            return CONSTANT_OR_RANDOM[name]
        return by_stage(self.problem(1), STAGES[self.model], delay=MEAN_DELAY[PIPELINE])

    def build(self, candidate: Candidate, lrs: Sequence[float]) -> AnyRule[Any]:
        """The rule with a run for each learning rate.

        PipeMare's K is a quarter of the run, as its authors choose it; anchors output the linearly weighted average.
        """
        changes: dict[str, Any] = {"annealing": self.updates / 4} if candidate.rule == "pipemare" else {}
        changes |= {"average": "linear"} if candidate.synchronous else {}
        return candidate.build(column(lrs), **changes)

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "updates", "batch", "evaluate", "layers", "width")}


QUICK_RULES = ("steady-muon", "steady-adam", "adamw", "muon", "synchronous-muon")
GPT_RULES = (
    "steady-muon", "steady-adam", "adamw", "nadam", "schedule-free-adamw", "muon", "staleness-aware",
    "weight-prediction", "ringmaster-muon", "synchronous-adamw", "synchronous-muon",
)  # fmt: skip
_FEW = ("0", "64")


def _images(updates: int, **options: Any) -> tuple[DeepSetting, ...]:
    return tuple(DeepSetting(model, updates, 32, **options) for model in ("mlp", "cnn"))


_QUICK: dict[str, Any] = {"delays": _FEW, "tuned_at": _FEW, "rules": QUICK_RULES}
_GPT: dict[str, Any] = {"evaluate": 1024, "layers": 4, "width": 144, "micro_batch": 128}
PLANS = {
    "quick": Plan(
        (
            DeepSetting("mlp", 1_000, 32, evaluate=2_000, **_QUICK),
            DeepSetting("cnn", 1_000, 32, evaluate=2_000, only_by_name=True, **_QUICK),
            DeepSetting("gpt", 1_000, 8, evaluate=128, layers=2, width=64, micro_batch=64, only_by_name=True, **_QUICK),
        ),
        CANDIDATES, seeds=1, lr_stride=2, judged=False,
    ),
    "paper": Plan(
        (*_images(20_000), DeepSetting("gpt", 5_000, 16, tuned_at=_FEW, rules=GPT_RULES, only_by_name=True, **_GPT)),
        CANDIDATES, seeds=3,
    ),
    "full": Plan((*_images(20_000, tuning_seeds=3), DeepSetting("gpt", 20_000, 16, **_GPT)), CANDIDATES, seeds=3),
}  # fmt: skip
