"""Figures 2 and 4: accuracy against the step under one kind of delay."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from lategrad.trace import Trace
from reproduction import style
from reproduction.fig1 import SGDS
from reproduction.results import Section, Verdict
from reproduction.sweep import Regime, SweepConfig, final_accuracy, sweep_rows

Sweeps = dict[Regime, dict[str, Trace]]


@dataclass(frozen=True)
class StepRange:
    """One figure: which delays, what the paper claims, and when we call it reproduced."""

    name: str
    title: str
    delays: dict[str, int | str]
    """By the stem of their figures: the first is the paper's."""
    shown: dict[str, str]
    """By the stem, what a reader calls those delays."""
    claim: str
    quote: str
    within: float = 0.10
    """A step is good if its accuracy is within this share of the rule's own best at this delay."""
    times_wanted: float = 2.0
    """Anytime SGD must be good on this many times as many steps of its grid as SGD."""
    margin_wanted: float = 0.05
    """And its accuracy averaged over its grid must be higher by this."""
    finding: bool = False
    """Whether the report opens with it."""


def accuracy_by_step(trace: Trace, delay: int | str) -> tuple[tuple[float, ...], Tensor]:
    """Steps and accuracies ``(seeds, steps)`` at one delay."""
    return trace.axes[-1].values, final_accuracy(trace)[:, trace.axis("delay").values.index(delay)]


def good_steps(accuracy: Tensor, within: float) -> int:
    """On how many steps the mean over seeds is within that share of the best one."""
    by_step = accuracy.mean(0)
    return int((by_step >= (1 - within) * by_step.max()).sum())


def verdict(config: StepRange, stem: str, regime: Regime, traces: dict[str, Trace]) -> Verdict:
    """Is anytime SGD good on more steps than SGD, by either of its outputs, and better over the whole grid?"""
    by_rule = {rule: accuracy_by_step(traces[rule], config.delays[stem])[1] for rule in ("anytime-sgd", *SGDS)}
    good = {rule: good_steps(accuracy, config.within) for rule, accuracy in by_rule.items()}
    mean = {rule: accuracy.mean().item() for rule, accuracy in by_rule.items()}
    best = {rule: accuracy.mean(0).max().item() for rule, accuracy in by_rule.items()}
    ours, steps = "anytime-sgd", by_rule["anytime-sgd"].shape[-1]
    return Verdict(
        claim=f"{config.claim} ({config.shown[stem]}, {regime.name})",
        criterion=f"within {config.within:.0%} of its own best on at least {config.times_wanted:g} times as many "
        "steps of "
        f"its grid as SGD, and at least {config.margin_wanted} more accurate on average over it; for SGD's last "
        "iterate "
        "and for its average",
        measured="; ".join(
            f"{style.TITLES[rule]}: {good[rule]} of {steps} steps, mean accuracy {mean[rule]:.3f}, best "
            f"{best[rule]:.3f}"
            for rule in by_rule
        ),
        reproduced=all(
            good[ours] >= config.times_wanted * good[rule] and mean[ours] - mean[rule] >= config.margin_wanted
            for rule in SGDS
        ),
        quote=config.quote,
        figure=stem,
    )


def plot(config: StepRange, stem: str, sweeps: Sweeps) -> Figure:
    """A panel for each regime."""
    figure, axes = style.panels([regime.title for regime in sweeps], "test accuracy")
    for ax, (regime, traces) in zip(axes, sweeps.items(), strict=True):
        for rule in regime.rules:
            steps, accuracy = accuracy_by_step(traces[rule], config.delays[stem])
            style.line(ax, rule, steps, accuracy)
        ax.set(xscale="log", xlabel="step (lr, or diameter for Algorithm 2)")
    style.legend(figure, axes)
    return figure


def table(config: StepRange, stem: str, regime: Regime, traces: dict[str, Trace]) -> list[dict[str, str]]:
    """A row for each rule and step."""
    rows = []
    for rule in regime.rules:
        steps, accuracy = accuracy_by_step(traces[rule], config.delays[stem])
        rows += [{"rule": style.TITLES[rule], "step": f"{step:g}", "accuracy": style.three_digits(value)}
                 for step, value in zip(steps, accuracy.mean(0).tolist(), strict=True)]  # fmt: skip
    return rows


def differences(config: StepRange, sweeps: Sweeps) -> tuple[str, ...]:
    """How the accuracies under the other kinds of delays differ from those under the first."""
    first, *others = config.delays
    said = []
    for stem in others:
        parts = []
        for regime, traces in sweeps.items():
            by_rule = {}
            for rule in regime.rules:
                (_, a), (_, b) = (accuracy_by_step(traces[rule], config.delays[name]) for name in (stem, first))
                by_rule[rule] = (b - a).mean(0)
            worst = max(by_rule, key=lambda rule: by_rule[rule].abs().max().item())
            means = ", ".join(f"{style.TITLES[rule]} {-gap.mean():+.3f}" for rule, gap in by_rule.items())
            parts.append(f"{regime.name}: on average over the grid {means}; at one step at most "
                         f"{by_rule[worst].abs().max():.3f} ({style.TITLES[worst]})")  # fmt: skip
        said.append(
            f"With {config.shown[stem]} instead of {config.shown[first]}, accuracies change by: {'. '.join(parts)}."
        )
    return tuple(said)


def finding(config: StepRange, traces: dict[str, Trace]) -> str:
    """How wide the ranges of good steps are."""
    delay = next(iter(config.delays.values()))
    counts = {}
    for rule in ("anytime-sgd", *SGDS):
        steps, accuracy = accuracy_by_step(traces[rule], delay)
        counts[rule] = good_steps(accuracy, config.within)
    return (
        f"At that delay anytime SGD is within {config.within:.0%} of its best on {counts['anytime-sgd']} of the "
        f"{len(steps)} steps of its grid, SGD on {counts['sgd']} (last iterate) and {counts['sgd-linear']} (average)."
    )


def section(config: StepRange, sweep_config: SweepConfig, sweeps: Sweeps, about: tuple[str, ...] = ()) -> Section:
    """The figures and their verdicts."""
    convex = {regime: traces for regime, traces in sweeps.items() if regime.l2 == 0}
    rows = [row for regime, traces in convex.items() for row in sweep_rows(regime, traces)]
    updates = f"{sweep_config.steps:,} updates, {sweep_config.scale.seeds} seed(s)"
    return Section(
        name=config.name,
        title=config.title,
        text=(
            f"The runs of Figure 1 at one kind of delay, over the whole grid of steps ({updates}). A rule that is "
            "easy to "
            "use is high and flat. The grids of the rules lie where their good steps lie and are equally wide; a rule "
            "that is good on its whole grid may be good beyond it.",
            *about,
            *differences(config, convex),
        ),
        figures={stem: plot(config, stem, convex) for stem in config.delays},
        captions={stem: f"Test accuracy against the step, {shown}; {updates}." for stem, shown in config.shown.items()},
        tables={f"{config.shown[stem]}, {regime.name}": table(config, stem, regime, traces)
                for stem in config.delays for regime, traces in convex.items()},
        rows=[row for row in rows if row["delay"] in config.delays.values()],
        verdicts=tuple(verdict(config, stem, regime, traces)
                       for stem in config.delays for regime, traces in convex.items()),
        config={"sweep": sweep_config.describe()},
        finding=finding(config, next(iter(convex.values()))) if config.finding else "",
    )  # fmt: skip
