"""Figure 3: excess loss against epochs at a delay of 500, steps tuned without delay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lategrad.problems import Optimum, minimum
from lategrad.registry import parse_set
from lategrad.sets import WholeSpace
from lategrad.trace import Trace
from reproduction import style
from reproduction.fig1 import SGDS
from reproduction.jobs import Job
from reproduction.results import Section, Verdict
from reproduction.sweep import OVER_TIME, REGIMES, TUNED_AT, Regime, SweepConfig, over_time, tuned

QUOTE = "in anytime SGD the expected loss approaches the optimal one, while that of SGD does not"


@dataclass(frozen=True)
class Config:
    """When a claim counts as reproduced."""

    fall_wanted: float = 0.71
    """Over the second half of the run anytime SGD's excess loss must fall to this share or less, and SGD's must not:
    the rate 1/sqrt(T) of Theorem 1 falls to 71% when T doubles."""
    factor_wanted: float = 2.0
    """At the end, SGD's excess loss must be this many times anytime SGD's."""


def optimum(sweep_config: SweepConfig, regime: Regime) -> Optimum | None:
    """The smallest loss in the set, up to a proven gap; None where no gap can be proven."""
    domain, problem = parse_set(regime.domain), sweep_config.problem(regime)
    if isinstance(domain, WholeSpace) and regime.l2 == 0:
        return None
    return minimum(problem, domain, tolerance=sweep_config.scale.optimum_tolerance)


def jobs(sweep_config: SweepConfig) -> list[Job]:
    """The optima, which stay in the user's cache once they are found."""
    return [Job(f"{regime.name}: the exact optimum", 30, partial(optimum, sweep_config, regime))
            for regime in REGIMES if regime.domain != "whole" or regime.l2 > 0]  # fmt: skip


def verdict(config: Config, regime: Regime, traces: dict[str, Trace], best: Optimum, sgd: str) -> Verdict:
    """Does anytime SGD approach the optimum while SGD, by one of its outputs, does not?"""
    excess = {rule: (traces[rule].loss - best.value).mean(-1) for rule in ("anytime-sgd", sgd)}
    fall = {rule: _fall(values) for rule, values in excess.items()}
    ours, theirs = (values[-1].item() for values in excess.values())
    return Verdict(
        claim=f"At delay {OVER_TIME} the loss of anytime SGD approaches the optimum, that of {style.TITLES[sgd]}, "
        "does not "
        f"({regime.name})",
        criterion=f"over the second half of the run anytime SGD's excess loss falls to {config.fall_wanted:.0%} or "
        "less, "
        f"SGD's does not, and at the end it is at least {config.factor_wanted:g} times anytime SGD's",
        measured=f"anytime SGD falls to {fall['anytime-sgd']:.0%}, SGD to {fall[sgd]:.0%}; they end at {ours:.3g} and "
        f"{theirs:.3g}, {theirs / ours:.1f} times as much",
        reproduced=fall["anytime-sgd"] <= config.fall_wanted < fall[sgd] and theirs >= config.factor_wanted * ours,
        quote=QUOTE,
        figure=f"fig3-{regime.name}",
    )


def _fall(excess: Tensor) -> float:
    """The share of the excess loss that is left of that at half the run."""
    return (excess[-1] / excess[len(excess) // 2]).item()


def plot(sweep_config: SweepConfig, regime: Regime, traces: dict[str, Trace], best: Optimum | None) -> Figure:
    """Excess loss against epochs, or the loss itself where the optimum is not known."""
    ylabel = "training loss" if best is None else "excess training loss"
    figure, axes = style.panels([regime.title], ylabel)
    for rule in regime.rules:
        epochs = traces[rule].steps * sweep_config.scale.epochs / sweep_config.steps
        value = traces[rule].loss if best is None else (traces[rule].loss - best.value).clamp_min(1e-6)
        style.line(axes[0], rule, epochs.tolist(), torch.nan_to_num(value.T, nan=1e6, posinf=1e6), marker="")
    axes[0].set(yscale="log", xlabel="epochs")
    style.legend(figure, axes)
    return figure


def section(
    config: Config, sweep_config: SweepConfig, sweeps: dict[Regime, dict[str, Trace]], out: Path, *, device: str
) -> Section:
    """The figures and their verdicts."""
    figures: dict[str, Figure] = {}
    captions: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    minima: list[str] = []
    for regime, traces in sweeps.items():
        curves = {rule: over_time(sweep_config, regime, rule, out, device=device) for rule in regime.rules}
        best = optimum(sweep_config, regime)
        stem = f"fig3-{regime.name}"
        figures[stem] = plot(sweep_config, regime, curves, best)
        shown = "Training loss" if best is None else "Excess training loss"
        captions[stem] = f"{shown} against epochs, constant delay {OVER_TIME}; {regime.title}."
        if best is not None:
            minima.append(f"{regime.name} {best.value:.5f} (gap at most {best.gap:.1g})")
            if regime.l2 == 0:
                verdicts += [verdict(config, regime, curves, best, sgd) for sgd in SGDS]
        for rule, trace in curves.items():
            step = traces[rule].axes[-1].values[tuned(traces[rule], TUNED_AT[0])]
            for row in trace.rows(None if best is None else best.value):
                place = {"rule": rule, "regime": regime.name, "delay": OVER_TIME, "lr": step, "seed": row["seed"]}
                rows.append(place | {name: row[name] for name in ("step", "accuracy", "loss", "excess_loss")})
    return Section(
        name="fig3",
        title=f"Figure 3. Excess loss against epochs at delay {OVER_TIME}",
        text=(
            "The training loss of each rule's output minus the smallest loss in the set, with the steps that "
            f"were tuned without delay. The smallest loss is found to a proven gap: {'; '.join(minima)}.",
            "Without a constraint and without a penalty the problem is so badly conditioned that no gap can be proven; "
            "there the loss itself is shown.",
        ),
        figures=figures,
        captions=captions,
        rows=rows,
        verdicts=tuple(verdicts),
        config={"sweep": sweep_config.describe(), "fig3": dataclasses.asdict(config)},
    )
