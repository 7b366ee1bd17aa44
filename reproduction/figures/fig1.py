"""Figure 1: accuracy against the delay, each rule's learning rate tuned at one delay and then frozen."""

from __future__ import annotations

import math
import sys

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lategrad.trace import Trace
from reproduction import style
from reproduction.figures.sweep import SGDS, TUNED_AT, Regime, SweepResults, Traces, best_position, final_accuracy
from reproduction.report import Section, Verdict, prose, verdict

MAINTAINS = (
    "as the delay increases, the gap between the final accuracy of anytime SGD and SGD grows. Thus, while our "
    "algorithm maintains its high performance for different delay regimes with no further tuning, SGD greatly "
    "deteriorates"
)

NO_DELAY_GAP = 0.02  # without delay the gap between anytime SGD and SGD must be below this,
LONG_DELAY_GAP = 0.15  # and above this at long delays:
LONG_DELAYS = (500, 1000)
ALLOWED_DROP, DROP_AT = 0.05, 500  # what anytime SGD may have lost, at that delay
_THIS = sys.modules[__name__]


def frozen(trace: Trace, tuned_at: int) -> tuple[list[int], Tensor, float]:
    """Constant delays, accuracies ``(seeds, delays)`` with the learning rate tuned at one delay, and that rate."""
    values, best = trace.axis("delay").values, best_position(trace, tuned_at)
    positions = [i for i, delay in enumerate(values) if isinstance(delay, int)]
    accuracy = final_accuracy(trace)[:, positions, best]
    return [values[i] for i in positions], accuracy, trace.axes[-1].values[best]


def rank_correlation(x: Tensor, y: Tensor) -> float:
    ranks = torch.stack([v.argsort().argsort().double() for v in (x, y)])
    return torch.corrcoef(ranks)[0, 1].item()


def gap_verdict(regime: Regime, traces: Traces, tuned_at: int) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], tuned_at)
    gap = {rule: (ours - frozen(traces[rule], tuned_at)[1]).mean(0) for rule in SGDS}
    rising = {rule: rank_correlation(torch.tensor(delays).double(), gap[rule]) for rule in SGDS}
    far = [delays.index(delay) for delay in LONG_DELAYS]
    later = tuned_at != TUNED_AT[0]
    holds = all(g[0].item() < NO_DELAY_GAP and g[far].min().item() > LONG_DELAY_GAP for g in gap.values())
    return verdict("gap", holds, figure="fig1-tuned-later" if later else "fig1", p=_THIS, regime=regime.name,
                   later=later, tuned_at=tuned_at, delays=delays, gap=gap, far=far, rising=rising)  # fmt: skip


def maintains_verdict(regime: Regime, traces: Traces, updates: int) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], TUNED_AT[0])
    at = delays.index(DROP_AT)
    drops = (ours[:, :1] - ours).mean(0)
    harmless = [delay for delay, drop in zip(delays, drops, strict=True) if drop <= ALLOWED_DROP]
    accuracy = ours.mean(0)
    return verdict("maintains", DROP_AT in harmless, figure="fig1", p=_THIS, regime=regime.name, first=delays[0],
                   accuracy=accuracy[0], accuracy_late=accuracy[at], longest=max(harmless), updates=updates,
                   root=math.isqrt(updates))  # fmt: skip


def verdicts(regime: Regime, traces: Traces, updates: int) -> list[Verdict]:
    first, later = (gap_verdict(regime, traces, tuned_at) for tuned_at in TUNED_AT)
    return [first, maintains_verdict(regime, traces, updates), later]


def _draw(ax: Axes, regime: Regime, traces: Traces, tuned_at: int) -> None:
    for rule in regime.curves:
        delays, accuracy, _ = frozen(traces[rule], tuned_at)
        style.line(ax, rule, range(len(delays)), accuracy)
    ax.set_xticks(range(len(delays)), [str(delay) for delay in delays])
    ax.set_xlabel("delay (updates)")


def plot(regimes: dict[Regime, Traces], tuned_at: int) -> Figure:
    figure, axes = style.panels([regime.title for regime in regimes], "test accuracy")
    for ax, (regime, traces) in zip(axes, regimes.items(), strict=True):
        _draw(ax, regime, traces, tuned_at)
    style.legend(figure, axes)
    return figure


def table(regime: Regime, traces: Traces, tuned_at: int) -> list[dict[str, str]]:
    rows = []
    for rule in regime.curves:
        delays, accuracy, lr = frozen(traces[rule], tuned_at)
        values = dict(zip(map(str, delays), map(style.three_digits, accuracy.mean(0).tolist()), strict=True))
        rows.append({"rule": style.TITLES[rule], "lr": f"{lr:g}", **values})
    return rows


def finding(traces: Traces) -> str:
    by_rule = {rule: frozen(traces[rule], TUNED_AT[0])[1].mean(0) for rule in ("anytime-sgd", *SGDS)}
    at = frozen(traces["anytime-sgd"], TUNED_AT[0])[0].index(DROP_AT)
    best = max(SGDS, key=lambda rule: by_rule[rule][at])
    (ours, ours_late), (sgd, sgd_late) = ((by_rule[rule][0], by_rule[rule][at]) for rule in ("anytime-sgd", best))
    lead = (ours_late - sgd_late).item()
    result = f"{lead:.2f} ahead" if lead > 0.02 else f"{-lead:.2f} behind" if lead < -0.02 else "no better"
    return (
        f"On a ball, a delay of {DROP_AT} updates takes the test accuracy of {style.TITLES[best]}, from {sgd:.3f} to "
        f"{sgd_late:.3f}, and that of anytime SGD from {ours:.3f} to {ours_late:.3f}, {result}. Learning rates are "
        "tuned without delay and then frozen."
    )


def section(results: SweepResults) -> Section:
    regimes, ball = results.regimes, results.first
    lrs = {regime.name: {rule: frozen(traces[rule], TUNED_AT[0])[2] for rule in regime.curves}
           for regime, traces in regimes.items()}  # fmt: skip
    headline, (ax,) = style.panels(["Accuracy against the delay, on a ball"], "test accuracy", height=style.HEADLINE)
    _draw(ax, ball, regimes[ball], TUNED_AT[0])
    style.legend(headline, [ax])
    text, captions = prose("fig1", ball=ball, updates=results.updates(), tuned_at=TUNED_AT[0],
                           tuned_later_at=TUNED_AT[1], H=lrs["strongly-convex"]["strongly-convex"],
                           l2=list(regimes)[-1].l2)  # fmt: skip
    return Section(
        name="fig1",
        title="Figure 1. Accuracy against the delay",
        text=text,
        figures={"fig1": plot(regimes, TUNED_AT[0]), "fig1-tuned-later": plot(regimes, TUNED_AT[1]),
                 "fig1-ball": headline},
        captions=captions,
        tables={f"{regime.name}, learning rates tuned at delay {at}": table(regime, traces, at)
                for at in TUNED_AT for regime, traces in regimes.items()},
        rows=results.rows(regimes),
        verdicts=tuple(v for regime, traces in results.convex.items() for v in verdicts(regime, traces, ball.updates)),
        config={"sweep": results.describe(), "tuned learning rates": lrs},
        finding=finding(regimes[ball]),
        headline="fig1-ball",
    )  # fmt: skip
