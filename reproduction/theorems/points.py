"""Simulations of the theorems' settings: one point for every rule, problem, delay and horizon."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.delays import Constant, Cyclic, DelayModel
from lategrad.learners import OGD, OptimisticOGD
from lategrad.rules import SGD, AnyRule, Anytime
from lategrad.simulator import simulate
from lategrad.support.files import replacing
from lategrad.support.threads import torch_threads
from reproduction.theorems.problems import (
    ANYTIME,
    CONSTANT,
    DOMAIN,
    LRS_TO_TUNE,
    ONE_IN_TEN,
    OPTIMISTIC,
    RULES,
    SGD_AVERAGE,
    STRONGLY_CONVEX,
    BallProblem,
    Constants,
    D,
    TheoremPlan,
    bound,
    largest_excess,
    least_squares,
    quadratic,
    rule_for,
    theorem_for,
    theorem_lr,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured number and all that it depends on; a row of the CSV."""

    panel: str
    problem: str
    rule: str
    theorem: int | None
    T: int
    """Updates."""
    delays: str
    """"constant", or "one in ten": every tenth gradient has ten times the delay, the others have none."""
    delay: int
    mean_delay: float
    L: float
    H: float
    G: float
    sigma: float
    seeds: int
    excess: float
    """Mean over the seeds."""
    spread: float
    """Standard deviation over the seeds."""
    worst: float
    """The excess loss of a point of the set that is as bad as we could find: what any point at all may have."""
    bound: float | None = None

    @property
    def says_something(self) -> bool:
        """Whether the bound is below the excess loss of an arbitrary point."""
        return self.bound is not None and self.bound < self.worst

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.spread / math.sqrt(self.seeds)


class Pattern(NamedTuple):
    """A sequence of delays with mean ``delay``, but for its start."""

    kind: str
    delay: int

    def model(self) -> DelayModel:
        return Constant(self.delay) if self.kind == CONSTANT else Cyclic((0,) * 9 + (10 * self.delay,))


def measure_points(
    panel: str, setting: BallProblem, name: str, rule: AnyRule[Any], patterns: Sequence[Pattern],
    horizons: Sequence[int], *, seeds: int, compile: bool,
) -> list[Point]:  # fmt: skip
    """One simulation; a point for every horizon, delay and noise, up to delays of half the horizon."""
    steps, every = max(horizons), min(horizons)
    trace = simulate(
        setting.problem, rule, [pattern.model() for pattern in patterns], steps,
        seed=list(range(seeds)), record_every=every, compile=compile, progress=False,
    )  # fmt: skip
    if not trace.complete:
        raise KeyboardInterrupt
    excess = (trace.loss - setting.best).reshape(-1, seeds, len(patterns), len(setting.constants))
    worst = largest_excess(setting)
    points = []
    for T in horizons:
        for j, pattern in enumerate(patterns):
            if pattern.delay > T // 2 or (pattern.kind == ONE_IN_TEN and pattern.delay != math.isqrt(T)):
                continue
            theorem = theorem_for(panel, name, pattern.delay)
            for i, c in enumerate(setting.constants):
                values = excess[T // every, :, j, i]
                points.append(
                    Point(panel, setting.name, name, theorem, T, pattern.kind, pattern.delay,
                          mean_delay=_delays(*pattern, T).double().mean().item(), L=c.L, H=c.H, G=c.G, sigma=c.sigma,
                          seeds=seeds, excess=values.mean().item(), spread=values.std(correction=1).item(),
                          worst=worst[i])
                )  # fmt: skip
    return [with_bound(point) for point in points]


def with_bound(point: Point) -> Point:
    """The point with the right-hand side of its theorem, if it has one."""
    if point.theorem is None:
        return point
    constants = Constants(point.L, point.H, point.G, point.sigma)
    return replace(
        point, bound=bound(point.theorem, point.T, constants, _delays(point.delays, point.delay, point.T + 1))
    )


@lru_cache(maxsize=256)
def _delays(kind: str, delay: int, steps: int) -> Tensor:
    return Pattern(kind, delay).model().draw(steps, seed=0).delays


def compared(horizons: Sequence[int]) -> tuple[int, ...]:
    """The horizons whose curves over the delay are laid on top of each other: the longest, T/4 and T/16."""
    return tuple(horizons[::-2][:3][::-1])


def _patterns(horizons: Sequence[int]) -> list[Pattern]:
    """No delay, the root of every horizon, powers of two up to half the longest; and some with one in ten late."""
    delays = {0, *(math.isqrt(T) for T in horizons), *(2**k for k in range(max(horizons).bit_length() - 1))}
    bursts = [Pattern(ONE_IN_TEN, math.isqrt(T)) for T in compared(horizons)]
    return [*(Pattern(CONSTANT, delay) for delay in sorted(delays)), *bursts]


def run_delays(plan: TheoremPlan, rule: str, on_data: bool) -> list[Point]:
    """A rule over all horizons and delays, on one of the problems."""
    setting = least_squares(strongly_convex=rule == STRONGLY_CONVEX) if on_data else quadratic()
    horizons = plan.least_squares_horizons if on_data else plan.quadratic_horizons
    seeds = plan.least_squares_seeds if on_data else plan.seeds
    return measure_points("delay", setting, rule, rule_for(rule, setting.constants), _patterns(horizons), horizons,
                          seeds=seeds, compile=plan.compile)  # fmt: skip


def run_noise(plan: TheoremPlan, rule: str) -> list[Point]:
    """A rule over the noise, at no delay and at the root of the longest horizon."""
    setting = quadratic([(1.0, sigma) for sigma in plan.sigmas])
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(max(plan.noise_horizons)))]
    return measure_points("noise", setting, rule, rule_for(rule, setting.constants), patterns, plan.noise_horizons,
                          seeds=plan.seeds, compile=plan.compile)  # fmt: skip


