"""Accuracy lost at a delay of 500 against the number of updates: where its root passes the delay, little is lost.

Neither the rules nor their learning rates know how long a run is: a shorter run is the beginning of the long one. For
every horizon the learning rate is chosen anew, by the training loss without delay there, and frozen.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lategrad.trace import Trace
from reproduction import style
from reproduction.figures.fig1 import ALLOWED_DROP
from reproduction.figures.fig3 import needed
from reproduction.figures.sweep import LATE, Regime, SweepResults, Traces, best_position, final_accuracy, plot
from reproduction.report import Section, Verdict, prose, verdict


def horizons(trace: Trace) -> list[int]:
    """Positions of the records that halve the run again and again, the shortest first."""
    steps = trace.steps.tolist()
    halves = [steps[-1] / 2**k for k in range(len(steps))]
    return sorted(steps.index(half) for half in halves if half in steps)


def lost(trace: Trace, record: int) -> tuple[Tensor, float]:
    """Accuracy at delay 0 minus that at the delay, ``(seeds,)``, with the learning rate frozen from delay 0."""
    best, delays = best_position(trace, 0, record), trace.axis("delay").values
    accuracy = final_accuracy(trace, record)[..., best]
    return accuracy[:, delays.index(0)] - accuracy[:, delays.index(LATE)], trace.axes[-1].values[best]


def recovers_verdict(regime: Regime, traces: Traces) -> Verdict:
    """Our reading of the theorem: less is lost the longer the run, and little once its root has passed the delay."""
    trace = traces["anytime-sgd"]
    by_horizon = {trace.steps[at].item(): lost(trace, at)[0].mean().item() for at in horizons(trace)}
    late = [drop for updates, drop in by_horizon.items() if updates >= LATE**2]
    first, last = next(iter(by_horizon.values())), list(by_horizon.values())[-1]
    holds = bool(late) and max(late) <= ALLOWED_DROP and last < first
    return verdict("recovers", holds if late else None, source="ours", figure="horizon", p=sys.modules[__name__],
                   place=regime.place, by_horizon=by_horizon)  # fmt: skip


def _draw(ax: Axes, regime: Regime, traces: Traces) -> None:
    for rule in regime.curves:
        at = horizons(traces[rule])
        values = torch.stack([lost(traces[rule], record)[0] for record in at], dim=1)
        style.line(ax, rule, traces[rule].steps[at].tolist(), values)
    ax.axvline(LATE**2, color="black", linestyle=":", linewidth=1)
    ax.annotate(f" √T = {LATE}", (LATE**2, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize="small")
    ax.set(xscale="log", xlabel="T, the number of updates")


def section(results: SweepResults) -> Section:
    regimes = results.those(needed, f"with records along the run at delays 0 and {LATE}")
    rows: list[dict[str, Any]] = [
        {"rule": rule, "regime": regime.place, "updates": trace.steps[at].item(), "delay": LATE,
         "lr": lost(trace, at)[1], "seed": seed, "lost": value}
        for regime, traces in regimes.items() for rule, trace in traces.items() for at in horizons(trace)
        for seed, value in enumerate(lost(trace, at)[0].tolist())
    ]  # fmt: skip
    text, captions = prose("horizon", delay=LATE, runs=results.updates(regimes))
    return Section(
        name="horizon",
        title=f"Horizon. What a delay of {LATE} costs, against the length of the run",
        text=text,
        figures={"horizon": plot(regimes, _draw, f"accuracy lost at delay {LATE}")},
        captions=captions,
        tables={regime.place: _table(regime, traces) for regime, traces in regimes.items()},
        rows=rows,
        verdicts=tuple(recovers_verdict(regime, traces) for regime, traces in regimes.items() if regime.l2 == 0),
        config={"regimes": [dataclasses.asdict(regime) for regime in regimes]},
        finding=finding(*next(iter(regimes.items()))),
    )  # fmt: skip


def _table(regime: Regime, traces: Traces) -> list[dict[str, str]]:
    rows = []
    for rule in regime.curves:
        trace = traces[rule]
        values = {f"{trace.steps[at].item():,}": lost(trace, at) for at in horizons(trace)}
        rows.append({"rule": style.TITLES[rule],
                     **{at: f"{drop.mean().item():.3f} (lr {lr:g})" for at, (drop, lr) in values.items()}})  # fmt: skip
    return rows


def finding(regime: Regime, traces: Traces) -> str:
    trace = traces["anytime-sgd"]
    drops = {trace.steps[at].item(): lost(trace, at)[0].mean().item() for at in horizons(trace)}
    listed = ", ".join(f"{drop:.3f} of {updates:,}" for updates, drop in drops.items())
    return (f"The theorem asks that the square root of the number of updates T is not below the delay. At a delay of "
            f"{LATE} that is T = {LATE**2:,}, and what anytime SGD loses falls accordingly: {listed} updates "
            f"({regime.title}).")  # fmt: skip
