"""The sweep behind Figures 1, 2 and 4: every step under every delay, for each rule and regime, cached on disk.

What the paper leaves open (batch size, epochs, preprocessing, the set) is chosen here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lategrad.problems import SoftmaxRegression, load
from lategrad.registry import build_rule, parse_set
from lategrad.simulate import simulate
from lategrad.trace import Axis, Trace

Say = Callable[[str], None]

LOGNORMAL = "lognormal:7,0.4"
DELAYS: tuple[int | str, ...] = (0, 10, 50, 100, 250, 500, 1000, LOGNORMAL)
TUNED_AT = (0, 250)
"""Delays at which steps are tuned; Figure 1 follows the winners to all other delays."""
WHOLE_GRID = (*TUNED_AT, 500, LOGNORMAL)
"""Delays at which some figure looks at every step; elsewhere only the winners are run."""


def half_decades(low: int, high: int) -> tuple[float, ...]:
    """Powers of the root of ten from 10^low to 10^high.

    >>> half_decades(-1, 0)
    (0.1, 0.316228, 1.0)
    """
    return tuple(round(10 ** (k / 2), 6) for k in range(2 * low, 2 * high + 1))


@dataclass(frozen=True)
class Regime:
    """A set, a penalty, and the rules that are compared under them, each with its grid of steps."""

    name: str
    title: str
    domain: str
    l2: float
    grids: tuple[tuple[str, tuple[float, ...]], ...]
    """Pairs of a rule and its steps; SGD's average and last iterate come from one run."""
    delays: tuple[int | str, ...] = DELAYS
    grid_at: tuple[int | str, ...] = WHOLE_GRID

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules shown: SGD stands for its last iterate and its average."""
        names = [name for name, _ in self.grids]
        return tuple(["sgd", *names] if "sgd-linear" in names else names)


CONVEX_GRIDS = (
    ("sgd-linear", half_decades(-4, 0)),
    ("anytime-sgd", half_decades(-1, 3)),
    ("optimistic-anytime", half_decades(-1, 3)),
)
CONSTRAINED = Regime("constrained", "constrained: Frobenius ball of radius 5", "ball:5", 0.0, CONVEX_GRIDS)
UNCONSTRAINED = Regime("unconstrained", "unconstrained", "whole", 0.0, CONVEX_GRIDS)
STRONGLY_CONVEX = Regime(
    "strongly-convex",
    "strongly convex: l2 = 0.1, ball of radius 5",
    "ball:5",
    0.1,
    (*CONVEX_GRIDS[:2], ("strongly-convex", half_decades(-1, 3))),
    delays=(0, 100, 250, 500, 1000),
    grid_at=TUNED_AT,  # Figures 2 and 4 show the other two regimes
)
REGIMES = (CONSTRAINED, UNCONSTRAINED, STRONGLY_CONVEX)


@dataclass(frozen=True)
class Scale:
    """How much to compute."""

    epochs: float
    seeds: int
    batch: int = 64
    every_step: int = 1
    """Take every n-th step of the grids: 1 for half decades, 2 for decades."""
    optimum_tolerance: float = 1e-4


SCALES = {
    "quick": Scale(epochs=4, seeds=1, every_step=2, optimum_tolerance=1e-3),
    "paper": Scale(epochs=40, seeds=3),
    "full": Scale(epochs=25, seeds=3, batch=4),
}


@dataclass(frozen=True)
class SweepConfig:
    """Everything that was chosen."""

    scale: Scale
    data: str = "fashion-mnist"
    preprocessing: str = "standardise-globally"

    @property
    def steps(self) -> int:
        """Updates: one minibatch each."""
        return round(self.scale.epochs * len(dataset(self.data, self.preprocessing).x_train) / self.scale.batch)

    def problem(self, regime: Regime) -> SoftmaxRegression:
        """The objective of a regime."""
        return SoftmaxRegression(dataset(self.data, self.preprocessing), batch=self.scale.batch, l2=regime.l2)

    def seeds(self) -> list[int]:
        """0, 1, ..."""
        return list(range(self.scale.seeds))

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self) | {"steps": self.steps}


@lru_cache(maxsize=2)
def dataset(name: str, preprocessing: str) -> Any:
    """The data, loaded once."""
    return load(name, preprocessing)


def cached_trace(path: Path, key: dict[str, Any], make: Callable[[], Trace]) -> Trace:
    """The trace at ``path`` if it was made from the same choices and is complete; else make and keep it."""
    return find_trace(path, key) or keep_trace(path, key, make())


def find_trace(path: Path, key: dict[str, Any]) -> Trace | None:
    """The trace at ``path``, if it was made from the same choices and is complete."""
    if not path.exists():
        return None
    try:
        found = Trace.load(path)
    except ValueError:
        return None  # damaged: made again
    return found if found.config.get("made_from") == _fingerprint(key) and found.complete else None


def keep_trace(path: Path, key: dict[str, Any], trace: Trace) -> Trace:
    """Write a trace to ``path`` with the choices that it was made from; an interrupted one interrupts everything."""
    if not trace.complete:
        raise KeyboardInterrupt
    trace = dataclasses.replace(trace, config={**trace.config, "made_from": _fingerprint(key)})
    trace.save(path)
    return trace


def _fingerprint(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def sweep(config: SweepConfig, regime: Regime, out: Path, *, device: str = "cpu", say: Say = print) -> dict[str, Trace]:
    """Final accuracies of every rule of a regime: axes seed, delay, and the rule's step.

    What no figure looks at is not run and is NaN: steps that won nowhere, at delays where the grid is not shown.
    """
    traces: dict[str, Trace] = {}
    shown = tuple(delay for delay in regime.delays if delay in regime.grid_at)
    others = tuple(delay for delay in regime.delays if delay not in regime.grid_at)
    for name, whole_grid in regime.grids:
        grid = whole_grid[:: config.scale.every_step]
        first = _judged(config, regime, name, grid, shown, out / "traces" / f"{regime.name}-{name}-grid", device, say)
        winners = sorted({tuned(trace, delay) for trace in first.values() for delay in TUNED_AT})
        won = tuple(grid[i] for i in winners)
        second = _judged(config, regime, name, won, others, out / "traces" / f"{regime.name}-{name}-won", device, say)
        traces |= {rule: _joined(regime, first[rule], second[rule], winners) for rule in first}
    return traces


def _judged(config: SweepConfig, regime: Regime, name: str, steps: tuple[float, ...], delays: tuple[int | str, ...],
            path: Path, device: str, say: Say) -> dict[str, Trace]:  # fmt: skip
    """One simulation, by the rule it judges: SGD's is judged by its average and by its last iterate."""
    problem = config.problem(regime)
    key = {"config": config.describe(), "regime": dataclasses.asdict(regime), "rule": name, "steps": steps,
           "delays": delays}  # fmt: skip

    def run() -> Trace:
        say(f"{regime.name}: {name}, {len(steps)} steps x {len(delays)} delays x {config.scale.seeds} seeds")
        rule = build_rule(name, torch.tensor(steps, dtype=torch.float64).unsqueeze(-1), parse_set(regime.domain))
        seeds = config.seeds()
        return simulate(problem, rule, delays, config.steps, seed=seeds, device=device, record_every=config.steps)

    trace = cached_trace(path.with_suffix(".safetensors"), key, run)
    return {name: trace} | ({"sgd": _at_last_iterate(trace, problem, device)} if name == "sgd-linear" else {})


