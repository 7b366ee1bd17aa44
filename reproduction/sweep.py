"""The sweep behind the four figures: steps under delays, for each rule and regime, cached on disk.

What the paper leaves open (batch size, epochs, preprocessing, the set) is chosen here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lategrad.problems import SoftmaxRegression, load
from lategrad.registry import build_rule, parse_set
from lategrad.simulator import simulate
from lategrad.support.validation import require
from lategrad.trace import Axis, Trace
from reproduction import mlbench, style
from reproduction.jobs import Job, Lane

LOGNORMAL = "lognormal:7,0.4"
FORWARD = f"queue:{LOGNORMAL}"
"""The same law in an update queue, where a delay is drawn as the query is handed out."""
DELAYS: tuple[int | str, ...] = (0, 10, 50, 100, 250, 500, 1000, LOGNORMAL, FORWARD)
TUNED_AT = (0, 250)
"""Delays at which steps are tuned; Figure 1 follows the winners to all other delays."""
OVER_TIME = 500
"""The delay at which Figure 3 follows the winners over time."""
WHOLE_GRID = (*TUNED_AT, 500, LOGNORMAL, FORWARD)
"""Delays at which some figure looks at every step; elsewhere only the winners are run."""
RECORDS = 25
"""Looks at the losses of the winners along the way, for Figure 3."""
RUN_STEP = {"cpu": 40e-6, "cuda": 1e-6}
"""Seconds for one update of one run at batch 64, about, on one core or on a GPU; for forecasts."""


def half_decades(low: float, high: float) -> tuple[float, ...]:
    """Powers of the root of ten from 10^low to 10^high, both whole or half.

    >>> half_decades(-1, 0.5)
    (0.1, 0.316228, 1.0, 3.162278)
    """
    return tuple(round(10 ** (k / 2), 6) for k in range(round(2 * low), round(2 * high) + 1))


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

    def __post_init__(self) -> None:
        for name in ("delays", "grid_at"):
            delays = getattr(self, name)
            require(name, delays, set(TUNED_AT) <= set(delays), f"delays with {TUNED_AT}, where steps are tuned")

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
    "quick": Scale(epochs=40, seeds=1, every_step=2, optimum_tolerance=1e-3),
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
    return mlbench.load(name, preprocessing) if name in mlbench.FILES else load(name, preprocessing)


def cached_trace(path: Path, key: dict[str, Any], make: Callable[[], Trace]) -> Trace:
    """The trace at ``path`` if it was made from the same choices and is complete; else make and keep it."""
    return find_trace(path, key) or keep_trace(path, key, make())


def find_trace(path: Path, key: dict[str, Any]) -> Trace | None:
    """The trace at ``path``, if it was made from the same choices and is complete."""
    found = load_trace(path)
    whole = found is not None and found.config.get("made_from") == _fingerprint(key) and found.complete
    return found if whole else None


def load_trace(path: Path) -> Trace | None:
    """The trace at ``path``; None if there is none, or a damaged one, which is then made again."""
    try:
        return Trace.load(path) if path.exists() else None
    except ValueError:
        return None


def keep_trace(path: Path, key: dict[str, Any], trace: Trace) -> Trace:
    """Write a trace to ``path`` with the choices that it was made from; an interrupted one interrupts everything."""
    if not trace.complete:
        raise KeyboardInterrupt
    trace = dataclasses.replace(trace, config={**trace.config, "made_from": _fingerprint(key)})
    trace.save(path)
    return trace


def _fingerprint(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def sweep(config: SweepConfig, regime: Regime, out: Path, *, device: str = "cpu") -> dict[str, Trace]:
    """Final accuracies of every rule of a regime: axes seed, delay, and the rule's step.

    What no figure looks at is not run and is NaN: steps that won nowhere, at delays where the grid is not shown.
    """
    traces: dict[str, Trace] = {}
    for name, _ in regime.grids:
        grid, winners = _grid(config, regime, name, out, device), _winners(config, regime, name, out, device)
        traces |= {rule: _joined(regime, grid[rule], winners[rule]) for rule in grid}
    return traces


def over_time(config: SweepConfig, regime: Regime, rule: str, out: Path, *, device: str = "cpu") -> Trace:
    """A rule with the step that is best without delay, at Figure 3's delay, recorded along the way; one axis, seeds.

    SGD's last iterate is not what its sweep recorded (that is its average) and gets a run of its own.
    """
    step = _best_steps(config, regime, rule, out, device)[0]
    if rule == "sgd":
        path = _path(out, regime, rule, "over-time")
        return _one(_run(config, regime, rule, (step,), (OVER_TIME,), path, device), OVER_TIME, step)
    return _one(_winners(config, regime, rule, out, device)[rule], OVER_TIME, step)


def sweep_jobs(config: SweepConfig, out: Path, device: str) -> list[Job]:
    """A job for every rule of every regime."""
    jobs = []
    for regime in REGIMES:
        shown = sum(delay in regime.grid_at for delay in regime.delays)
        for name, grid in regime.grids:
            runs = config.scale.seeds * (shown * len(grid[:: config.scale.every_step])
                                         + 2 * (len(regime.delays) - shown + 1))  # fmt: skip
            leaves = tuple(_path(out, regime, name, part) for part in ("grid", "won"))
            work = partial(_all_runs, config, regime, name, out, device)
            seconds = 15 + runs * config.steps * RUN_STEP[torch.device(device).type]
            lane: Lane = "processes" if device == "cpu" else "gpu"
            jobs.append(Job(f"{regime.name}: {style.TITLES[name]}", seconds, work, leaves, lane))
    return jobs


def _path(out: Path, regime: Regime, name: str, part: str) -> Path:
    return out / "traces" / f"{regime.name}-{name}-{part}.safetensors"


def _all_runs(config: SweepConfig, regime: Regime, name: str, out: Path, device: str) -> None:
    _winners(config, regime, name, out, device)
    if name == "sgd-linear":
        over_time(config, regime, "sgd", out, device=device)


def _grid(config: SweepConfig, regime: Regime, name: str, out: Path, device: str) -> dict[str, Trace]:
    """Every step, where a figure shows them all."""
    delays = tuple(delay for delay in regime.delays if delay in regime.grid_at)
    steps = dict(regime.grids)[name][:: config.scale.every_step]
    return _judged(config, regime, name, steps, delays, _path(out, regime, name, "grid"), device)


def _best_steps(config: SweepConfig, regime: Regime, rule: str, out: Path, device: str) -> list[float]:
    """The winning step at each of the delays where steps are tuned."""
    trace = _grid(config, regime, "sgd-linear" if rule == "sgd" else rule, out, device)[rule]
    return [trace.axes[-1].values[tuned(trace, delay)] for delay in TUNED_AT]


def _winners(config: SweepConfig, regime: Regime, name: str, out: Path, device: str) -> dict[str, Trace]:
    """The steps that won somewhere at the other delays, and at Figure 3's."""
    delays = (*(delay for delay in regime.delays if delay not in regime.grid_at), OVER_TIME)
    delays = tuple(dict.fromkeys(delays))
    rules = ("sgd", name) if name == "sgd-linear" else (name,)
    steps = {step for rule in rules for step in _best_steps(config, regime, rule, out, device)}
    path = _path(out, regime, name, "won")
    return _judged(config, regime, name, tuple(sorted(steps)), delays, path, device, records=RECORDS)


