"""Figure 1: accuracy against the delay, each rule's learning rate tuned at one delay and then frozen."""

import sys
from functools import partial

from matplotlib.axes import Axes
from torch import Tensor

from lategrad.trace import Trace
from reproduction import report, style
from reproduction.figures import sweep
from reproduction.figures.sweep import LATE, SGDS, Regime, SweepResults, Traces
from reproduction.report import Section, Verdict, prose

NO_DELAY_GAP = 0.02  # without delay the gap between anytime SGD and SGD must be below this,
GROWTH = 0.05  # and at the longest delay larger by this: SGD has lost that much more
ALLOWED_DROP = 0.05  # what anytime SGD may have lost at the delay of Figures 2 and 3
_THIS = sys.modules[__name__]


def needed(regime: Regime) -> bool:
    return 0 in regime.tuned_at and sum(isinstance(delay, int) for delay in regime.delays) > 1


def frozen(trace: Trace, tuned_at: int, record: int = -1) -> tuple[list[int], Tensor, float]:
    """Constant delays, accuracies ``(seeds, delays)`` with the learning rate tuned at one delay, and that rate."""
    values, best = trace.axis("delay").values, sweep.best_position(trace, tuned_at, record)
    positions = [i for i, delay in enumerate(values) if isinstance(delay, int)]
    accuracy = sweep.final_accuracy(trace, record)[:, positions, best]
    return [values[i] for i in positions], accuracy, trace.axes[-1].values[best]


def late(delays: list[int]) -> int:
    """The position of the delay of Figures 2 and 3, or of the longest."""
    return delays.index(LATE if LATE in delays else max(delays))


def gap_verdict(regime: Regime, traces: Traces, tuned_at: int) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], tuned_at)
    gap = {rule: (ours - frozen(traces[rule], tuned_at)[1]).mean(0) for rule in SGDS}
    longest = delays.index(max(delays))
    holds = all(abs(g[0].item()) < NO_DELAY_GAP and (g[longest] - g[0]).item() >= GROWTH for g in gap.values())
    return sweep.claim("gap", holds, regime, [max(delays)], figure="fig1-tuned-later" if tuned_at else "fig1",
                       p=_THIS, tuned_at=tuned_at, delays=delays, gap=gap)  # fmt: skip


def maintains_verdict(regime: Regime, traces: Traces) -> Verdict:
    delays, ours, _ = frozen(traces["anytime-sgd"], 0)
    at, accuracy = late(delays), ours.mean(0)
    harmless = [delay for delay, value in zip(delays, accuracy, strict=True) if value >= accuracy[0] - ALLOWED_DROP]
    return sweep.claim("maintains", delays[at] in harmless, regime, [delays[at]], figure="fig1", p=_THIS,
                       delay=delays[at], accuracy=accuracy[0], accuracy_late=accuracy[at],
                       longest=max(harmless))  # fmt: skip


def verdicts(regime: Regime, traces: Traces) -> list[Verdict]:
    if regime.l2 > 0 or not {"anytime-sgd", *SGDS} <= set(traces):
        return []
    first, *later = (gap_verdict(regime, traces, int(tuned_at)) for tuned_at in regime.tuned_at)
    return [first, maintains_verdict(regime, traces), *later]


def _draw(tuned_at: int, ax: Axes, regime: Regime, traces: Traces) -> None:
    for rule in regime.curves:
        delays, accuracy, _ = frozen(traces[rule], tuned_at)
        style.line(ax, rule, range(len(delays)), accuracy)
    ax.set_xticks(range(len(delays)), [str(delay) for delay in delays])
    ax.set(xlabel="delay (updates)", xlim=(-0.5, len(delays) - 0.5))
    ax.axvspan(sum(map(regime.covers, delays)) - 0.5, len(delays) - 0.5, color="black", alpha=0.07, linewidth=0)


def table(regime: Regime, traces: Traces, tuned_at: int) -> list[dict[str, str]]:
    rows = []
    for rule in regime.curves:
        delays, accuracy, lr = frozen(traces[rule], tuned_at)
        values = dict(zip(map(str, delays), map(style.three_digits, accuracy.mean(0).tolist()), strict=True))
        rows.append({"rule": style.TITLES[rule], "lr": f"{lr:g}", **values})
    return rows


def finding(regimes: dict[Regime, Traces]) -> str:
    """What the delay does to anytime SGD and to the better output of SGD, at every horizon."""
    runs, delays, at = [], [0], 0
    for regime, traces in sorted(regimes.items(), key=lambda item: -item[0].updates):
        if not verdicts(regime, traces):
            return ""
        delays, ours, _ = frozen(traces["anytime-sgd"], 0)
        at = late(delays)
        sgds = [frozen(traces[rule], 0)[1].mean(0)[[0, at]].tolist() for rule in SGDS]
        best = max(sgds, key=lambda accuracies: accuracies[1])
        runs.append((regime.updates, *ours.mean(0)[[0, at]].tolist(), *best))
    return report.finding("fig1", delay=delays[at], runs=runs, title=next(iter(regimes)).title)


def section(results: SweepResults) -> Section:
    regimes = results.those(needed, "in which learning rates are tuned at delay 0 and there is another constant delay")
    first = {regime: traces for regime, traces in regimes.items() if regime.place == next(iter(regimes)).place}
    at = {f"fig1{'-tuned-later' if k else ''}": int(delay) for k, delay in enumerate(max(r.tuned_at for r in regimes))}
    figures = {stem: sweep.plot({r: t for r, t in regimes.items() if delay in r.tuned_at}, partial(_draw, delay),
                                "test accuracy") for stem, delay in at.items()}  # fmt: skip
    figures["fig1-headline"] = sweep.plot(first, partial(_draw, 0), "test accuracy", height=style.HEADLINE)
    text, captions = prose("fig1", regimes=list(regimes), runs=results.updates(regimes), at=at,
                           title=next(iter(first)).title)  # fmt: skip
    return Section(
        name="fig1",
        title="Figure 1. Accuracy against the delay",
        text=text,
        figures=figures,
        captions={stem: captions[stem] for stem in figures},
        tables={f"{regime.label}, learning rates tuned at delay {at}": table(regime, traces, int(at))
                for regime, traces in regimes.items() for at in regime.tuned_at},
        rows=results.rows(regimes),
        verdicts=tuple(v for regime, traces in regimes.items() for v in verdicts(regime, traces)),
        config=results.describe(regimes),
        finding=finding(first),
        headline="fig1-headline",
    )  # fmt: skip
