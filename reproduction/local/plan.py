"""What is run: models, workers and their speeds, outer rules with their learning rates, and how much at each scale."""

from dataclasses import dataclass
from typing import Any

import torch

from lategrad.delays.clocks import Barrier, Cluster, Worker
from lategrad.problems import LocalSteps
from lategrad.rules import AnyRule
from lategrad.support.validation import Scalar, require_choice
from reproduction.deep import models
from reproduction.study import Candidate, Plan, lr_grid

TUNING_SEED = 1000  # all learning rates are chosen with it; no number that is shown comes from it
_OUTER, _STEADY = lr_grid(-3, 0.5), lr_grid(-4, -0.5)
CANDIDATES = (
    Candidate("steady-muon", _STEADY, ours=True),
    Candidate("steady-adam", _STEADY, ours=True),
    Candidate("steady", lr_grid(-1.5, 2), ours=True),
    Candidate("steady-mixing", _OUTER, ours=True),
    Candidate("sgd", _OUTER),
    Candidate("nesterov", _OUTER),
    Candidate("delayed-nesterov", _OUTER),
    Candidate("momentum-look-ahead", _OUTER),
    Candidate("fed-buff", _OUTER),
    Candidate("fed-async", _OUTER),
    Candidate("synchronous-diloco", _OUTER, synchronous="nesterov"),
)
RULES = tuple(candidate.rule for candidate in CANDIDATES)
ANCHOR = "synchronous-diloco"


def build_outer(candidate: Candidate, lr: Scalar, workers: int) -> AnyRule[Any]:
    """An outer rule; delayed Nesterov's period is the number of workers, as its authors choose it."""
    changes: dict[str, Any] = {"period": workers} if candidate.rule == "delayed-nesterov" else {}
    return candidate.build(lr, **changes)


@dataclass(frozen=True)
class LocalSetting:
    """A model, the local steps of a job, and for how long it is trained."""

    model: str
    local_steps: int  # H
    rounds: int  # of synchronous training; all others have the virtual time that these take
    batch: int
    inner: str
    workers: int = 16
    slowest: float = 6.0
    """Virtual seconds that the slowest worker takes for a gradient; the fastest takes 1, the others lie between."""
    evaluate: int = 4_096
    layers: int = 0  # of the GPT, as its width
    width: int = 0
    rules: tuple[str, ...] = RULES
    only_by_name: bool = False  # whether it is left out unless its model is named, as it takes long

    def __post_init__(self) -> None:
        require_choice("model", self.model, ("cnn", "gpt"))

    @property
    def name(self) -> str:
        return f"{self.model}-{self.local_steps}"

    @property
    def title(self) -> str:
        model = models.model_title(self.model, self.layers, self.width)
        return f"{model}; {self.local_steps} local steps, {self.workers} workers"

    @property
    def seconds(self) -> float:
        """Virtual seconds of every rule."""
        return self.rounds * self.local_steps * self.slowest

    def speeds(self) -> list[Worker]:
        spread = torch.linspace(1, self.slowest, self.workers, dtype=torch.float64)
        return [Worker(mean=mean) for mean in spread.tolist()]

    def cluster(self) -> Cluster:
        return Cluster(self.speeds(), self.local_steps)

    def fastest_alone(self) -> Cluster:
        """The fastest worker by itself: there is no delay."""
        return Cluster(self.speeds()[:1], self.local_steps)

    def barrier(self) -> Barrier:
        return Barrier(self.speeds(), self.local_steps)

    def pauses(self) -> dict[int, str]:
        """For a real training whose workers wait instead of computing: the milliseconds of each worker's jobs."""
        return {i: f"constant:{1000 * self.local_steps * worker.mean:g}" for i, worker in enumerate(self.speeds())}

    def updates(self, cluster: Cluster) -> int:
        most = sum(int(self.seconds / (self.local_steps * worker.mean)) for worker in cluster.workers)
        time = cluster.draw(most, 0).time
        assert time is not None
        return int((time <= self.seconds * (1 + 1e-9)).sum())

    def problem(self) -> LocalSteps:
        """The model with its data and the inner optimizer; always the same initial parameters."""
        plain = models.build_problem(self.model, self.batch, evaluate=self.evaluate, layers=self.layers,
                                     width=self.width)  # fmt: skip
        return LocalSteps(plain, self.local_steps, self.inner)

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("rules", "only_by_name")}


_CNN, _GPT = "adamw:lr=0.003", "adamw:lr=0.001"
"""AdamW with its best learning rates without delay on these models (docs/deep.md)."""
_SMALL_GPT: dict[str, Any] = {"layers": 2, "width": 64}
_QUICK_RULES = ("steady-muon", "sgd", "nesterov", "delayed-nesterov", "momentum-look-ahead", "fed-buff", ANCHOR)


def _both(model: str, batch: int, inner: str, seconds: int, **options: Any) -> tuple[LocalSetting, ...]:
    return tuple(LocalSetting(model, h, seconds // h, batch, inner, **options) for h in (20, 100))


PLANS = {
    "quick": Plan(
        (
            LocalSetting("cnn", 10, 6, 32, _CNN, evaluate=1_000, rules=_QUICK_RULES),
            LocalSetting("gpt", 10, 6, 8, _GPT, evaluate=64, rules=_QUICK_RULES, only_by_name=True, **_SMALL_GPT),
        ),
        CANDIDATES, seeds=1, lr_stride=2, judged=False,
    ),
    "paper": Plan(_both("gpt", 8, _GPT, 600, evaluate=512, **_SMALL_GPT) + _both("cnn", 32, _CNN, 600), CANDIDATES,
                  seeds=3),
    "full": Plan(_both("gpt", 8, _GPT, 2_000, evaluate=1_024, **_SMALL_GPT) + _both("cnn", 32, _CNN, 2_000), CANDIDATES,
                 seeds=3),
}  # fmt: skip
