"""Accuracy lost at a delay of 500 against the number of updates: where its root passes the delay, little is lost.

Neither the rules nor their learning rates know how long a run is: a shorter run is the beginning of the long one. For
every horizon the learning rate is chosen anew, by the training loss without delay there, and frozen.
"""

import sys

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lategrad.trace import Trace
from reproduction import report, style
from reproduction.figures.fig1 import ALLOWED_DROP, frozen
from reproduction.figures.fig3 import needed
from reproduction.figures.sweep import LATE, Regime, SweepResults, Traces, plot
from reproduction.report import Section, Verdict, prose, verdict


def lost(trace: Trace) -> dict[int, tuple[Tensor, float]]:
    """By horizon: accuracy without delay minus accuracy at the delay, ``(seeds,)``, and the learning rate.

    Horizons are the records that halve the run again and again, the shortest first.
    """
    steps, found = trace.steps.tolist(), {}
    for record, updates in enumerate(steps):
        if updates and (steps[-1] / updates).is_integer() and (steps[-1] // updates).bit_count() == 1:
            delays, accuracy, lr = frozen(trace, 0, record)
            found[updates] = accuracy[:, delays.index(0)] - accuracy[:, delays.index(LATE)], lr
    return found


def recovers_verdict(regime: Regime, traces: Traces) -> Verdict:
    """Our reading of the theorem: little is lost once √T has reached the delay, and less than in short runs."""
    drops = {updates: drop.mean().item() for updates, (drop, _) in lost(traces["anytime-sgd"]).items()}
    covered = [drop for updates, drop in drops.items() if updates >= LATE**2]
    holds = max(covered) <= ALLOWED_DROP and drops[max(drops)] < drops[min(drops)] if covered else None
    return verdict("recovers", holds, source="ours", figure="horizon", p=sys.modules[__name__], place=regime.place,
                   drops=drops)  # fmt: skip


def _draw(ax: Axes, regime: Regime, traces: Traces) -> None:
    for rule in regime.curves:
        drops = lost(traces[rule])
        style.line(ax, rule, list(drops), torch.stack([drop for drop, _ in drops.values()], dim=1))
    ax.axvline(LATE**2, color="black", linestyle=":", linewidth=1)
    ax.annotate(f" √T = {LATE}", (LATE**2, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize="small")
    ax.set(xscale="log", xlabel="T, the number of updates")
    ax.set_title(f"{regime.title}; batch {regime.batch}", fontsize="medium")


def _table(regime: Regime, traces: Traces) -> list[dict[str, str]]:
    return [{"rule": style.TITLES[rule], **{f"{updates:,}": f"{style.three_digits(drop.mean().item())} (lr {lr:g})"
             for updates, (drop, lr) in lost(traces[rule]).items()}} for rule in regime.curves]  # fmt: skip


def finding(traces: Traces) -> str:
    drops = [(updates, drop.mean().item()) for updates, (drop, _) in lost(traces["anytime-sgd"]).items()]
    return report.finding("horizon", delay=LATE, drops=drops[::2])


def section(results: SweepResults) -> Section:
    regimes = results.those(needed, f"with records along the run at delays 0 and {LATE}")
    text, captions = prose("horizon", delay=LATE, runs=results.updates(regimes))
    return Section(
        name="horizon",
        title=f"Horizon. What a delay of {LATE} costs, against the length of the run",
        text=text,
        figures={"horizon": plot(regimes, _draw, "accuracy lost", height=style.HEADLINE)},
        captions=captions,
        tables={regime.place: _table(regime, traces) for regime, traces in regimes.items()},
        rows=[{"rule": rule, "regime": regime.place, "updates": updates, "delay": LATE, "lr": lr, "seed": seed,
               "lost": value}
              for regime, traces in regimes.items() for rule, trace in traces.items()
              for updates, (drop, lr) in lost(trace).items() for seed, value in enumerate(drop.tolist())],
        verdicts=tuple(recovers_verdict(regime, traces) for regime, traces in regimes.items() if regime.l2 == 0),
        config=results.describe(regimes),
        finding=finding(next(iter(regimes.values()))),
        headline="horizon",
    )  # fmt: skip
