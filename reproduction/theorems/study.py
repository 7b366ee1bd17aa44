"""The theorems' figures, and their section of the report."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from reproduction import report
from reproduction.jobs import Job
from reproduction.report import Section, prose
from reproduction.study import Part, Request
from reproduction.style import COLOURS, TITLES
from reproduction.theorems import measure
from reproduction.theorems import verdicts as v
from reproduction.theorems.measure import ANYTIME, CONSTANT, ONE_IN_TEN, OPTIMISTIC, RULES, STRONGLY_CONVEX, Point
from reproduction.theorems.verdicts import at_root, curve, distinct, select

SECONDS = {"quick": 2.0, "paper": 60.0, "full": 200.0}  # of one core for one piece, about; for forecasts
ALGORITHM = {ANYTIME: "Algorithm 1", OPTIMISTIC: "Algorithm 2", STRONGLY_CONVEX: "Algorithm 4"}
_BOUND = "#999999"


def _grid(rows: int, height: float, xlabels: Sequence[str], ylabel: str) -> tuple[Figure, list[Axes]]:
    """Two columns of panels with logarithmic axes, narrow enough for a phone."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for ax, xlabel in zip(axes[-2:], xlabels, strict=True):
        ax.set_xlabel(xlabel, fontsize=9.5)
    figure.supylabel(ylabel, fontsize=9.5)
    for ax in axes:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.tick_params(labelsize=8.5)
        ax.minorticks_off()
    return figure, axes


def _measured(ax: Axes, points: Sequence[Point], late: bool) -> None:
    """The mean excess over the horizon, with two standard errors to either side, and the bound."""
    T, colour, line = [point.T for point in points], COLOURS[points[0].rule], "--" if late else "-"
    excess, errors = [point.excess for point in points], [2 * point.error for point in points]
    ax.errorbar(T, excess, errors, fmt="s" if late else "o", linestyle=line, color=colour, markersize=4,
                linewidth=1.4, markerfacecolor="white" if late else colour)  # fmt: skip
    ax.plot(T, [point.bound or math.nan for point in points], color=_BOUND, linewidth=1.6, linestyle=line)


