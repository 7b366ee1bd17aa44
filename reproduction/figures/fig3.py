"""Figure 3: excess loss against epochs at a delay of 500, learning rates tuned without delay."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from lategrad.problems import Optimum, minimum
from lategrad.registry import parse_set
from reproduction import style
from reproduction.figures.sweep import OVER_TIME, PLANS, SGDS, FigurePart, Regime, SweepResults, Traces, best_lrs
from reproduction.jobs import Job
from reproduction.report import Section, Verdict, prose, verdict
from reproduction.study import Request

FALL_REQUIRED = 0.71
"""Over the second half of the run anytime SGD's excess loss must fall to this share or less, and SGD's must not: the
rate 1/sqrt(T) of Theorem 1 falls to 71% when T doubles."""
FACTOR_REQUIRED = 2.0  # at the end, SGD's excess loss must be this many times anytime SGD's


class Figure3(FigurePart):
    """Needs the optima, which stay in the user's cache once they are found."""

    def __init__(self) -> None:
        super().__init__("fig3", section)

    def jobs(self, request: Request) -> list[Job]:
        optima = [Job(f"{regime.name}: the exact optimum", 30, partial(optimum, regime))
                  for regime in PLANS[request.scale].settings if _has_optimum(regime)]  # fmt: skip
        return [*optima, *super().jobs(request)]


def _has_optimum(regime: Regime) -> bool:
    return regime.domain != "whole" or regime.l2 > 0


def optimum(regime: Regime) -> Optimum | None:
    """The smallest loss in the constraint set, up to a proven gap; None where no gap can be proven."""
    if not _has_optimum(regime):
        return None
    return minimum(regime.problem(), parse_set(regime.domain), tolerance=regime.optimum_tolerance)


def approach_verdict(regime: Regime, traces: Traces, best: Optimum, sgd: str) -> Verdict:
    excess = {rule: (traces[rule].loss - best.value).mean(-1) for rule in ("anytime-sgd", sgd)}
    fall = {rule: (e[-1] / e[len(e) // 2]).item() for rule, e in excess.items()}  # over the second half of the run
    ours, theirs = (values[-1].item() for values in excess.values())
    holds = fall["anytime-sgd"] <= FALL_REQUIRED < fall[sgd] and theirs >= FACTOR_REQUIRED * ours
    return verdict("approaches", holds, figure=f"fig3-{regime.name}", p=sys.modules[__name__], regime=regime.name,
                   sgd=sgd, our_fall=fall["anytime-sgd"], their_fall=fall[sgd], ours=ours, theirs=theirs)  # fmt: skip


def plot(regime: Regime, traces: Traces, best: Optimum | None) -> Figure:
    figure, axes = style.panels([regime.title], "training loss" if best is None else "excess training loss")
    for rule in regime.curves:
        epochs = traces[rule].steps * regime.epochs / regime.updates
        value = traces[rule].loss if best is None else (traces[rule].loss - best.value).clamp_min(1e-6)
        style.line(axes[0], rule, epochs.tolist(), torch.nan_to_num(value.T, nan=1e6, posinf=1e6), marker="")
    axes[0].set(yscale="log", xlabel="epochs")
    style.legend(figure, axes)
    return figure


def section(results: SweepResults) -> Section:
    figures, captions, optima = {}, {}, []
    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    for regime, traces in results.regimes.items():
        curves = {rule: results.over_time(regime, rule) for rule in regime.curves}
        best, stem = optimum(regime), f"fig3-{regime.name}"
        figures[stem] = plot(regime, curves, best)
        quantity = "Training loss" if best is None else "Excess training loss"
        captions[stem] = f"{quantity} against epochs, constant delay {OVER_TIME}; {regime.title}."
        if best is not None:
            optima.append(f"{regime.name} {best.value:.5f} (gap at most {best.gap:.1g})")
            if regime.l2 == 0:
                verdicts += [approach_verdict(regime, curves, best, sgd) for sgd in SGDS]
        for rule, trace in curves.items():
            place = {"rule": rule, "regime": regime.name, "delay": OVER_TIME, "lr": best_lrs(traces[rule])[0]}
            rows += [place | {name: row[name] for name in ("seed", "step", "accuracy", "loss", "excess_loss")}
                     for row in trace.rows(None if best is None else best.value)]  # fmt: skip
    return Section(
        name="fig3",
        title=f"Figure 3. Excess loss against epochs at delay {OVER_TIME}",
        text=prose("fig3", optima=optima)[0],
        figures=figures,
        captions=captions,
        rows=rows,
        verdicts=tuple(verdicts),
        config={"sweep": results.describe(), "fall required": FALL_REQUIRED, "factor required": FACTOR_REQUIRED},
    )
