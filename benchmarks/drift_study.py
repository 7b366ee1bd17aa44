"""Drift V over the runs of a small deep study: which rules keep it small, and does it predict which runs fail?

All rules of the deep study but the synchronous ones, an MLP and a CNN on scikit-learn's digits, nine learning rates,
four delays, one seed. Finished rules are kept in OUT, so that an interrupted study continues.

    python -m benchmarks.drift_study --figure docs/figures/drift.svg
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import roc_auc_score

import lategrad as lg
from lategrad.problems import ModuleProblem, load
from reproduction.deep import models
from reproduction.deep.plan import CANDIDATES
from reproduction.study import Candidate, column
from reproduction.style import BASELINE, COLOURS, TITLES, three_digits

DELAYS = [0, 4, 16, 64]
MODELS = {"mlp": models.mlp, "cnn": models.cnn}
UPDATES, BATCH = 1_500, 32
FAILED = 0.5  # nats: a run with a larger training loss at its end has failed; the first loss is about 2.3
LEARNS = 0.1  # nats: a learning rate learns without delay if its training loss is smaller there
MARKERS = {4: "o", 16: "s", 64: "^"}
OURS = ("steady-adam", "steady-muon")
RULES = [candidate for candidate in CANDIDATES if not candidate.synchronous]


class Run(NamedTuple):
    """One run, and how its learning rate did among the others of the rule."""

    model: str
    rule: str
    lr: float
    delay: int
    drift: float
    loss: float
    accuracy: float
    slow: bool  # a larger learning rate has a smaller training loss at the same delay
    frozen: bool  # its learning rate has the smallest training loss without delay
    learns: bool  # its learning rate learns without delay

    @property
    def failed(self) -> bool:
        return self.loss > FAILED


def problem(model: str) -> ModuleProblem:
    torch.manual_seed(0)
    module = MODELS[model](side=8)
    return ModuleProblem(module, load("digits", "standardise-globally"), batch=BATCH)


def simulate(model: str, candidate: Candidate) -> lg.Trace:
    changes = {"annealing": UPDATES / 4} if candidate.rule == "pipemare" else {}
    rule = candidate.build(column(candidate.lrs), **changes)
    return lg.simulate(problem(model), rule, DELAYS, UPDATES, drift=True, record_every=UPDATES // 2, compile=False)


def runs_of(model: str, candidate: Candidate, folder: Path) -> list[Run]:
    path = folder / f"{model}-{candidate.rule}.safetensors"
    trace = lg.Trace.load(path) if path.exists() else simulate(model, candidate)
    if not path.exists():
        trace.save(path)
    drift, loss = (values.nan_to_num(nan=math.inf) for values in (trace.certificate().drift, trace.loss[-1]))
    accuracy = trace.accuracy[-1]
    best = loss.argmin(1).tolist()
    return [Run(model, candidate.rule, lr, delay, drift[i, k].item(), loss[i, k].item(), accuracy[i, k].item(),
                slow=k < best[i], frozen=k == best[0], learns=loss[0, k].item() <= LEARNS)
            for i, delay in enumerate(DELAYS) for k, lr in enumerate(candidate.lrs)]  # fmt: skip


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's; NaN for a constant."""
    return float(spearmanr(x, y).statistic) if len(set(x)) > 1 else math.nan


def discrimination(values: list[float], failed: list[bool]) -> float:
    """The probability that a failed run has a larger value than one that has not failed (AUC)."""
    return float(roc_auc_score(failed, rankdata(values))) if len(set(values)) > 1 else math.nan


