"""What the measured points say: slopes, thresholds, factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reproduction.theorems.points import Point, compared
from reproduction.theorems.problems import CONSTANT, ROUNDING, STRONGLY_CONVEX, D, order

FITTED = 4
"""Horizons that a slope is fitted over, the longest ones."""


def select(points: Iterable[Point], **values: Any) -> list[Point]:
    """The points with these values, in their order."""
    return [point for point in points if all(getattr(point, key) == value for key, value in values.items())]


def distinct(points: Iterable[Point], name: str) -> list[Any]:
    """The values of a column, in the order of appearance."""
    return list(dict.fromkeys(getattr(point, name) for point in points))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a line fitted to log y over log x.

    >>> round(exponent([1, 10, 100], [5, 0.5, 0.05]), 9)
    -1.0
    """
    return float(np.polyfit(np.log(x), np.log(np.maximum(y, ROUNDING)), 1)[0])


def longest(points: Iterable[Point]) -> list[Point]:
    """Those of the longest horizons, over which slopes are fitted."""
    return sorted(points, key=lambda point: point.T)[-FITTED:]


def slope(points: Iterable[Point]) -> float:
    """The exponent of T in the excess over the longest horizons."""
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


def doubling_exponent(points: Iterable[Point]) -> float:
    """The exponent of T in the doubling delay."""
    points = list(points)
    horizons = compared(sorted(distinct(points, "T")))
    return exponent(horizons, [doubling_delay(select(points, T=T)) for T in horizons])


def collapse(points: Iterable[Point]) -> float:
    """How far apart curves of different horizons are at √T/4, √T/2 and √T: the largest ratio of two heights."""
    heights: dict[float, list[float]] = {}
    points = list(points)
    for T in compared(sorted(distinct(points, "T"))):
        for point, ratio in curve(select(points, T=T)):
            heights.setdefault(point.delay / math.sqrt(T), []).append(ratio)
    return max(max(heights[share]) / min(heights[share]) for share in (0.25, 0.5, 1.0))


def settled(point: Point) -> bool:
    """Whether the horizon is past (24 L/H)², where Algorithm 4's first, long steps no longer matter."""
    return point.T >= (24 * point.L / point.H) ** 2


def normalised(points: Iterable[Point]) -> dict[tuple[float, float], float]:
    """The excess divided by the order of Theorem 2's bound, by L and sigma."""
    return {(p.L, p.sigma): p.excess / order(p.T, p.mean_delay, p.L, p.sigma) for p in points}


def worsening(points: Iterable[Point]) -> float:
    """The largest normalised excess over that at L = sigma = 1, where the fixed learning rates were chosen."""
    values = normalised(points)
    return max(values.values()) / values[1.0, 1.0]


def noise_term(point: Point) -> float:
    """What the theorem says that noise adds, without its constant."""
    if point.rule == STRONGLY_CONVEX:
        return point.sigma**2 / (point.H * point.T)
    return point.sigma * D / math.sqrt(point.T)


def fall_without_noise(points: Iterable[Point]) -> float:
    """The exponent of T in the excess until rounding hides it; minus infinity if it always does."""
    silent = sorted(select(points, sigma=0.0), key=lambda point: point.T)
    seen = [point for point in silent if point.excess > ROUNDING]
    seen += silent[len(seen) : len(seen) + 1]
    return exponent([p.T for p in seen], [p.excess for p in seen]) if len(seen) > 1 else -math.inf


def takeover(points: Iterable[Point]) -> float:
    """The smallest noise measured at which the excess is twice that without noise, or more."""
    silent, *noisy = sorted(points, key=lambda point: point.sigma)
    return next((point.sigma for point in noisy if point.excess >= 2 * silent.excess), math.inf)
