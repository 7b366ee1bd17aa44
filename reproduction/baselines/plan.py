"""What is run: kinds of delays, rules with their learning rates, data, and how much at each scale."""

from dataclasses import dataclass
from typing import Any

from lategrad.delays import ByClass
from lategrad.problems import SoftmaxRegression
from lategrad.simulator import Delays
from reproduction.figures.sweep import LOGNORMAL
from reproduction.study import Candidate, Plan, dataset, lr_grid


def scenarios_for(classes: int) -> dict[str, Delays]:
    """Kinds of delays by their names in tables; gradients of the last half of the classes are late."""
    late = classes // 2
    return {
        **{str(delay): delay for delay in (0, 100, 250, 500, 1000)},
        "lognormal": LOGNORMAL,
        "10-1000-10": "regimes:0.33*10;0.34*1000;10",
        "slow worker": "cluster:workers=50,speed=lognormal,spread=0.4,slow=1x100",
        "by class": ByClass((0,) * (classes - late) + (1000,) * late, reduce="mean"),
    }


SCENARIOS = scenarios_for(10)
"""The first is the one that learning rates are frozen from."""

_LOW, _MIDDLE, _HIGH = lr_grid(-3, 1), lr_grid(-2, 2), lr_grid(-1, 3)
CANDIDATES = (
    Candidate("sgd-linear", _LOW),
    Candidate("anytime-sgd", _HIGH, projected=True),
    Candidate("optimistic-anytime", _HIGH, projected=True),
    Candidate("steady", _MIDDLE, ours=True, projected=True),
    Candidate("steady-coordinate", _MIDDLE, ours=True),
    Candidate("adaptive-revision", _LOW),
    Candidate("async-adagrad", _LOW),
    Candidate("ada-delay", _LOW, knob="smoothness", values=(1.0, 10.0, 100.0)),
    Candidate("dc-asgd", _LOW),
    Candidate("dc-asgd-a", _LOW),
    Candidate("staleness-aware", _LOW),
    Candidate("delay-adaptive", _LOW),
    Candidate("ringmaster", _LOW, knob="threshold", values=(1.0, 10.0, 100.0)),
    Candidate("rennala", _LOW, knob="batch", values=(1.0, 10.0, 100.0)),
    Candidate("clipped-sgd", _LOW, knob="clip", values=(0.1, 0.5, 2.0)),
    Candidate("schedule-free", _LOW),
    Candidate("unixgrad", _HIGH, projected=True),
)
RULES = tuple(candidate.rule for candidate in CANDIDATES)


@dataclass(frozen=True)
class SoftmaxSetting:
    """Softmax regression on a data set, in a constraint set."""

    data: str
    updates: int
    batch: int
    preprocessing: str = "standardise-globally"
    regime: str = "unconstrained"
    domain: str = "whole"
    rules: tuple[str, ...] = RULES

    @property
    def name(self) -> str:
        return f"{self.data}, {self.regime}"

    @property
    def constrained(self) -> bool:
        return self.domain != "whole"

    def problem(self) -> SoftmaxRegression:
        return SoftmaxRegression(dataset(self.data, self.preprocessing), batch=self.batch)

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "rules"}


def both_domains(data: str, updates: int, batch: int, **options: Any) -> tuple[SoftmaxSetting, ...]:
    """Without a constraint, and on a ball."""
    return (
        SoftmaxSetting(data, updates, batch, **options),
        SoftmaxSetting(data, updates, batch, **options, regime="constrained", domain="ball:10"),
    )


PLANS = {
    "quick": Plan(both_domains("digits", 8_000, 16), CANDIDATES, seeds=1, lr_stride=2),
    "paper": Plan(both_domains("fashion-mnist", 46_875, 64) + both_domains("digits", 20_000, 16), CANDIDATES, seeds=3),
    "full": Plan(both_domains("fashion-mnist", 187_500, 16) + both_domains("digits", 50_000, 16), CANDIDATES, seeds=3),
}

LARGE = ("fashion-mnist",)  # data sets on which the comparison takes hours on a CPU
