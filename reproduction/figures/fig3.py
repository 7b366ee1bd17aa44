"""Figure 3: excess loss against epochs at a delay of 500, learning rates tuned without delay."""

import sys
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lategrad.problems import Optimum, minimum
from lategrad.registry import parse_set
from lategrad.trace import Trace
from reproduction import style
from reproduction.figures.sweep import LATE, SGDS, FigurePart, Regime, SweepResults, Traces, best_position, claim, plot
from reproduction.jobs import Job
from reproduction.report import Section, Verdict, prose
from reproduction.study import Request, dataset

FALL_REQUIRED = 0.71
"""Over the second half of the run anytime SGD's excess loss must fall to this share or less, and SGD's must not: the
rate 1/sqrt(T) of Theorem 1 falls to 71% when T doubles."""
FACTOR_REQUIRED = 2.0  # at the end, SGD's excess loss must be this many times anytime SGD's


def needed(regime: Regime) -> bool:
    return regime.records > 1 and {0, LATE} <= set(regime.grid_at)


class Figure3(FigurePart):
    """Needs the optima, which stay in the user's cache once they are found."""

    def __init__(self) -> None:
        super().__init__("fig3", needed, section)

    def jobs(self, request: Request) -> list[Job]:
        optima = [Job(f"{regime.place}: the exact optimum", 30, partial(optimum, regime))
                  for regime in self.plan(request).settings if _has_optimum(regime)]  # fmt: skip
        return [*optima, *super().jobs(request)]


def _has_optimum(regime: Regime) -> bool:
    return regime.domain != "whole" or regime.l2 > 0


def optimum(regime: Regime) -> Optimum | None:
    """The smallest loss in the constraint set, up to a proven gap; None where no gap can be proven."""
    if not _has_optimum(regime):
        return None
    return minimum(regime.problem(), parse_set(regime.domain), tolerance=regime.optimum_tolerance)


def over_time(trace: Trace) -> tuple[Tensor, float]:
    """Training loss ``(records, seeds)`` at the delay with the learning rate that is best without delay, and that."""
    best = best_position(trace, 0)
    return trace.loss[:, :, trace.axis("delay").values.index(LATE), best], trace.axes[-1].values[best]


def epochs(regime: Regime, trace: Trace) -> list[float]:
    rows = len(dataset(regime.data, regime.preprocessing).x_train)
    return [step * regime.batch / rows for step in trace.steps.tolist()]


def approach_verdict(regime: Regime, traces: Traces, best: Optimum, sgd: str) -> Verdict:
    excess = {rule: (over_time(traces[rule])[0] - best.value).mean(-1) for rule in ("anytime-sgd", sgd)}
    fall = {rule: (e[-1] / e[len(e) // 2]).item() for rule, e in excess.items()}  # over the second half of the run
    ours, theirs = (values[-1].item() for values in excess.values())
    holds = fall["anytime-sgd"] <= FALL_REQUIRED < fall[sgd] and theirs >= FACTOR_REQUIRED * ours
    return claim("approaches", holds, regime, [LATE], figure="fig3", p=sys.modules[__name__], sgd=sgd,
                 our_fall=fall["anytime-sgd"], their_fall=fall[sgd], ours=ours, theirs=theirs)  # fmt: skip


def _draw(optima: dict[Regime, Optimum | None], ax: Axes, regime: Regime, traces: Traces) -> None:
    best = optima[regime]
    for rule in regime.curves:
        value = over_time(traces[rule])[0].T - (0.0 if best is None else best.value)
        shown = torch.nan_to_num(value, nan=1e6, posinf=1e6).clamp_min(1e-6)
        style.line(ax, rule, epochs(regime, traces[rule]), shown, marker="")
    ax.set(yscale="log", xlabel="epochs", ylabel="training loss" if best is None else "excess training loss")


def section(results: SweepResults) -> Section:
    regimes = results.those(needed, f"with records along the run at delays 0 and {LATE}")
    optima = {regime: optimum(regime) for regime in regimes}
    rows: list[dict[str, Any]] = []
    for regime, traces in regimes.items():
        best = optima[regime]
        for rule, trace in traces.items():
            losses, lr = over_time(trace)
            rows += [{"rule": rule, "regime": regime.place, "updates": regime.updates, "delay": LATE, "lr": lr,
                      "seed": seed, "epoch": epoch, "loss": loss, "excess_loss": loss - best.value if best else ""}
                     for seed, of_seed in enumerate(losses.T.tolist())
                     for epoch, loss in zip(epochs(regime, trace), of_seed, strict=True)]  # fmt: skip
    proven = [f"{r.place} {best.value:.5f} (gap at most {best.gap:.1g})" for r, best in optima.items() if best]
    text, captions = prose("fig3", optima=proven, delay=LATE, updates=results.updates(regimes))
    return Section(
        name="fig3",
        title=f"Figure 3. Excess loss against epochs at delay {LATE}",
        text=text,
        figures={"fig3": plot(regimes, partial(_draw, optima), "")},
        captions=captions,
        rows=rows,
        verdicts=tuple(approach_verdict(regime, regimes[regime], best, sgd) for regime, best in optima.items()
                       if best is not None and regime.l2 == 0 for sgd in SGDS),
        config=results.describe(regimes),
    )  # fmt: skip
