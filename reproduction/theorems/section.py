"""The theorems as a section of the report."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from reproduction.jobs import Job
from reproduction.report import Section, prose
from reproduction.study import Part, Request
from reproduction.style import TITLES
from reproduction.theorems import measure
from reproduction.theorems import verdicts as v
from reproduction.theorems.figures import plot
from reproduction.theorems.measure import OPTIMISTIC, PIECES, PLANS, SGD_AVERAGE, STRONGLY_CONVEX, Point
from reproduction.theorems.verdicts import distinct, select

SECONDS = {"quick": 2.0, "paper": 60.0, "full": 200.0}  # of one core for one piece, about; for forecasts


def finding(points: Sequence[Point]) -> str:
    points, ratios = [p for p in select(points, panel="delay") if p.rule != STRONGLY_CONVEX], []
    for late in v.at_root(points):
        (without,) = select(points, problem=late.problem, rule=late.rule, T=late.T, delay=0)
        ratios.append(late.excess / without.excess)
    horizons = distinct(points, "T")
    return (
        f"On two convex problems, in runs of T = {min(horizons):,} to {max(horizons):,} updates, a delay of √T "
        f"multiplies the excess loss of the paper's first two algorithms by {min(ratios):.1f} to {max(ratios):.1f}."
    )


class Theorems(Part):
    """Theorems 1 to 4."""

    name = "theorems"

    def jobs(self, request: Request) -> list[Job]:
        plan, out = PLANS[request.scale], request.space.out
        return [Job(f"theorems: {piece}", SECONDS[request.scale], partial(measure.points_of, piece, plan, out),
                    (measure.path_of(piece, out),)) for piece in PIECES]  # fmt: skip

    def section(self, request: Request) -> Section:
        return section_of(PLANS[request.scale], request.space.out)


def section_of(plan: measure.TheoremPlan, out: Path) -> Section:
    points = [point for piece in PIECES for point in measure.points_of(piece, plan, out)]
    seen = dict.fromkeys((p.problem, p.L, p.H, p.G, p.sigma) for p in select(points, panel="delay"))
    constants = [dict(zip(("problem", "L", "H", "G", "sigma"), values, strict=True)) for values in seen]
    with_ones = sorted(select(points, panel="constants", L=1.0, sigma=1.0), key=lambda point: point.delay)
    at_one = {TITLES[rule]: [v.normalised([point])[1.0, 1.0] for point in select(with_ones, rule=rule)]
              for rule in (OPTIMISTIC, SGD_AVERAGE)}  # fmt: skip
    text, captions = prose("theorems", plan=plan, p=measure, constants=constants, no_degradation=v.NO_DEGRADATION,
                  independent=v.INDEPENDENT, at_one=at_one)  # fmt: skip
    return Section(
        name="theorems",
        title="Theorems. Bounds, rates and thresholds, measured",
        text=text,
        figures=plot(points),
        captions=captions,
        rows=[asdict(point) for point in points],
        verdicts=v.verdicts(points),
        finding=finding(points),
        config={**asdict(plan), "D": measure.D, "batch": measure.BATCH, "dim": measure.DIM, "constants": constants},
    )