def _joined(regime: Regime, grid: Trace, winners: Trace, positions: list[int]) -> Trace:
    """Both parts on the axes of the whole sweep; the vectors are left behind in their files."""
    axes = (grid.axes[0], Axis("delay", regime.delays), grid.axes[2])
    values: dict[str, Any] = {}
    for name in ("loss", "accuracy"):
        whole = torch.full([len(axis.values) for axis in axes], torch.nan, dtype=torch.float64)
        for part, steps in ((grid, list(range(len(axes[2].values)))), (winners, positions)):
            rows = torch.tensor([regime.delays.index(delay) for delay in part.axis("delay").values])
            whole[:, rows.unsqueeze(-1), torch.tensor(steps)] = getattr(part, name)[-1]
        values[name] = whole.unsqueeze(0)
    return dataclasses.replace(grid, steps=grid.steps[-1:], axes=axes, **values)


def _at_last_iterate(trace: Trace, problem: SoftmaxRegression, device: str) -> Trace:
    """The end of the same run judged by its last iterate instead of its average."""
    on_device, query = problem.to(device), trace.query.to(device)
    accuracy = on_device.accuracy(query)
    return dataclasses.replace(
        trace,
        steps=trace.steps[-1:],
        loss=on_device.loss(query).squeeze(-1).unsqueeze(0).cpu(),
        accuracy=None if accuracy is None else accuracy.squeeze(-1).unsqueeze(0).cpu(),
        output=trace.query,
    )


def final_accuracy(trace: Trace) -> Tensor:
    """Test accuracy at the end, ``(seeds, delays, steps)``; what diverged counts as zero."""
    assert trace.accuracy is not None
    return torch.where(torch.isfinite(trace.loss[-1]), trace.accuracy[-1], 0.0)


def tuned(trace: Trace, delay: int | str) -> int:
    """The position of the step with the best mean accuracy over seeds at one delay."""
    position = trace.axis("delay").values.index(delay)
    return int(final_accuracy(trace)[:, position].mean(0).argmax())


def sweep_rows(regime: Regime, traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """Every final number of a sweep, in the columns of the figures' CSV files."""
    rows = []
    for name, trace in traces.items():
        step_axis = trace.axes[-1].name
        for row in trace.rows():
            if not math.isnan(row["accuracy"]):  # what was run
                rows.append({"rule": name, "regime": regime.name, "delay": row["delay"], "lr": row[step_axis],
                             "seed": row["seed"], "step": row["step"], "accuracy": row["accuracy"],
                             "loss": row["loss"], "excess_loss": row["excess_loss"]})  # fmt: skip
    return rows
