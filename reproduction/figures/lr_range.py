"""Figures 2 and 4: accuracy against the learning rate under one kind of delay."""

import sys
from dataclasses import dataclass

from matplotlib.axes import Axes
from torch import Tensor

from lategrad.trace import Trace
from reproduction import report, style
from reproduction.figures import sweep
from reproduction.figures.sweep import HEAVY, LATE, SGDS, Delay, Regime, SweepResults, Traces
from reproduction.report import Section, Verdict, prose

WITHIN = 0.10  # a learning rate is good if its accuracy is within this share of the rule's own best at this delay
TIMES_REQUIRED = 2.0  # anytime SGD must be good at this many times as many learning rates of its grid as SGD,
MARGIN_REQUIRED = 0.05  # and its accuracy averaged over its grid must be higher by this
_THIS = sys.modules[__name__]


def accuracy_by_lr(trace: Trace, delay: Delay) -> tuple[tuple[float, ...], Tensor]:
    """Learning rates and accuracies ``(seeds, lrs)`` at one delay."""
    return trace.axes[-1].values, sweep.final_accuracy(trace)[:, trace.axis("delay").values.index(delay)]


def count_good(accuracy: Tensor, within: float) -> int:
    """At how many learning rates the mean over seeds is within that share of the best one."""
    mean = accuracy.mean(0)
    return int((mean >= (1 - within) * mean.max()).sum())


@dataclass(frozen=True)
class RangeFigure:
    """One figure and its delays."""

    name: str
    title: str
    delay: Delay
    label: str  # the delay in words
    opens_report: bool = False  # whether its finding is among those that the report opens with

    def needed(self, regime: Regime) -> bool:
        return regime.l2 == 0 and self.delay in regime.grid_at

    def verdict(self, regime: Regime, traces: Traces) -> Verdict:
        by_rule = {rule: accuracy_by_lr(traces[rule], self.delay)[1] for rule in ("anytime-sgd", *SGDS)}
        good = {rule: count_good(accuracy, WITHIN) for rule, accuracy in by_rule.items()}
        mean = {rule: accuracy.mean().item() for rule, accuracy in by_rule.items()}
        best = {rule: accuracy.mean(0).max().item() for rule, accuracy in by_rule.items()}
        ours, n = "anytime-sgd", by_rule["anytime-sgd"].shape[-1]
        holds = all(good[ours] >= TIMES_REQUIRED * good[r] and mean[ours] - mean[r] >= MARGIN_REQUIRED for r in SGDS)
        return sweep.claim("lr_range", holds, regime, [self.delay], figure=self.name, p=_THIS,
                           queue=self is FIG4, label=self.label, good=good, n=n, mean=mean, best=best)  # fmt: skip

    def draw(self, ax: Axes, regime: Regime, traces: Traces) -> None:
        for rule in regime.curves:
            style.line(ax, rule, *accuracy_by_lr(traces[rule], self.delay))
        ax.set(xscale="log", xlabel="learning rate")

    def finding(self, regime: Regime, traces: Traces) -> str:
        by_rule = {rule: accuracy_by_lr(traces[rule], self.delay) for rule in ("anytime-sgd", *SGDS)}
        good = {rule: count_good(accuracy, WITHIN) for rule, (_, accuracy) in by_rule.items()}
        n = len(by_rule["anytime-sgd"][0])
        ours, others = good["anytime-sgd"], max(good[rule] for rule in SGDS)
        return report.finding("lr_range", label=self.label, within=WITHIN, ours=ours, n=n, others=others,
                              updates=regime.updates)  # fmt: skip

    def section(self, results: SweepResults) -> Section:
        regimes = results.those(self.needed, f"with all learning rates at {self.label}")
        first, updates = max(regimes, key=lambda regime: regime.updates), results.updates(regimes)
        text, _ = prose("lr-range", updates=updates, queue=self is FIG4)
        return Section(
            name=self.name,
            title=self.title,
            text=text,
            figures={self.name: sweep.plot(regimes, self.draw, "test accuracy")},
            captions={self.name: f"Test accuracy against the learning rate, {self.label}."},
            rows=results.rows(regimes, self.delay),
            verdicts=tuple(self.verdict(regime, traces) for regime, traces in regimes.items()
                           if {"anytime-sgd", *SGDS} <= set(traces)),
            config=results.describe(regimes),
            finding=self.finding(first, regimes[first]) if self.opens_report else "",
        )  # fmt: skip


FIG2 = RangeFigure("fig2", f"Figure 2. Accuracy against the learning rate at delay {LATE}", LATE, f"delay {LATE}",
                   opens_report=True)  # fmt: skip
FIG4 = RangeFigure("fig4", "Figure 4. Accuracy against the learning rate under Lognormal(7, 0.4²) delays", HEAVY,
                   "Lognormal(7, 0.4²) delays")  # fmt: skip