def run_constants(plan: TheoremPlan, rule: str) -> list[Point]:
    """Algorithm 2, or a rule with a learning rate that was chosen at L = sigma = 1 and left alone, over L and sigma."""
    T = plan.constants_horizon
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(T))]
    setting = quadratic([(L, sigma) for L in plan.scales for sigma in plan.scales])
    measure = partial(measure_points, "constants", setting, rule, horizons=[T], seeds=plan.seeds, compile=plan.compile)
    if rule == SGD_AVERAGE:
        return [p for pattern in patterns for p in measure(rule=tuned_sgd(plan, pattern), patterns=[pattern])]
    learner = OptimisticOGD(D, DOMAIN) if rule == OPTIMISTIC else OGD(theorem_lr(quadratic().constants).item(), DOMAIN)
    return measure(rule=Anytime(learner), patterns=patterns)


def tuned_sgd(plan: TheoremPlan, pattern: Pattern) -> SGD:
    """SGD with the learning rate of a grid that is best at L = sigma = 1 with this delay; it outputs its average."""
    lr, T = torch.tensor(LRS_TO_TUNE, dtype=torch.float64).reshape(-1, 1, 1), plan.constants_horizon
    trace = simulate(quadratic().problem, SGD(lr, DOMAIN, average="linear"), pattern.model(), T, record_every=T,
                     seed=list(range(plan.seeds)), compile=plan.compile, progress=False)  # fmt: skip
    best = int(trace.loss[-1].mean(0).flatten().argmin())
    return SGD(LRS_TO_TUNE[best], DOMAIN, average="linear")


PIECES: dict[str, Callable[[TheoremPlan], list[Point]]] = {
    **{f"{rule}-{'least-squares' if on_data else 'quadratic'}": partial(run_delays, rule=rule, on_data=on_data)
       for rule in RULES for on_data in (False, True)},
    **{f"{rule}-noise": partial(run_noise, rule=rule) for rule in RULES},
    **{f"{rule}-constants": partial(run_constants, rule=rule) for rule in (OPTIMISTIC, ANYTIME, SGD_AVERAGE)},
}  # fmt: skip
"""All measurements, one simulation or two each."""


def points_of(piece: str, plan: TheoremPlan, out: Path) -> list[Point]:
    """The points of a piece, from its file if it was made from the same choices; else measured and saved."""
    path, key = path_of(piece, out), asdict(plan)
    if path.exists():
        saved = json.loads(path.read_text())
        if saved["made_from"] == json.loads(json.dumps(key)):
            return [with_bound(Point(**point)) for point in saved["points"]]
    with torch_threads(1):  # the tensors are small: a second thread would only cost time
        points = PIECES[piece](plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        bare = [asdict(replace(point, bound=None)) for point in points]  # bounds are theory, not measurements
        part.write_text(json.dumps({"made_from": key, "points": bare}))
    return points


def path_of(piece: str, out: Path) -> Path:
    return out / "traces" / f"theorems-{piece}.json"