def _judged(config: SweepConfig, regime: Regime, name: str, steps: tuple[float, ...], delays: tuple[int | str, ...],
            path: Path, device: str, records: int = 1) -> dict[str, Trace]:  # fmt: skip
    """One simulation, by the rule it judges: SGD's is judged by its average and by its last iterate."""
    trace = _run(config, regime, name, steps, delays, path, device, records)
    if name != "sgd-linear":
        return {name: trace}
    last = cached_trace(path.with_stem(f"{path.stem}-last"), {"of": trace.config["made_from"]},
                        lambda: _at_last_iterate(trace, config.problem(regime), device))  # fmt: skip
    return {name: trace, "sgd": last}


def _run(config: SweepConfig, regime: Regime, name: str, steps: tuple[float, ...], delays: tuple[int | str, ...],
         path: Path, device: str, records: int = RECORDS) -> Trace:  # fmt: skip
    key = {"config": config.describe(), "regime": dataclasses.asdict(regime), "rule": name, "steps": steps,
           "delays": delays, "records": records}  # fmt: skip

    def run() -> Trace:
        rule = build_rule(name, torch.tensor(steps, dtype=torch.float64).unsqueeze(-1), parse_set(regime.domain))
        return simulate(config.problem(regime), rule, delays, config.steps, seed=config.seeds(), device=device,
                        record_every=-(-config.steps // records))  # fmt: skip

    return cached_trace(path, key, run)


def _joined(regime: Regime, grid: Trace, winners: Trace) -> Trace:
    """Both parts on the axes of the whole sweep; the vectors are left behind in their files."""
    axes = (grid.axes[0], Axis("delay", regime.delays), grid.axes[2])
    values: dict[str, Any] = {}
    for name in ("loss", "accuracy"):
        whole = torch.full([len(axis.values) for axis in axes], torch.nan, dtype=torch.float64)
        for part in (winners, grid):  # where both have a run it is the same one
            delays = part.axis("delay").values
            shown = [place for place, delay in enumerate(delays) if delay in regime.delays]  # Figure 3's may be none
            rows = torch.tensor([regime.delays.index(delays[place]) for place in shown], dtype=torch.int64)
            columns = torch.tensor([axes[2].values.index(step) for step in part.axes[2].values])
            whole[:, rows.unsqueeze(-1), columns] = getattr(part, name)[-1][:, shown]
        values[name] = whole.unsqueeze(0)
    return dataclasses.replace(grid, steps=grid.steps[-1:], axes=axes, **values)


def _one(trace: Trace, delay: int | str, step: float) -> Trace:
    """The runs with one delay and one step; the vectors are left behind."""
    place = (..., trace.axis("delay").values.index(delay), trace.axes[2].values.index(step))
    assert trace.accuracy is not None
    return dataclasses.replace(trace, axes=trace.axes[:1], loss=trace.loss[place], accuracy=trace.accuracy[place],
                               delays=trace.delays[..., place[1]], output=trace.output[..., :0],
                               query=trace.query[..., :0])  # fmt: skip


def _at_last_iterate(trace: Trace, problem: SoftmaxRegression, device: str) -> Trace:
    """The end of the same run judged by its last iterate instead of its average; the vectors are left behind."""
    on_device, query = problem.to(device), trace.query.to(device)
    accuracy = on_device.accuracy(query)
    assert accuracy is not None
    nothing = trace.query[..., :0].clone()
    return dataclasses.replace(
        trace,
        steps=trace.steps[-1:],
        loss=on_device.loss(query).squeeze(-1).unsqueeze(0).cpu(),
        accuracy=accuracy.squeeze(-1).unsqueeze(0).cpu(),
        output=nothing,
        query=nothing.clone(),
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
