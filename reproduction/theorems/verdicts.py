"""What the measured points say: slopes, thresholds, factors; and whether the theorems' promises show in them."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reproduction.report import Verdict, verdict
from reproduction.style import TITLES
from reproduction.theorems import measure
from reproduction.theorems.measure import ANYTIME, CONSTANT, ONE_IN_TEN, OPTIMISTIC, SGD_AVERAGE, STRONGLY_CONVEX, Point

_THIS = sys.modules[__name__]

# The criteria. The theorems promise orders; the factors are ours, chosen after small pilot runs.
SLOPE_TOLERANCE = 0.1
PROMISED = {1: -0.5, 2: -0.5, 3: -1.0, 4: -1.0}
WITHOUT_NOISE = {2: -1.5, 3: -2.0}
NO_DEGRADATION = 4.0
BEYOND = 2.0
SAME = 1.5
NOISE_CONSTANT = 2.0
INDEPENDENT = 10.0
FITTED = 4  # horizons that a slope is fitted over, the longest ones


def select(points: Iterable[Point], **values: Any) -> list[Point]:
    return [point for point in points if all(getattr(point, key) == value for key, value in values.items())]


def distinct(points: Iterable[Point], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(point, name) for point in points))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a line fitted to log y over log x.

    >>> round(exponent([1, 10, 100], [5, 0.5, 0.05]), 9)
    -1.0
    """
    return float(np.polyfit(np.log(x), np.log(np.maximum(y, measure.ROUNDING)), 1)[0])


def longest(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.T)[-FITTED:]


def slope(points: Iterable[Point]) -> float:
    last = longest(points)
    return exponent([point.T for point in last], [point.excess for point in last])


def at_root(points: Iterable[Point], kind: str = CONSTANT) -> list[Point]:
    """Those whose delay is the root of their horizon."""
    return [point for point in points if point.delays == kind and point.delay == math.isqrt(point.T)]


def curve(points: Iterable[Point]) -> list[tuple[Point, float]]:
    """The points of one horizon with a constant delay > 0, and their excess relative to that without delay."""
    first, *late = sorted(select(points, delays=CONSTANT), key=lambda point: point.delay)
    return [(point, point.excess / first.excess) for point in late]


def doubling_delay(points: Iterable[Point]) -> float:
    """The mean delay at which the excess is first twice that without delay; the largest one if it never is."""
    before, below = 0.0, 1.0
    for point, ratio in curve(points):
        if ratio >= 2:
            return before + (point.mean_delay - before) * (2 - below) / (ratio - below)
        before, below = point.mean_delay, ratio
    return before


def normalised(points: Iterable[Point]) -> dict[tuple[float, float], float]:
    """The excess divided by the order of Theorem 2's bound, by L and sigma."""
    return {(p.L, p.sigma): p.excess / measure.order(p.T, p.mean_delay, p.L, p.sigma) for p in points}


def worsening(points: Iterable[Point]) -> float:
    """The largest normalised excess over that at L = sigma = 1, where the fixed learning rates were chosen."""
    values = normalised(points)
    return max(values.values()) / values[1.0, 1.0]


def noise_term(point: Point) -> float:
    """What the theorem says that noise adds, without its constant."""
    if point.rule == STRONGLY_CONVEX:
        return point.sigma**2 / (point.H * point.T)
    return point.sigma * measure.D / math.sqrt(point.T)


def fall_without_noise(points: Iterable[Point]) -> float:
    """The exponent of T in the excess until rounding hides it; minus infinity if it always does."""
    silent = sorted(select(points, sigma=0.0), key=lambda point: point.T)
    seen = [point for point in silent if point.excess > measure.ROUNDING]
    seen += silent[len(seen) : len(seen) + 1]
    return exponent([p.T for p in seen], [p.excess for p in seen]) if len(seen) > 1 else -math.inf


def bound_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    bounded = select(points, theorem=theorem)
    counted = [point for point in bounded if point.says_something]
    shares = [(point.excess + 2 * point.error) / point.bound for point in counted if point.bound is not None]
    closest = min((p.bound / p.worst for p in bounded if p.bound is not None), default=math.nan)
    share = max(shares, default=None)
    return verdict("bound", None if share is None else share <= 1, figure="theorems-quadratic", theorem=theorem,
                   counted=len(counted), bounded=len(bounded), share=share, closest=closest)  # fmt: skip


