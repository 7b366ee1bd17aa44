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
from reproduction.theorems.setup import (
    ANYTIME,
    CONSTANT,
    DOMAIN,
    ONE_IN_TEN,
    OPTIMISTIC,
    RULES,
    SGD_AVERAGE,
    STEPS_TO_TUNE,
    STRONGLY_CONVEX,
    Config,
    Constants,
    D,
    Setting,
    bound,
    largest_excess,
    least_squares,
    quadratic,
    rule_for,
    theorem_for,
    theorem_step,
)


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
    """"constant", or "one in ten": every tenth gradient is ten times as late, the others are not."""
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
        """Whether the bound is below what a point can have that nobody optimised."""
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
        """What the simulator takes."""
        return Constant(self.delay) if self.kind == CONSTANT else Cyclic((0,) * 9 + (10 * self.delay,))


class Run(NamedTuple):
    """How a simulation is run: on the CPU, where such small tensors are at home."""

    seeds: int
    compile: bool


def measure(
    panel: str,
    setting: Setting,
    name: str,
    rule: AnyRule[Any],
    patterns: Sequence[Pattern],
    horizons: Sequence[int],
    run: Run,
) -> list[Point]:
    """One simulation; a point for every horizon, delay and noise, up to delays of half the horizon."""
    steps, every = max(horizons), min(horizons)
    trace = simulate(
        setting.problem, rule, [pattern.model() for pattern in patterns], steps,
        seed=list(range(run.seeds)), record_every=every, compile=run.compile, progress=False,
    )  # fmt: skip
    if not trace.complete:
        raise KeyboardInterrupt
    excess = (trace.loss - setting.best).reshape(-1, run.seeds, len(patterns), len(setting.constants))
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
                          seeds=run.seeds, excess=values.mean().item(), spread=values.std(correction=1).item(),
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


def run_delays(config: Config, rule: str, on_data: bool) -> list[Point]:
    """A rule over all horizons and delays, on one of the problems."""
    setting = least_squares(strongly_convex=rule == STRONGLY_CONVEX) if on_data else quadratic()
    horizons = config.least_squares_horizons if on_data else config.quadratic_horizons
    seeds = config.least_squares_seeds if on_data else config.seeds
    return measure("delay", setting, rule, rule_for(rule, setting.constants), _patterns(horizons), horizons,
                   Run(seeds, config.compile))  # fmt: skip


def run_noise(config: Config, rule: str) -> list[Point]:
    """A rule over the noise, at no delay and at the root of the longest horizon."""
    setting = quadratic([(1.0, sigma) for sigma in config.sigmas])
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(max(config.noise_horizons)))]
    return measure("noise", setting, rule, rule_for(rule, setting.constants), patterns, config.noise_horizons,
                   Run(config.seeds, config.compile))  # fmt: skip


def run_constants(config: Config, rule: str) -> list[Point]:
    """Algorithm 2, or a rule with a step that was chosen at L = sigma = 1 and left alone, over L and sigma."""
    T, run = config.constants_horizon, Run(config.seeds, config.compile)
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(T))]
    setting = quadratic([(L, sigma) for L in config.scales for sigma in config.scales])
    if rule == SGD_AVERAGE:
        return [
            point
            for pattern in patterns
            for point in measure("constants", setting, rule, tuned_sgd(pattern, T, run), [pattern], [T], run)
        ]
    chosen = OptimisticOGD(D, DOMAIN) if rule == OPTIMISTIC else OGD(theorem_step(quadratic().constants).item(), DOMAIN)
    return measure("constants", setting, rule, Anytime(chosen), patterns, [T], run)


def tuned_sgd(pattern: Pattern, T: int, run: Run) -> SGD:
    """SGD with the step of a grid that is best at L = sigma = 1 with this delay; it outputs its average."""
    lr = torch.tensor(STEPS_TO_TUNE, dtype=torch.float64).reshape(-1, 1, 1)
    trace = simulate(quadratic().problem, SGD(lr, DOMAIN, average="linear"), pattern.model(), T, record_every=T,
                     seed=list(range(run.seeds)), compile=run.compile, progress=False)  # fmt: skip
    best = int(trace.loss[-1].mean(0).flatten().argmin())
    return SGD(STEPS_TO_TUNE[best], DOMAIN, average="linear")


PIECES: dict[str, Callable[[Config], list[Point]]] = {
    **{f"{rule}-{'least-squares' if on_data else 'quadratic'}": partial(run_delays, rule=rule, on_data=on_data)
       for rule in RULES for on_data in (False, True)},
    **{f"{rule}-noise": partial(run_noise, rule=rule) for rule in RULES},
    **{f"{rule}-constants": partial(run_constants, rule=rule) for rule in (OPTIMISTIC, ANYTIME, SGD_AVERAGE)},
}  # fmt: skip
"""All measurements, one simulation or two each."""


def points_of(piece: str, config: Config, out: Path) -> list[Point]:
    """The points of a piece, from its file if it was made from the same choices; else measured and kept."""
    path, key = path_of(piece, out), asdict(config)
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["made_from"] == json.loads(json.dumps(key)):
            return [with_bound(Point(**point)) for point in kept["points"]]
    with torch_threads(1):  # the tensors are small: a second thread would only be waited for
        points = PIECES[piece](config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        bare = [asdict(replace(point, bound=None)) for point in points]  # bounds are theory, not measurements
        part.write_text(json.dumps({"made_from": key, "points": bare}))
    return points


def path_of(piece: str, out: Path) -> Path:
    """Where its points are kept."""
    return out / "traces" / f"theorems-{piece}.json"
