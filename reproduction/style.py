"""How the figures look: one colour for each rule, a panel for each regime, mean lines with bands over seeds."""

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

TITLES = {
    "sgd": "SGD, last iterate", "sgd-linear": "SGD, average", "anytime-sgd": "anytime SGD (Algorithm 1)",
    "optimistic-anytime": "optimistic anytime (Algorithm 2)",
    "strongly-convex": "strongly convex OGD (Algorithm 4)", "steady": "Steady (ours)",
    "steady-coordinate": "Steady per coordinate (ours)", "steady-short": "SteadyShort (ours)",
    "adaptive-revision": "AdaptiveRevision", "async-adagrad": "AsyncAdaGrad", "ada-delay": "AdaDelay",
    "dc-asgd": "DC-ASGD", "dc-asgd-a": "DC-ASGD, adaptive", "staleness-aware": "Staleness-aware SGD",
    "delay-adaptive": "Delay-adaptive SGD", "ringmaster": "Ringmaster", "rennala": "Rennala",
    "clipped-sgd": "Clipped SGD", "schedule-free": "Schedule-Free", "unixgrad": "UniXGrad",
    "steady-adam": "SteadyAdam (ours)", "steady-muon": "SteadyMuon (ours)",
    "steady-mixing": "SteadyMixing (ours)", "sgd-momentum": "SGD with momentum",
    "adamw": "AdamW", "nadam": "NAdam, beta1 .99", "schedule-free-adamw": "Schedule-Free AdamW", "muon": "Muon",
    "gap-aware": "Gap-Aware", "muon-prediction": "Muon, weight prediction",
    "rotated-adam": "Adam in a rotated basis", "pipemare": "PipeMare's steps", "weight-prediction": "Weight prediction",
    "ringmaster-muon": "Ringmaster, orthogonalised", "synchronous-adamw": "synchronous AdamW",
    "synchronous-muon": "synchronous Muon", "nesterov": "Nesterov momentum", "delayed-nesterov": "delayed Nesterov",
    "momentum-look-ahead": "momentum look-ahead", "fed-buff": "FedBuff", "fed-async": "FedAsync",
    "synchronous-diloco": "synchronous DiLoCo",
}  # fmt: skip
COLOURS = {
    "sgd": "#c44e52", "sgd-linear": "#dd8452", "anytime-sgd": "#4c72b0", "optimistic-anytime": "#55a868",
    "strongly-convex": "#8172b3", "steady": "#b8860b", "steady-coordinate": "#b8860b", "steady-adam": "#c7158f",
    "steady-muon": "#2f7f4f", "steady-mixing": "#2a6fdb", "synchronous-adamw": "#000000", "synchronous-muon": "#000000",
    "synchronous-diloco": "#000000",
}  # fmt: skip
WIDTH = 5.0  # inches; on a phone that is 3.7 wide, letters of 10 points are still 7.5
HEADLINE = 2.0  # the height of a panel beside the report's findings: two such pictures fit on a screen
BASELINE = "#777777"  # the colour of all others


def panels(
    titles: Sequence[str], ylabel: str, *, height: float = 3.4, sharey: bool = True, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Panels one below the other, so that they can be read on a phone; or in two columns, to be compared.

    Where a title is empty there is no panel.
    """
    rows = len(titles) // columns
    figure = Figure(figsize=(WIDTH + 0.9 * (columns - 1), 0.8 + height * rows), layout="constrained")
    axes = [ax for row in figure.subplots(rows, columns, sharey=sharey, squeeze=False) for ax in row]
    for i, (ax, title) in enumerate(zip(axes, titles, strict=True)):
        ax.set_title("\n".join(textwrap.fill(line, 60 // columns) for line in title.split("\n")), fontsize="medium")
        ax.set_ylabel("" if i % columns else ylabel)
        ax.grid(alpha=0.3)
        ax.set_visible(bool(title))
    return figure, axes


def line(ax: Axes, rule: str, x: Sequence[float], values: Tensor, marker: str = "o") -> None:
    """The mean over seeds (the first dimension of ``values``) and a band from their lowest to their highest."""
    colour = COLOURS[rule]
    ax.plot(x, values.mean(0), marker=marker, markersize=4, color=colour, label=TITLES[rule])
    ax.fill_between(x, values.amin(0), values.amax(0), color=colour, alpha=0.2, linewidth=0)


def three_digits(value: float) -> str:
    """An accuracy as it is written in tables.

    >>> three_digits(0.8451)
    '.845'
    """
    return f"{value:.3f}".replace("0.", ".", 1)


def ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def loss_in_table(value: float) -> str:
    """A loss as it is written in tables.

    >>> loss_in_table(1.4142), loss_in_table(123.4), loss_in_table(float("inf"))
    ('1.414', '123', 'diverged')
    """
    return "diverged" if not math.isfinite(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small")