def rate_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    points = select(points, panel="delay", theorem=theorem, delays=CONSTANT)
    slopes = {}
    for problem in distinct(points, "problem"):
        ours = select(points, problem=problem)
        if theorem != 4:
            slopes[f"{problem}, no delay"] = slope(select(ours, delay=0))
        if theorem != 3:
            start = f", from T = {longest(at_root(ours))[0].T:,} on" if theorem == 4 else ""
            slopes[f"{problem}, delay √T{start}"] = slope(at_root(ours))
    promised = PROMISED[theorem]
    where = {3: "without delay", 4: "at a delay of √T"}.get(theorem, "without delay and at a delay of √T")
    holds = max(slopes.values()) <= promised + SLOPE_TOLERANCE
    return verdict("rate", holds, figure="theorems-least-squares", p=_THIS, theorem=theorem, promised=promised,
                   where=where, slopes=slopes)  # fmt: skip


def threshold_verdict(points: Iterable[Point], rule: str) -> Verdict:
    points = select(points, panel="delay", rule=rule)
    at_threshold, beyond, exponents = [], [], {}
    for problem in distinct(points, "problem"):
        ours = select(points, problem=problem)
        horizons = measure.compared(distinct(ours, "T"))
        for T in horizons:
            late = curve(select(ours, T=T))
            ((root, ratio),) = [(point, ratio) for point, ratio in late if at_root([point])]
            if rule != STRONGLY_CONVEX or T >= (24 * root.L / root.H) ** 2:  # past Algorithm 4's first, long updates
                at_threshold.append(ratio)
            beyond.append(late[-1][1] / ratio)
        exponents[problem] = exponent(horizons, [doubling_delay(select(ours, T=T)) for T in horizons])
    holds = None
    if at_threshold:
        growth = min(exponents.values()) >= 0.5 - SLOPE_TOLERANCE
        holds = max(at_threshold) <= NO_DEGRADATION and min(beyond) >= BEYOND and growth
    return verdict("threshold", holds, figure="theorems-delay", p=_THIS, rule=rule, late_start=rule == STRONGLY_CONVEX,
                   at_threshold=at_threshold, beyond=beyond, exponents=exponents)  # fmt: skip


def average_delay_verdict(points: Iterable[Point]) -> Verdict:
    points = [point for point in select(points, panel="delay") if point.rule in (ANYTIME, OPTIMISTIC)]
    ratios = []
    for burst in at_root(points, ONE_IN_TEN):
        (even,) = at_root(select(points, problem=burst.problem, rule=burst.rule, T=burst.T))
        ratios.append(burst.excess / even.excess)
    return verdict("average_delay", max(ratios) <= SAME, figure="theorems-delay", p=_THIS, ratios=ratios)


def noise_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    rule, term = {2: (OPTIMISTIC, "σD/√T"), 3: (STRONGLY_CONVEX, "σ²/(HT)")}[theorem]
    points = select(points, panel="noise", rule=rule, delay=0)
    rate, promised = fall_without_noise(points), WITHOUT_NOISE[theorem]
    silent, *noisy = sorted(select(points, T=max(distinct(points, "T"))), key=lambda point: point.sigma)
    shares = [(point.excess - silent.excess) / noise_term(point) for point in noisy]
    holds = rate <= promised + SLOPE_TOLERANCE and max(shares) <= NOISE_CONSTANT
    return verdict("noise", holds, figure="theorems-noise", p=_THIS, theorem=theorem, promised=promised, term=term,
                   rate=rate, shares=shares)  # fmt: skip


def independence_verdict(points: Iterable[Point]) -> Verdict:
    points = select(points, panel="constants")
    worst = {
        rule: [worsening(select(points, rule=rule, delay=delay)) for delay in sorted(distinct(points, "delay"))]
        for rule in (OPTIMISTIC, ANYTIME, SGD_AVERAGE)
    }
    decades = math.log10(max(distinct(points, "L")) / min(distinct(points, "L")))
    holds = max(worst[OPTIMISTIC]) <= INDEPENDENT < min(worst[SGD_AVERAGE])
    return verdict("independence", holds, figure="theorems-constants", p=_THIS, decades=decades, worst=worst)


def title_with_lr(rule: str) -> str:
    """The title of a rule in the panel where L and sigma vary and learning rates do not."""
    return TITLES[rule] + ("" if rule == OPTIMISTIC else ", fixed lr")


def verdicts(points: Sequence[Point]) -> tuple[Verdict, ...]:
    return (
        *(bound_verdict(points, theorem) for theorem in PROMISED),
        *(rate_verdict(points, theorem) for theorem in PROMISED),
        *(threshold_verdict(points, rule) for rule in measure.RULES),
        average_delay_verdict(points),
        *(noise_verdict(points, theorem) for theorem in WITHOUT_NOISE),
        independence_verdict(points),
    )
