"""The theorems as a section of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.jobs import Job
from reproduction.part import Run as ReproductionRun
from reproduction.results import Section
from reproduction.style import TITLES
from reproduction.theorems.figures import ALGORITHM, plot
from reproduction.theorems.measuring import PIECES, Point, path_of, points_of
from reproduction.theorems.reading import (
    collapse,
    distinct,
    doubling_exponent,
    normalised,
    select,
    takeover,
)
from reproduction.theorems.setup import (
    BATCH,
    DIM,
    INDEPENDENT,
    L_OVER_H,
    MINIMUM_KNOWN_TO,
    NO_DEGRADATION,
    OPTIMISTIC,
    RADIUS,
    RULES,
    SGD_AVERAGE,
    SLOPE_TOLERANCE,
    STRONGLY_CONVEX,
    Config,
    D,
)
from reproduction.theorems.verdicts import verdicts

SECONDS = {"quick": 2.0, "paper": 60.0, "full": 200.0}
"""Of one core for one piece, about; for forecasts."""


def _constants(points: Iterable[Point]) -> list[dict[str, Any]]:
    """L, H, G and sigma of every problem of the first panel."""
    seen = dict.fromkeys((p.problem, p.L, p.H, p.G, p.sigma) for p in select(points, panel="delay"))
    return [dict(zip(("problem", "L", "H", "G", "sigma"), values, strict=True)) for values in seen]


def _about_delays(points: Iterable[Point]) -> str:
    points = select(points, panel="delay")
    names = distinct(points, "problem")
    apart, growth = (
        {rule: [of(select(points, rule=rule, problem=name)) for name in names] for rule in RULES}
        for of in (collapse, doubling_exponent)
    )
    factors = ", ".join(f"{max(apart[rule]):.2f} ({ALGORITHM[rule]})" for rule in RULES)
    faster = min(growth[STRONGLY_CONVEX]) > 0.5 + SLOPE_TOLERANCE
    return (
        "Over the mean delay in units of √T, the theory wants curves of different horizons T to coincide. Up to √T "
        f"they differ by factors of at most {factors}."
        + (" Algorithm 4's do not coincide: they move to the right with T, since the delay that it can bear grows "
           "faster than the √T that its theorem guarantees; past that delay its price rises far more steeply than that "
           "of Algorithms 1 and 2." if faster else "")
    )  # fmt: skip


def _about_noise(points: Iterable[Point]) -> str:
    points = select(points, panel="noise")
    T = max(distinct(points, "T"))
    at = {}
    for delay in sorted(distinct(points, "delay")):
        doubled = {rule: takeover(select(points, rule=rule, T=T, delay=delay)) for rule in RULES}
        at[delay] = ", ".join(f"{sigma:.2g} ({ALGORITHM[rule]})" for rule, sigma in doubled.items())
    without, root = at
    return (
        f"Noise has doubled the excess loss, on a grid of half decades from 0.001 on, at σ = {at[without]} without "
        f"delay; at a delay of √T, which sets a floor of its own, at σ = {at[root]}. The order of Theorem 2's bound "
        f"puts this at σ = LD(1/T + μ/√T), {D / T:.1g} without delay and {D / T + D * root / math.sqrt(T):.1g} at √T."
    )


def _about_constants(points: Iterable[Point]) -> str:
    points = select(points, panel="constants", L=1.0, sigma=1.0)
    values = {
        rule: [normalised([point])[1.0, 1.0] for point in sorted(select(points, rule=rule), key=lambda p: p.delay)]
        for rule in (OPTIMISTIC, SGD_AVERAGE)
    }
    return (
        "Where L and σ vary, SGD's step is the best of a grid at L = σ = 1, for either delay, and then left alone, as "
        "is Algorithm 1's. At L = σ = 1 itself the excess loss over the order of the bound is "
        + ", and ".join(f"{without:.2g} (no delay) and {late:.2g} (√T) for {TITLES[rule]}"
                        for rule, (without, late) in values.items())
        + ": a tuned constant step exploits that the quadratic is strongly convex. The figure shows what happens to it "
        "elsewhere."
    )  # fmt: skip


def text(config: Config, points: Sequence[Point]) -> tuple[str, ...]:
    """What was run, where its constants come from, and what the numbers say beyond the verdicts."""
    shown = "; ".join(
        f"{c['problem']}: L = {c['L']:.3g}, H = {c['H']:.3g}, G = {c['G']:.3g}, σ = {c['sigma']:.3g}"
        for c in _constants(points)
    )
    return (
        "Measured excess losses, held against the four theorems with the explicit constants of `lategrad.theory`, on "
        f"the ball of radius {RADIUS:g} (D = {D:g}). Algorithm 1 uses its theorem's step D/G̃, Algorithm 2 knows D "
        f"only, Algorithms 3 and 4 know H only. Means are over {config.seeds} seeds on the quadratic and "
        f"{config.least_squares_seeds} on least squares; error bars are two standard errors.",
        f"Two problems. A noisy quadratic in {DIM} dimensions with its optimum inside the ball. Least squares on the "
        f"digits, even against odd, features centred, batch {BATCH}: for Theorems 1 and 2 without a penalty, not "
        "strongly convex, its optimum on the sphere; for Theorems 3 and 4 with the penalty that makes "
        f"L/H = {L_OVER_H:g}, its optimum inside. The minimum over the ball is known to {MINIMUM_KNOWN_TO:g}. {shown}.",
        "L and H are exact. G and σ are bounds that hold all over the ball, proved, not estimated: on the quadratic "
        "G = L(r + ‖x*‖), and σ is exact; on least squares, by the triangle inequality, G = ‖∇f(0)‖ + Lr, and σ is the "
        "root mean square of the length of a row's gradient, bounded in the same way, over the root of the batch.",
        "After T updates Algorithms 1 and 2 return x_{T+1}, so their bounds are taken at T + 1; Algorithms 3 and 4 "
        "return the weighted average of x_1, ..., x_T. Delays are constant but for the start, where τ_t ≤ t - 1; their "
        "mean, start included, is what is shown and what enters the bounds.",
        "The theorems promise orders. The factors and tolerances in the criteria are ours, chosen after small pilot "
        "runs; that the explicit bounds hold needs none. A bound counts only where it is below the excess loss of "
        "the worst "
        "point of the ball that we could find: above, nothing could break it.",
        "Theorem 4's explicit bound is far from tight, and its rate starts late: the steps of Algorithm 4, 24/(Ht), "
        f"are too long for a delay of √T until T has passed (24 L/H)² or so, here {(24 * L_OVER_H) ** 2:,.0f}; that is "
        f"why L/H is only {L_OVER_H:g} here. Until then the excess loss at a delay of √T is nearly flat, then it "
        "catches up. A slope fitted from before on includes the catching up and is steeper than the rate.",
        _about_delays(points),
        _about_noise(points),
        _about_constants(points),
    )


CAPTIONS = {
    "theorems-quadratic": "Noisy quadratic: mean excess loss and the theorems' bounds over the number of updates.",
    "theorems-least-squares": "Least squares on the digits: mean excess loss and the theorems' bounds.",
    "theorems-delay": "The price of delays: excess loss relative to no delay, over the mean delay in units of √T. "
    f"Dotted: a delay of √T, and the factor of {NO_DEGRADATION:g} of the criterion. Stars: one gradient in ten 10√T "
    "late, the others on time.",
    "theorems-noise": "Excess loss over the noise on the quadratic, and the theorems' noise terms without constants.",
    "theorems-constants": "Excess loss divided by the order of Theorem 2's bound, relative to that at L = σ = 1, where "
    "the fixed steps were chosen: over L at the worst σ, and over σ at the worst L. Dotted: the criterion's "
    f"{INDEPENDENT:g}.",
}


def jobs(run: ReproductionRun) -> list[Job]:
    """A job for every piece."""
    config = Config.of(run.scale)
    return [Job(f"theorems: {piece}", SECONDS[run.scale], partial(points_of, piece, config, run.out),
                (path_of(piece, run.out),)) for piece in PIECES]  # fmt: skip


def section(run: ReproductionRun) -> Section:
    """Everything at a scale, judged."""
    return section_of(Config.of(run.scale), run.out)


def section_of(config: Config, out: Path) -> Section:
    """The same for a configuration of one's own."""
    points = [point for piece in PIECES for point in points_of(piece, config, out)]
    return Section(
        name="theorems",
        title="Theorems 1 to 4, measured",
        text=text(config, points),
        figures=plot(points),
        captions=dict(CAPTIONS),
        rows=[asdict(point) for point in points],
        verdicts=verdicts(points),
        config={**asdict(config), "D": D, "batch": BATCH, "dim": DIM, "constants": _constants(points)},
    )
