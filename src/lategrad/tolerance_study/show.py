"""The result of a study as a table, a picture and a web page."""

import io
import math
import os
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from lategrad.trace import saved_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lategrad.tolerance_study.result import Point, Tolerance

_COLUMNS = ("optimizer", "delay", "value", "gap to delay 0", "gap to own at 0", "updates", "rounds", "updates needed",
            "verdict", "drift")  # fmt: skip
MEANING = {
    "free": "the gap is within the accepted cost, a share of the value without delay",
    "unclear": "the gap is larger, but within two standard errors of the seeds: more seeds would tell",
    "recoverable": "the gap is larger, but ten more thirds of the run, at the pace of its last, would close it",
    "permanent": "the gap is larger, and the value has stopped improving or is too slow to close it",
    "costs": "the gap is larger; the training gave too few values over time, less than six, to say more",
    "diverged": "the value is not finite",
}


def _cells(point: "Point") -> tuple[str, ...]:
    value, own = f"{point.value:.4g}{_plus_minus(point.spread)}", f"{point.gap_to_own:+.3g}"
    size = own, f"{point.updates:,}", f"{point.rounds:,.0f}"
    drift = "" if point.drift is None else f"{point.drift:.3g}"
    if point.delay == 0:
        return point.optimizer, "0", value, "", *size, "", "", drift
    gap = f"{point.gap:+.3g}{_plus_minus(point.gap_spread)}"
    slowdown = "" if point.slowdown is None else f"{point.slowdown:.2f}x"
    return point.optimizer, str(point.delay), value, gap, *size, slowdown, point.verdict, drift


def _plus_minus(spread: float) -> str:
    return "" if math.isnan(spread) else f" ± {spread:.2g}"


def conclusions(result: "Tolerance") -> list[str]:
    lines = []
    for name in result.optimizers:
        largest, longest = result.largest(optimizer=name), result.delays[-1]
        at_least = "at least " if largest == longest else ""
        lines.append(f"{name}: tolerates {at_least}a delay of {largest} at a cost of {result.cost:.0%}.")
    return lines


def _rows(result: "Tolerance") -> list[tuple[str, ...]]:
    """The head and the cells of a table; the drift only where it was measured."""
    rows = [_cells(point) for point in result.points()]
    return [row if any(cells[-1] for cells in rows) else row[:-1] for row in (_COLUMNS, *rows)]


def table(result: "Tolerance") -> str:
    rows = _rows(result)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*lines, "", *conclusions(result)])


def plot(result: "Tolerance", path: str | os.PathLike[str] | None = None) -> "Figure":
    from matplotlib.figure import Figure

    over_time = len(result.curve(result.optimizers[0], 0)[1]) > 2
    panels = 1 + (len(result.optimizers) if over_time else 0)
    figure = Figure(figsize=(4.4 * min(panels, 3), 3.6 * math.ceil(panels / 3)), layout="constrained")
    axes = [figure.add_subplot(math.ceil(panels / 3), min(panels, 3), i + 1) for i in range(panels)]
    for name in result.optimizers:
        values = [result.values(name, delay) for delay in result.delays]
        (line,) = axes[0].plot(result.delays, [of_seeds.mean() for of_seeds in values], marker="o", label=name)
        low, high = [of_seeds.min() for of_seeds in values], [of_seeds.max() for of_seeds in values]
        axes[0].fill_between(result.delays, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    first = result.values(result.optimizers[0], 0).mean()
    allowed = first + (1 if result.better == "lower" else -1) * result.cost * abs(first)
    axes[0].axhline(allowed, color="grey", linestyle=":", linewidth=1, label=f"{result.cost:.0%} worse")
    where = "at the first stage" if result.profile else "of every gradient"
    axes[0].set_xscale("symlog", linthresh=1)
    axes[0].set_xticks(result.delays, [str(delay) for delay in result.delays])
    axes[0].minorticks_off()
    axes[0].set_xlim(-0.3, 1.3 * max(1, result.delays[-1]))
    axes[0].set(xlabel=f"delay {where} (updates)", ylabel=f"{result.name} ({result.better} is better)")
    axes[0].legend(fontsize="small")
    for axis, name in zip(axes[1:], result.optimizers, strict=False):
        for delay in result.delays:
            axis.plot(*result.curve(name, delay), label=f"delay {delay}", linewidth=1)
        axis.set(xlabel="updates", title=name)
        axis.legend(fontsize="x-small")
    for axis in axes:
        axis.grid(alpha=0.3)
        if over_time:  # diverging curves leave the picture
            axis.set_ylim(*_range_without_delay(result))
    return saved_figure(figure, path, dpi=120)


def _range_without_delay(result: "Tolerance") -> tuple[float, float]:
    """The range of the runs without delay, 10% larger on the better side and 100% on the worse."""
    curves = [result.curve(name, 0)[1] for name in result.optimizers]
    finite = np.concatenate([curve[np.isfinite(curve)] for curve in curves])
    low, high = float(finite.min()), float(finite.max())
    margin = high - low or 1.0
    return (low - 0.1 * margin, high + margin) if result.better == "lower" else (low - margin, high + 0.1 * margin)


def page(result: "Tolerance") -> str:
    drawing = io.StringIO()
    plot(result).savefig(drawing, format="svg")
    picture = drawing.getvalue()
    names, *cells = _rows(result)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    sentences = "".join(f"<li>{escape(line)}</li>" for line in conclusions(result))
    used = dict.fromkeys(point.verdict for point in result.points() if point.delay > 0)
    meaning = "".join(f"<dt>{verdict}</dt><dd>{MEANING[verdict]}</dd>" for verdict in used)
    profile = "the same delay everywhere" if result.profile is None else f"delays of {result.profile}"
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(name=escape(result.name), sentences=sentences, runs=len(result.runs),
                               profile=escape(profile), better=result.better, picture=picture[picture.index("<svg") :],
                               head=head, body=body, meaning=meaning)  # fmt: skip
