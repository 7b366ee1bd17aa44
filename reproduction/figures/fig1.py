"""Figure 1: accuracy against the delay, each rule's learning rate tuned at one delay and then frozen."""

from __future__ import annotations

import dataclasses
import sys

from matplotlib.axes import Axes
from torch import Tensor

from lategrad.trace import Trace
from reproduction import style
from reproduction.figures.sweep import (
    LATE, SGDS, Regime, SweepResults, Traces, best_position, claim, final_accuracy, plot
)  # fmt: skip
from reproduction.report import Section, Verdict, prose

MAINTAINS = (
    "as the delay increases, the gap between the final accuracy of anytime SGD and SGD grows. Thus, while our "
    "algorithm maintains its high performance for different delay regimes with no further tuning, SGD greatly "
    "deteriorates"
)

NO_DELAY_GAP = 0.02  # without delay the gap between anytime SGD and SGD must be below this,
GROWTH = 0.05  # and at the longest delay larger by this: SGD has lost that much more
ALLOWED_DROP = 0.05  # what anytime SGD may have lost at the delay of Figures 2 and 3
_THIS = sys.modules[__name__]


def needed(regime: Regime) -> bool:
    return 0 in regime.tuned_at and len(regime.constant_delays) > 1


def frozen(trace: Trace, tuned_at: int, record: int = -1) -> tuple[list[int], Tensor, float]:
    """Constant delays, accuracies ``(seeds, delays)`` with the learning rate tuned at one delay, and that rate."""
    values, best = trace.axis("delay").values, best_position(trace, tuned_at, record)
    positions = [i for i, delay in enumerate(values) if isinstance(delay, int)]
    accuracy = final_accuracy(trace, record)[:, positions, best]
    return [values[i] for i in positions], accuracy, trace.axes[-1].values[best]


def gap_verdict(regime: Regime, traces: Traces, tuned_at: int) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], tuned_at)
    gap = {rule: (ours - frozen(traces[rule], tuned_at)[1]).mean(0) for rule in SGDS}
    longest = delays.index(max(delays))
    holds = all(abs(g[0].item()) < NO_DELAY_GAP and (g[longest] - g[0]).item() >= GROWTH for g in gap.values())
    return claim("gap", holds, regime, [delays[longest]], figure="fig1-tuned-later" if tuned_at else "fig1", p=_THIS,
                 tuned_at=tuned_at, delays=delays, gap=gap)  # fmt: skip


def maintains_verdict(regime: Regime, traces: Traces) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], 0)
    at = delays.index(LATE if LATE in delays else max(delays))
    accuracy = ours.mean(0)
    harmless = [delay for delay, value in zip(delays, accuracy, strict=True) if value >= accuracy[0] - ALLOWED_DROP]
    return claim("maintains", delays[at] in harmless, regime, [delays[at]], figure="fig1", p=_THIS, delay=delays[at],
                 accuracy=accuracy[0], accuracy_late=accuracy[at], longest=max(harmless))  # fmt: skip


def verdicts(regime: Regime, traces: Traces) -> list[Verdict]:
    if not {"anytime-sgd", *SGDS} <= set(traces):
        return []
    first, *later = (gap_verdict(regime, traces, int(tuned_at)) for tuned_at in regime.tuned_at)
    return [first, maintains_verdict(regime, traces), *later]


def _draw(tuned_at: int, ax: Axes, regime: Regime, traces: Traces) -> None:
    for rule in regime.curves:
        delays, accuracy, _ = frozen(traces[rule], tuned_at)
        style.line(ax, rule, range(len(delays)), accuracy)
    ax.set_xticks(range(len(delays)), [str(delay) for delay in delays])
    covered = sum(map(regime.covers, delays))
    if covered < len(delays):
        ax.axvspan(covered - 0.5, len(delays) - 0.5, color="black", alpha=0.06, linewidth=0)
    ax.set_xlim(-0.5, len(delays) - 0.5)
    ax.set_xlabel("delay (updates)")