def plot_rates(points: Iterable[Point], problem: str) -> Figure:
    points = select(points, panel="delay", problem=problem, delays=CONSTANT)
    figure, axes = _grid(2, 5.6, ["updates T"] * 2, "excess loss")
    for ax, theorem in zip(axes, v.PROMISED, strict=True):
        ours = select(points, theorem=theorem)
        slopes = []
        for late, shown in ((False, select(ours, delay=0)), (True, at_root(ours))):
            if shown:
                _measured(ax, shown, late)
                slopes.append(f"slope {v.slope(shown):.2f}, {'delay √T' if late else 'no delay'}".replace("-", "−"))
        ax.text(0.04, 0.04, "\n".join(slopes), transform=ax.transAxes, fontsize=8.5)
        low, high = ax.get_ylim()
        ax.set_ylim(low * (low / high) ** 0.18, high)  # room for the text
        ax.set_title(f"Theorem {theorem}", fontsize=10)
    handles = [
        Line2D([], [], color="black", marker="o", markersize=4, label="measured, no delay"),
        Line2D([], [], color="black", marker="s", markersize=4, linestyle="--", markerfacecolor="white",
               label="measured, delay √T"),
        Line2D([], [], color=_BOUND, label="bound, no delay"),
        Line2D([], [], color=_BOUND, linestyle="--", label="bound, delay √T"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def plot_threshold(points: Iterable[Point]) -> Figure:
    """The price of a delay over the delay in units of √T: a row for each rule, a column for each problem."""
    points = select(points, panel="delay")
    names = distinct(points, "problem")
    figure, axes = _grid(len(RULES), 7.4, ["mean delay / √T"] * 2, "excess loss / excess loss without delay")
    for ax, (rule, problem) in zip(axes, [(rule, name) for rule in RULES for name in names], strict=True):
        ours = select(points, rule=rule, problem=problem)
        for T, alpha in zip(measure.compared(distinct(ours, "T")), (0.35, 0.6, 1.0), strict=True):
            of_T, root = select(ours, T=T), math.sqrt(T)
            steady = curve(of_T)
            ax.plot([point.mean_delay / root for point, _ in steady], [ratio for _, ratio in steady],
                    color=COLOURS[rule], alpha=alpha, linewidth=1.5, label=f"T = {T:,}")  # fmt: skip
            without = select(of_T, delay=0)[0].excess
            for burst in at_root(of_T, ONE_IN_TEN):
                ax.plot(burst.mean_delay / root, burst.excess / without, "*", color=COLOURS[rule], alpha=alpha,
                        markersize=9, markeredgecolor="black", markeredgewidth=0.6)  # fmt: skip
        ax.axvline(1, color="black", linewidth=0.8, linestyle=":")
        ax.axhline(v.NO_DEGRADATION, color="black", linewidth=0.8, linestyle=":")
        ax.set_ylim(0.7, None)
        ax.set_title(f"{ALGORITHM[rule]}, {problem}", fontsize=10)
        ax.legend(fontsize=8, loc="upper left", handlelength=1.2, framealpha=0.9)
    return figure


def plot_noise(points: Iterable[Point]) -> Figure:
    points = select(points, panel="noise")
    T = max(distinct(points, "T"))
    figure, axes = _grid(1, 3.7, ["noise σ"] * 2, f"excess loss at T = {T:,}")
    for ax, delay in zip(axes, sorted(distinct(points, "delay")), strict=True):
        ours = [point for point in select(points, T=T, delay=delay) if point.sigma > 0]
        for rule in RULES:
            noisy = select(ours, rule=rule)
            ax.plot([point.sigma for point in noisy], [point.excess for point in noisy], "o-", color=COLOURS[rule],
                    markersize=3.5, linewidth=1.5, label=TITLES[rule])  # fmt: skip
        for rule, dashes, label in ((OPTIMISTIC, "--", "σD/√T"), (STRONGLY_CONVEX, ":", "σ²/(HT)")):
            noisy = select(ours, rule=rule)
            ax.plot([point.sigma for point in noisy], [v.noise_term(point) for point in noisy], dashes, color=_BOUND,
                    linewidth=1.6, label=label)  # fmt: skip
        ax.set_title("no delay" if delay == 0 else "delay √T", fontsize=10)
    low = min(ax.get_ylim()[0] for ax in axes)
    for ax in axes:
        ax.set_ylim(max(low, measure.ROUNDING), 1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def plot_constants(points: Iterable[Point]) -> Figure:
    """How much worse than at L = sigma = 1: over L, at the worst sigma, and over sigma, at the worst L."""
    points = select(points, panel="constants")
    figure, axes = _grid(2, 5.2, ["smoothness L", "noise σ"], "normalised excess loss / that at L = σ = 1")
    panels = [(delay, name) for delay in sorted(distinct(points, "delay")) for name in ("L", "sigma")]
    for ax, (delay, name) in zip(axes, panels, strict=True):
        for rule in (measure.SGD_AVERAGE, ANYTIME, OPTIMISTIC):
            values = v.normalised(select(points, delay=delay, rule=rule))
            scales = sorted(distinct(points, name))
            worst = [max(value for key, value in values.items() if key[name == "sigma"] == scale) for scale in scales]
            ax.plot(scales, [value / values[1.0, 1.0] for value in worst], "o-", color=COLOURS[rule], markersize=3.5,
                    label=v.title_with_lr(rule))  # fmt: skip
        ax.axhline(v.INDEPENDENT, color="black", linewidth=0.8, linestyle=":")
        ax.set_title(f"{'no delay' if delay == 0 else 'delay √T'}, worst {'σ' if name == 'L' else 'L'}", fontsize=10)
    for row in (axes[:2], axes[2:]):
        top = max(ax.get_ylim()[1] for ax in row)
        for ax in row:
            ax.set_ylim(0.5, top)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1, fontsize=8.5)
    return figure


def finding(points: Sequence[Point]) -> str:
    points, ratios = [p for p in select(points, panel="delay") if p.rule != STRONGLY_CONVEX], []
    for late in at_root(points):
        (without,) = select(points, problem=late.problem, rule=late.rule, T=late.T, delay=0)
        ratios.append(late.excess / without.excess)
    return report.finding("theorems", horizons=distinct(points, "T"), ratios=ratios)


class Theorems(Part):
    """Theorems 1 to 4."""

    name = "theorems"

    def jobs(self, request: Request) -> list[Job]:
        plan, out = measure.PLANS[request.scale], request.space.out
        return [Job(f"theorems: {piece}", SECONDS[request.scale], partial(measure.points_of, piece, plan, out),
                    (measure.path_of(piece, out),)) for piece in measure.PIECES]  # fmt: skip

    def section(self, request: Request) -> Section:
        return section_of(measure.PLANS[request.scale], request.space.out)


def section_of(plan: measure.TheoremPlan, out: Path) -> Section:
    points = [point for piece in measure.PIECES for point in measure.points_of(piece, plan, out)]
    seen = dict.fromkeys((p.problem, p.L, p.H, p.G, p.sigma) for p in select(points, panel="delay"))
    constants = [dict(zip(("problem", "L", "H", "G", "sigma"), values, strict=True)) for values in seen]
    with_ones = sorted(select(points, panel="constants", L=1.0, sigma=1.0), key=lambda point: point.delay)
    at_one = {TITLES[rule]: [v.normalised([point])[1.0, 1.0] for point in select(with_ones, rule=rule)]
              for rule in (OPTIMISTIC, measure.SGD_AVERAGE)}  # fmt: skip
    text, captions = prose("theorems", plan=plan, p=measure, constants=constants, no_degradation=v.NO_DEGRADATION,
                  independent=v.INDEPENDENT, at_one=at_one)  # fmt: skip
    return Section(
        name="theorems",
        title="Theorems. Bounds, rates and thresholds, measured",
        text=text,
        figures={
            "theorems-quadratic": plot_rates(points, "quadratic"),
            "theorems-least-squares": plot_rates(points, "least squares"),
            "theorems-delay": plot_threshold(points),
            "theorems-noise": plot_noise(points),
            "theorems-constants": plot_constants(points),
        },
        captions=captions,
        rows=[asdict(point) for point in points],
        verdicts=v.verdicts(points),
        finding=finding(points),
        config={**asdict(plan), "D": measure.D, "batch": measure.BATCH, "dim": measure.DIM, "constants": constants},
    )
