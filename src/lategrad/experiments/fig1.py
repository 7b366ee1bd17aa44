"""Figure 1: accuracy against the delay, each rule's step tuned at one delay and then left alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lategrad.experiments import style
from lategrad.experiments.results import Section, Verdict
from lategrad.experiments.sweep import TUNED_AT, Regime, SweepConfig, final_accuracy, sweep_rows, tuned
from lategrad.trace import Trace


@dataclass(frozen=True)
class Config:
    """What is tuned where, and when a claim counts as reproduced."""

    tuned_at: int = TUNED_AT[0]
    other_tuned_at: int = TUNED_AT[1]
    """The appendix: "similar results were received when tuning the algorithms with larger delay"."""
    gap_wanted: float = 0.05
    correlation_wanted: float = 0.8
    drop_allowed: float = 0.05
    drop_at: int = 500


def constant_delays(trace: Trace) -> list[int]:
    """Positions of the constant delays."""
    return [i for i, delay in enumerate(trace.axis("delay").values) if isinstance(delay, int)]


def frozen(trace: Trace, tuned_at: int) -> tuple[list[int], Tensor, float]:
    """Delays, accuracies ``(seeds, delays)`` with the step tuned at one delay, and that step."""
    positions, best = constant_delays(trace), tuned(trace, tuned_at)
    delays = [trace.axis("delay").values[i] for i in positions]
    return delays, final_accuracy(trace)[:, positions, best], trace.axes[-1].values[best]


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([v.argsort().argsort().double() for v in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def verdicts(config: Config, regime: Regime, traces: dict[str, Trace]) -> list[Verdict]:
    """Does the gap to SGD grow with the delay, and does anytime SGD keep its accuracy?"""
    delays, ours, _ = frozen(traces["anytime-sgd"], config.tuned_at)
    _, sgd, _ = frozen(traces["sgd"], config.tuned_at)
    gap = (ours - sgd).mean(0)
    correlation = rank_correlation(torch.tensor(delays).double(), gap)
    at = delays.index(config.drop_at)
    drop = (ours[:, 0] - ours[:, at]).mean().item()
    return [
        Verdict(
            claim=f"The gap between anytime SGD and SGD grows with the delay ({regime.name})",
            criterion=f"rank correlation of gap and delay at least {config.correlation_wanted}, and the gap at delay "
            f"{delays[-1]} at least {config.gap_wanted} more than at delay {delays[0]}",
            measured=f"correlation {correlation:.2f}; gap {gap[0]:+.3f} at delay {delays[0]}, "
            f"{gap[at]:+.3f} at {delays[at]}, {gap[-1]:+.3f} at {delays[-1]}",
            reproduced=correlation >= config.correlation_wanted and bool(gap[-1] - gap[0] >= config.gap_wanted),
        ),
        Verdict(
            claim=f"Anytime SGD maintains its accuracy under delay ({regime.name})",
            criterion=f"at delay {config.drop_at} within {config.drop_allowed} of its accuracy at delay {delays[0]}",
            measured=f"{ours[:, 0].mean():.3f} at delay {delays[0]}, {ours[:, at].mean():.3f} at {delays[at]}",
            reproduced=drop <= config.drop_allowed,
        ),
    ]


def plot(sweeps: dict[Regime, dict[str, Trace]], tuned_at: int) -> Figure:
    """A panel for each regime."""
    figure, axes = style.panels([regime.title for regime in sweeps], "test accuracy")
    for ax, (regime, traces) in zip(axes, sweeps.items(), strict=True):
        for rule in regime.rules:
            delays, accuracy, _ = frozen(traces[rule], tuned_at)
            style.line(ax, rule, range(len(delays)), accuracy)
        ax.set_xticks(range(len(delays)), [str(delay) for delay in delays])
        ax.set_xlabel("delay (updates)")
    style.legend(figure, axes)
    return figure


def section(config: Config, sweep_config: SweepConfig, sweeps: dict[Regime, dict[str, Trace]]) -> Section:
    """Figure 1, the panel tuned at a larger delay, and their verdicts."""
    rows: list[dict[str, Any]] = [row for regime, traces in sweeps.items() for row in sweep_rows(regime, traces)]
    steps = {regime.name: {rule: frozen(traces[rule], config.tuned_at)[2] for rule in regime.rules}
             for regime, traces in sweeps.items()}  # fmt: skip
    convex = [(regime, traces) for regime, traces in sweeps.items() if regime.l2 == 0]
    return Section(
        name="fig1",
        title="Figure 1. Accuracy against the delay",
        text=(
            f"Softmax regression on {sweep_config.data}, batch {sweep_config.scale.batch}, {sweep_config.steps:,} "
            f"updates ({sweep_config.scale.epochs:g} epochs), {sweep_config.scale.seeds} seed(s). Each rule's step is "
            f"tuned at delay {config.tuned_at} only (best mean test accuracy on its grid) and then frozen. Lines are "
            "means over seeds, bands reach from the lowest to the highest.",
            "The paper does not state its batch size, epochs, preprocessing or set; these are our choices, the same "
            "for all rules. Accuracy is of each rule's own output.",
        ),
        figures={"fig1": plot(sweeps, config.tuned_at), "fig1-tuned-later": plot(sweeps, config.other_tuned_at)},
        captions={
            "fig1": f"Test accuracy against a constant delay; steps tuned at delay {config.tuned_at}.",
            "fig1-tuned-later": f"The same with the steps tuned at delay {config.other_tuned_at} instead.",
        },
        rows=rows,
        verdicts=tuple(verdict for regime, traces in convex for verdict in verdicts(config, regime, traces)),
        config={"sweep": sweep_config.describe(), "tuned steps": steps},
    )