def table(regime: Regime, traces: Traces, tuned_at: int) -> list[dict[str, str]]:
    rows = []
    for rule in regime.curves:
        delays, accuracy, lr = frozen(traces[rule], tuned_at)
        values = dict(zip(map(str, delays), map(style.three_digits, accuracy.mean(0).tolist()), strict=True))
        rows.append({"rule": style.TITLES[rule], "lr": f"{lr:g}", **values})
    return rows


def finding(regimes: dict[Regime, Traces]) -> str:
    """What the delay of Figures 2 and 3 (or the longest) costs on the first place, at the shortest and longest run."""
    place = [regime for regime in regimes if regime.place == next(iter(regimes)).place]
    parts = []
    for regime in sorted(place, key=lambda regime: regime.updates):
        delays, ours, _ = frozen(regimes[regime]["anytime-sgd"], 0)
        at = delays.index(LATE if LATE in delays else max(delays))
        by_rule = {rule: frozen(regimes[regime][rule], 0)[1].mean(0)[[0, at]].tolist() for rule in SGDS}
        best = max(by_rule, key=lambda rule: by_rule[rule][1])
        (before, after), (sgd, sgd_late) = ours.mean(0)[[0, at]].tolist(), by_rule[best]
        parts.append(f"in {regime.updates:,} updates of {regime.batch} samples it goes from {before:.3f} to {after:.3f} "
                     f"({style.TITLES[best]}: {sgd:.3f} to {sgd_late:.3f})")  # fmt: skip
    length = " depends on the length of the run" if len(parts) > 1 else ""
    return (f"What a delay of {delays[at]} updates does to the accuracy of anytime SGD, the paper's rule{length}: "
            f"{'; '.join(parts)}.")  # fmt: skip


def section(results: SweepResults) -> Section:
    regimes = results.those(needed, "in which learning rates are tuned at delay 0 and there is another constant delay")
    later = {regime: traces for regime, traces in regimes.items() if len(regime.tuned_at) > 1}
    first = {regime: traces for regime, traces in regimes.items() if regime.place == next(iter(regimes)).place}
    names = {regime: f"{regime.place}, {regime.updates:,} updates" for regime in regimes}
    lrs = {names[regime]: {rule: frozen(traces[rule], 0)[2] for rule in regime.curves}
           for regime, traces in regimes.items()}  # fmt: skip
    judged = {regime: traces for regime, traces in regimes.items() if regime.l2 == 0}
    text, captions = prose("fig1", regimes=list(regimes), runs=results.updates(regimes), lrs=lrs,
                           later=[at for regime in later for at in regime.tuned_at[1:]], title=next(iter(first)).title)  # fmt: skip
    figures = {"fig1": plot(regimes, lambda *panel: _draw(0, *panel), "test accuracy")}
    if later:
        at = next(iter(later)).tuned_at[1]
        figures["fig1-tuned-later"] = plot(later, lambda *panel: _draw(int(at), *panel), "test accuracy")
    headline = plot(first, lambda *panel: _draw(0, *panel), "test accuracy", height=style.HEADLINE)
    return Section(
        name="fig1",
        title="Figure 1. Accuracy against the delay",
        text=text,
        figures=figures | {"fig1-headline": headline},
        captions={stem: caption for stem, caption in captions.items() if stem in (*figures, "fig1-headline")},
        tables={f"{names[regime]}, learning rates tuned at delay {at}": table(regime, traces, int(at))
                for regime, traces in regimes.items() for at in regime.tuned_at},
        rows=results.rows(regimes),
        verdicts=tuple(v for regime, traces in judged.items() for v in verdicts(regime, traces)),
        config={"regimes": [dataclasses.asdict(regime) for regime in regimes], "seeds": results.plan.seeds, "frozen": lrs},
        finding=finding(judged) if verdicts(*next(iter(judged.items()))) else "",
        headline="fig1-headline",
    )  # fmt: skip