def print_prediction(runs: list[Run]) -> None:
    """What V, the delay and the learning rate say of the training loss, and of which runs failed."""
    print("| runs | number | failed | rank correlation: V | delay | lr | AUC: V | delay | lr |\n|" + "---|" * 9)
    late = [run for run in runs if run.delay]
    not_slow = [run for run in late if not run.slow]
    groups = {"all": late, "that learn without delay": [run for run in late if run.learns], "not slow": not_slow}
    groups["not slow, finite"] = [run for run in not_slow if math.isfinite(run.loss + run.drift)]
    groups |= {f"not slow, {model.upper()}": [run for run in not_slow if run.model == model] for model in MODELS}
    groups |= {f"not slow, delay {delay}": [run for run in not_slow if run.delay == delay] for delay in DELAYS[1:]}
    groups |= {"slow": [run for run in late if run.slow], "frozen": [run for run in late if run.frozen]}
    for name, some in groups.items():
        failed, loss = [run.failed for run in some], [run.loss for run in some]
        predictors = [[run.drift for run in some], [float(run.delay) for run in some], [run.lr for run in some]]
        correlations = " | ".join(_cell(rank_correlation(values, loss)) for values in predictors)
        areas = " | ".join(_cell(discrimination(values, failed)) for values in predictors)
        print(f"| {name} | {len(some)} | {sum(failed)} | {correlations} | {areas} |")


def print_thresholds(runs: list[Run]) -> None:
    """How many of the runs that are not slow failed on each side of some values of V."""
    fast = [run for run in runs if run.delay and not run.slow]
    for low, high in ((0.0, 0.5), (0.5, 2.0), (2.0, math.inf)):
        some = [run for run in fast if low < run.drift <= high]
        alive = Counter(TITLES[run.rule] for run in some if not run.failed)
        print(f"not slow, V from {low} to {high}: {len(some) - alive.total()} of {len(some)} failed; others: "
              + ", ".join(f"{count} {title}" for title, count in alive.most_common(3)))  # fmt: skip


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def print_rules(runs: list[Run], model: str) -> None:
    columns = ["rule", "lr", *(f"V at {delay}" for delay in DELAYS[1:]), *(f"accuracy at {delay}" for delay in DELAYS)]
    print(f"\n{model.upper()}\n\n| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    rows = []
    for candidate in RULES:
        own = [run for run in runs if (run.model, run.rule) == (model, candidate.rule)]
        frozen = {run.delay: run for run in own if run.frozen}
        drifts = " | ".join(f"{frozen[delay].drift:.2g}" for delay in DELAYS[1:])
        accuracies = " | ".join(three_digits(frozen[delay].accuracy) for delay in DELAYS)
        row = f"| {TITLES[candidate.rule]} | {frozen[0].lr:.2g} | {drifts} | {accuracies} |"
        rows.append((frozen[DELAYS[-1]].drift, row))
    print("\n".join(row for _, row in sorted(rows)))


def draw(runs: list[Run], path: Path) -> None:
    """Training loss against V: all delayed runs, and those that are not slow."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    shown = [run for run in runs if run.delay]
    fast = [run for run in shown if not run.slow]
    for ax, some, title in ((left, shown, "all delayed runs"), (right, fast, "those that are not slow")):
        for delay, marker in MARKERS.items():
            for ours in (False, True):  # ours on top
                own = [run for run in some if run.delay == delay and (run.rule in OURS) == ours]
                x, y = [min(run.drift, 1e4) for run in own], [min(max(run.loss, 1e-4), 30.0) for run in own]
                colours = [COLOURS.get(run.rule, BASELINE) for run in own]
                ax.scatter(x, y, c=colours, marker=marker, s=16, alpha=0.7, linewidths=0)
        ax.axhline(FAILED, color="black", linewidth=1, linestyle=":")
        ax.set(xscale="log", yscale="log", xlabel="drift V", title=f"{title} ({len(some)})")
        ax.grid(alpha=0.3)
    left.set_ylabel("training loss at the end")
    left.annotate("above: failed", (0.02, FAILED), xycoords=("axes fraction", "data"), va="top", fontsize="small")
    handles = [left.scatter([], [], color=BASELINE, marker=marker, label=f"delay {delay}")
               for delay, marker in MARKERS.items()]  # fmt: skip
    handles += [left.scatter([], [], color=COLOURS[rule], label=TITLES[rule]) for rule in OURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/drift"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for model in MODELS for candidate in RULES for run in runs_of(model, candidate, args.out)]
    print_prediction(runs)
    print_thresholds(runs)
    for model in MODELS:
        print_rules(runs, model)
    if args.figure is not None:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
