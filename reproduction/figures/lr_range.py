"""Figures 2 and 4: accuracy against the learning rate under one kind of delay."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from lategrad.trace import Trace
from reproduction import style
from reproduction.figures.sweep import FORWARD, LOGNORMAL, SGDS, Delay, Regime, SweepResults, Traces, final_accuracy
from reproduction.report import Section, Verdict, prose, verdict

WITHIN = 0.10  # a learning rate is good if its accuracy is within this share of the rule's own best at this delay
TIMES_REQUIRED = 2.0  # anytime SGD must be good at this many times as many learning rates of its grid as SGD,
MARGIN_REQUIRED = 0.05  # and its accuracy averaged over its grid must be higher by this
_THIS = sys.modules[__name__]


def accuracy_by_lr(trace: Trace, delay: Delay) -> tuple[tuple[float, ...], Tensor]:
    """Learning rates and accuracies ``(seeds, lrs)`` at one delay."""
    return trace.axes[-1].values, final_accuracy(trace)[:, trace.axis("delay").values.index(delay)]


def count_good(accuracy: Tensor, within: float) -> int:
    """At how many learning rates the mean over seeds is within that share of the best one."""
    mean = accuracy.mean(0)
    return int((mean >= (1 - within) * mean.max()).sum())


@dataclass(frozen=True)
class RangeFigure:
    """One figure: its delays and what the paper claims."""

    name: str
    title: str
    delays: dict[str, Delay]  # by the stem of their figures: the first is the paper's
    labels: dict[str, str]  # by the stem, those delays in words
    claim: str
    quote: str
    opens_report: bool = False  # whether its finding is among those that the report opens with

    def verdict(self, stem: str, regime: Regime, traces: Traces) -> Verdict:
        by_rule = {rule: accuracy_by_lr(traces[rule], self.delays[stem])[1] for rule in ("anytime-sgd", *SGDS)}
        good = {rule: count_good(accuracy, WITHIN) for rule, accuracy in by_rule.items()}
        mean = {rule: accuracy.mean().item() for rule, accuracy in by_rule.items()}
        best = {rule: accuracy.mean(0).max().item() for rule, accuracy in by_rule.items()}
        ours, n = "anytime-sgd", by_rule["anytime-sgd"].shape[-1]
        holds = all(good[ours] >= TIMES_REQUIRED * good[r] and mean[ours] - mean[r] >= MARGIN_REQUIRED for r in SGDS)
        return verdict("lr_range", holds, figure=stem, p=_THIS, claim=self.claim, label=self.labels[stem],
                       regime=regime.name, good=good, n=n, mean=mean, best=best, quote=self.quote)  # fmt: skip

    def plot(self, stem: str, results: SweepResults) -> Figure:
        figure, axes = style.panels([regime.title for regime in results.convex], "test accuracy")
        for ax, (regime, traces) in zip(axes, results.convex.items(), strict=True):
            for rule in regime.curves:
                style.line(ax, rule, *accuracy_by_lr(traces[rule], self.delays[stem]))
            ax.set(xscale="log", xlabel="learning rate (Algorithm 2: diameter)")
        style.legend(figure, axes)
        return figure

    def table(self, stem: str, regime: Regime, traces: Traces) -> list[dict[str, str]]:
        rows = []
        for rule in regime.curves:
            lrs, accuracy = accuracy_by_lr(traces[rule], self.delays[stem])
            rows += [{"rule": style.TITLES[rule], "lr": f"{lr:g}", "accuracy": style.three_digits(value)}
                     for lr, value in zip(lrs, accuracy.mean(0).tolist(), strict=True)]  # fmt: skip
        return rows

    def differences(self, results: SweepResults) -> tuple[str, ...]:
        """How the accuracies under the other kinds of delays differ from those under the first."""
        first, *others = self.delays
        paragraphs = []
        for stem in others:
            parts = []
            for regime, traces in results.convex.items():
                gaps = {}
                for rule in regime.curves:
                    (_, a), (_, b) = (accuracy_by_lr(traces[rule], self.delays[name]) for name in (stem, first))
                    gaps[rule] = (a - b).mean(0)
                worst = max(gaps, key=lambda rule: gaps[rule].abs().max().item())
                means = ", ".join(f"{style.TITLES[rule]} {gap.mean():+.3f}" for rule, gap in gaps.items())
                parts.append(f"{regime.name}: on average over the grid {means}; at one learning rate at most "
                             f"{gaps[worst].abs().max():.3f} ({style.TITLES[worst]})")  # fmt: skip
            paragraphs.append(f"With {self.labels[stem]} instead of {self.labels[first]}, accuracies change by: "
                              f"{'. '.join(parts)}.")  # fmt: skip
        return tuple(paragraphs)

    def finding(self, traces: Traces) -> str:
        stem, delay = next(iter(self.delays.items()))
        by_rule = {rule: accuracy_by_lr(traces[rule], delay) for rule in ("anytime-sgd", *SGDS)}
        good = {rule: count_good(accuracy, WITHIN) for rule, (_, accuracy) in by_rule.items()}
        return (
            f"At {self.labels[stem]}, anytime SGD is within {WITHIN:.0%} of its best accuracy at {good['anytime-sgd']} "
            f"of the {len(by_rule['anytime-sgd'][0])} learning rates of its grid; SGD at {good['sgd']} (last iterate) "
            f"and {good['sgd-linear']} (average)."
        )

    def section(self, results: SweepResults) -> Section:
        convex, updates = results.convex, results.updates()
        text, _ = prose("lr-range", updates=updates, forward="fig4-forward" in self.delays)
        return Section(
            name=self.name,
            title=self.title,
            text=(*text, *self.differences(results)),
            figures={stem: self.plot(stem, results) for stem in self.delays},
            captions={stem: f"Test accuracy against the learning rate, {label}; {updates}."
                      for stem, label in self.labels.items()},
            tables={f"{self.labels[stem]}, {regime.name}": self.table(stem, regime, traces)
                    for stem in self.delays for regime, traces in convex.items()},
            rows=[row for row in results.rows(convex) if row["delay"] in self.delays.values()],
            verdicts=tuple(self.verdict(stem, regime, traces)
                           for stem in self.delays for regime, traces in convex.items()),
            config={"sweep": results.describe()},
            finding=self.finding(next(iter(convex.values()))) if self.opens_report else "",
        )  # fmt: skip


FIG2 = RangeFigure(
    name="fig2",
    title="Figure 2. Accuracy against the learning rate at delay 500",
    delays={"fig2": 500},
    labels={"fig2": "delay 500"},
    claim="Anytime SGD is accurate on a wide range of learning rates, SGD on a narrow one",
    quote="anytime SGD achieves high accuracy on a wide range of learning rates, whereas SGD achieves its top "
    "accuracy on a very narrow range",
    opens_report=True,
)
FIG4 = RangeFigure(
    name="fig4",
    title="Figure 4. Accuracy against the learning rate under Lognormal(7, 0.4²) delays",
    delays={"fig4": LOGNORMAL, "fig4-forward": FORWARD},
    labels={"fig4": "Lognormal(7, 0.4²) delays that look back", "fig4-forward": "the same delays in an update queue"},
    claim="Anytime SGD is robust under heavy-tailed delays",
    quote="in Figure 4 the delay is distributed Lognormal(7, 0.4²), a heavy-tail distribution. This shows that "
    "anytime SGD performs better when a high maximal delay, but reasonable mean, is present",
)
