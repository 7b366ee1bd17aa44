"""Figures 2 and 4: accuracy against the step under one kind of delay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from lategrad.experiments import style
from lategrad.experiments.results import Section, Verdict
from lategrad.experiments.sweep import Regime, SweepConfig, final_accuracy, sweep_rows
from lategrad.trace import Trace


@dataclass(frozen=True)
class StepRange:
    """One figure: which delay, what the paper claims, and when we call it reproduced."""

    name: str
    title: str
    delay: int | str
    claim: str
    within: float = 0.05
    """A step is good if its accuracy is within this of the rule's own best at this delay."""
    decades_wanted: float = 1.0
    """Anytime SGD's good range must be wider than SGD's by this many decades."""
    margin_wanted: float = 0.05
    """And its accuracy averaged over its grid must be higher by this."""


def accuracy_by_step(trace: Trace, delay: int | str) -> tuple[tuple[float, ...], Tensor]:
    """Steps and accuracies ``(seeds, steps)`` at one delay."""
    return trace.axes[-1].values, final_accuracy(trace)[:, trace.axis("delay").values.index(delay)]


def good_decades(steps: tuple[float, ...], accuracy: Tensor, threshold: float) -> float:
    """The length in decades of the longest run of neighbouring steps at or above a threshold."""
    longest, begin = 0.0, None
    for step, value in zip(steps, accuracy.mean(0).tolist(), strict=True):
        if value < threshold:
            begin = None
            continue
        begin = step if begin is None else begin
        longest = max(longest, math.log10(step / begin))
    return longest


def verdicts(config: StepRange, regime: Regime, traces: dict[str, Trace]) -> list[Verdict]:
    """Is anytime SGD good on a wider range of steps than SGD, and better over the whole grid?"""
    by_rule = {rule: accuracy_by_step(traces[rule], config.delay) for rule in regime.rules}
    best = {rule: accuracy.mean(0).max().item() for rule, (_, accuracy) in by_rule.items()}
    width, mean = {}, {}
    for rule in ("anytime-sgd", "sgd"):
        steps, accuracy = by_rule[rule]
        width[rule] = good_decades(steps, accuracy, best[rule] - config.within)
        mean[rule] = accuracy.mean().item()
    decades, margin = width["anytime-sgd"] - width["sgd"], mean["anytime-sgd"] - mean["sgd"]
    return [
        Verdict(
            claim=f"{config.claim} ({regime.name})",
            criterion=f"within {config.within} of its own best over at least {config.decades_wanted:g} more decade(s) "
            f"of steps than SGD, and at least {config.margin_wanted} more accurate on average over its grid",
            measured=f"{width['anytime-sgd']:.1f} decades against {width['sgd']:.1f}; mean accuracy "
            f"{mean['anytime-sgd']:.3f} against {mean['sgd']:.3f}; best {best['anytime-sgd']:.3f} against "
            f"{best['sgd']:.3f}",
            reproduced=decades >= config.decades_wanted and margin >= config.margin_wanted,
        )
    ]


def plot(config: StepRange, sweeps: dict[Regime, dict[str, Trace]]) -> Figure:
    """A panel for each regime."""
    figure, axes = style.panels([regime.title for regime in sweeps], "test accuracy")
    for ax, (regime, traces) in zip(axes, sweeps.items(), strict=True):
        for rule in regime.rules:
            steps, accuracy = accuracy_by_step(traces[rule], config.delay)
            style.line(ax, rule, steps, accuracy)
        ax.set(xscale="log", xlabel="step (lr, or diameter for Algorithm 2)")
    style.legend(figure, axes)
    return figure


def section(config: StepRange, sweep_config: SweepConfig, sweeps: dict[Regime, dict[str, Trace]]) -> Section:
    """The figure and its verdicts."""
    convex = {regime: traces for regime, traces in sweeps.items() if regime.l2 == 0}
    rows = [row for regime, traces in convex.items() for row in sweep_rows(regime, traces)]
    return Section(
        name=config.name,
        title=config.title,
        text=(
            f"The same runs as in Figure 1, at the delay {config.delay} only, over the whole grid of steps. A rule "
            "that is easy to use is high and flat. The grids of the rules lie where their good steps lie and are "
            "equally wide; a width equal to the grid's is a lower bound.",
        ),
        figures={config.name: plot(config, convex)},
        captions={config.name: f"Test accuracy against the step, delay {config.delay}."},
        rows=[row for row in rows if row["delay"] == config.delay],
        verdicts=tuple(verdict for regime, traces in convex.items() for verdict in verdicts(config, regime, traces)),
        config={"sweep": sweep_config.describe()},
    )
