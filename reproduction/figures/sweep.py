"""The sweep behind the four figures: learning rates under delays, for each rule and regime, cached on disk.

What the paper leaves open (batch size, epochs, preprocessing, the constraint set) is chosen here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lategrad.problems import SoftmaxRegression
from lategrad.simulator import simulate
from lategrad.support.validation import require
from lategrad.trace import Axis, Trace
from reproduction.jobs import Job, Lane
from reproduction.report import Section
from reproduction.study import Candidate, Part, Plan, Request, Study, Task, Workspace, column, dataset, lr_grid

LOGNORMAL = "lognormal:7,0.4"
FORWARD = f"queue:{LOGNORMAL}"  # the same law in an update queue, where a delay is drawn as the query is handed out
Delay = int | str
DELAYS: tuple[Delay, ...] = (0, 10, 50, 100, 250, 500, 1000, LOGNORMAL, FORWARD)
TUNED_AT = (0, 250)  # delays at which learning rates are tuned; Figure 1 follows the winners to all other delays
OVER_TIME = 500  # the delay at which Figure 3 follows the winners over time
WHOLE_GRID = (*TUNED_AT, 500, LOGNORMAL, FORWARD)  # where figures show every learning rate; else only winners are run
RECORDS = 25  # records of the winners over time, for Figure 3
RUN_UPDATE = {"cpu": 40e-6, "cuda": 1e-6}
"""Seconds for one update of one run at batch 64, about, on one core or on a GPU; for forecasts."""
Traces = dict[str, Trace]  # by rule
SGDS = ("sgd", "sgd-linear")  # SGD's two outputs: its last iterate and its average, which come from the same run


@dataclass(frozen=True)
class Regime:
    """Softmax regression in a constraint set, with a penalty, and the rules that are compared there."""

    name: str
    title: str
    domain: str
    l2: float
    rules: tuple[str, ...] = ("sgd-linear", "anytime-sgd", "optimistic-anytime")
    delays: tuple[Delay, ...] = DELAYS
    grid_at: tuple[Delay, ...] = WHOLE_GRID
    data: str = "fashion-mnist"
    preprocessing: str = "standardise-globally"
    epochs: float = 40
    batch: int = 64
    optimum_tolerance: float = 1e-4

    def __post_init__(self) -> None:
        for name, delays in (("delays", self.delays), ("grid_at", self.grid_at)):
            valid = f"delays with {TUNED_AT}, where learning rates are tuned"
            require(name, delays, set(TUNED_AT) <= set(delays), valid)

    @property
    def updates(self) -> int:
        return round(self.epochs * len(dataset(self.data, self.preprocessing).x_train) / self.batch)

    @property
    def curves(self) -> tuple[str, ...]:
        """What figures show: SGD stands for its last iterate and its average."""
        return ("sgd", *self.rules) if "sgd-linear" in self.rules else self.rules

    def problem(self) -> SoftmaxRegression:
        return SoftmaxRegression(dataset(self.data, self.preprocessing), batch=self.batch, l2=self.l2)


def regimes(**options: Any) -> tuple[Regime, ...]:
    return (
        Regime("constrained", "constrained: Frobenius ball of radius 5", "ball:5", 0.0, **options),
        Regime("unconstrained", "unconstrained", "whole", 0.0, **options),
        Regime("strongly-convex", "strongly convex: l2 = 0.1, ball of radius 5", "ball:5", 0.1,
               ("sgd-linear", "anytime-sgd", "strongly-convex"), delays=(0, 100, 250, 500, 1000),
               grid_at=TUNED_AT, **options),  # Figures 2 and 4 show the other two regimes
    )  # fmt: skip


CANDIDATES = (
    Candidate("sgd-linear", lr_grid(-4, 0)),
    Candidate("anytime-sgd", lr_grid(-1, 3)),
    Candidate("optimistic-anytime", lr_grid(-1, 3)),
    Candidate("strongly-convex", lr_grid(-1, 3)),
)
PLANS = {
    "quick": Plan(regimes(optimum_tolerance=1e-3), CANDIDATES, seeds=1, lr_stride=2),
    "paper": Plan(regimes(), CANDIDATES, seeds=3),
    "full": Plan(regimes(epochs=25, batch=4), CANDIDATES, seeds=3),
}


@dataclass(frozen=True)
class Sweep(Study[Regime, Traces]):
    """Final accuracies of every rule of every regime: axes seed, delay, and the rule's learning rate.

    What no figure shows is not run and is NaN: learning rates that won nowhere, at delays where the grid is not shown.
    """

    name = "sweep"
    plans = PLANS

    def lane(self, task: Task[Regime]) -> Lane:
        return "processes" if task.space.device == "cpu" else "gpu"

    def seconds(self, task: Task[Regime]) -> float:
        regime = task.setting
        on_grid = sum(delay in regime.grid_at for delay in regime.delays)
        runs = task.seeds * (on_grid * len(task.candidate.lrs) + 2 * (len(regime.delays) - on_grid + 1))
        return 15 + runs * regime.updates * RUN_UPDATE[torch.device(task.space.device).type]

    def files(self, task: Task[Regime]) -> tuple[Path, ...]:
        return tuple(task.space.path(f"{task.setting.name}-{task.candidate.rule}-{part}") for part in ("grid", "won"))

    def measure(self, task: Task[Regime]) -> Traces:
        """By the rule that is judged: SGD is judged by its average and by its last iterate."""
        runs = Runs(task)
        if task.candidate.rule == "sgd-linear":
            runs.over_time("sgd")
        grid, winners = runs.grid(), runs.winners()
        return {rule: _join(task.setting, grid[rule], winners[rule]) for rule in grid}

    def show(self, plan: Plan[Regime], panels: Any) -> Section:
        raise NotImplementedError("the figures show the sweep")


@dataclass(frozen=True)
class SweepResults:
    """What figures are drawn from."""

    plan: Plan[Regime]
    space: Workspace
    regimes: dict[Regime, Traces]

    @property
    def convex(self) -> dict[Regime, Traces]:
        return {regime: traces for regime, traces in self.regimes.items() if regime.l2 == 0}

    @property
    def first(self) -> Regime:
        return self.plan.settings[0]

    def over_time(self, regime: Regime, rule: str) -> Trace:
        """A rule with the learning rate that is best without delay, at Figure 3's delay, over time; axis seed."""
        name = "sgd-linear" if rule == "sgd" else rule
        (task,) = [t for t in self.plan.tasks(self.space) if (t.setting, t.candidate.rule) == (regime, name)]
        return Runs(task).over_time(rule)

    def updates(self) -> str:
        return f"{self.first.updates:,} updates, {self.plan.seeds} seed(s)"

    def rows(self, regimes: Iterable[Regime]) -> list[dict[str, Any]]:
        return [
            {"rule": rule, "regime": regime.name, "delay": row["delay"], "lr": row[trace.axes[-1].name],
             "seed": row["seed"], "step": row["step"], "accuracy": row["accuracy"], "loss": row["loss"],
             "excess_loss": row["excess_loss"]}
            for regime in regimes for rule, trace in self.regimes[regime].items() for row in trace.rows()
            if not math.isnan(row["accuracy"])  # what was run
        ]  # fmt: skip

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self.plan) | {"updates": self.first.updates}


def sweep(plan: Plan[Regime], space: Workspace) -> SweepResults:
    panels = Sweep().panels(plan, space)
    found = {regime: {rule: trace for traces in panel.values() for rule, trace in traces.items()}
             for regime, panel in panels.items()}  # fmt: skip
    return SweepResults(plan, space, found)


_read_once = lru_cache(maxsize=1)(sweep)


class FigurePart(Part):
    """One of the figures."""

    def __init__(self, name: str, draw: Callable[[SweepResults], Section]) -> None:
        self.name, self.draw = name, draw

    def jobs(self, request: Request) -> list[Job]:
        return Sweep().jobs(Request(request.scale, request.space))

    def section(self, request: Request) -> Section:
        return self.draw(_read_once(PLANS[request.scale], request.space))


class Runs:
    """The simulations of one rule in one regime."""

    def __init__(self, task: Task[Regime]) -> None:
        self.regime, self.candidate, self.seeds, self.space = task.setting, task.candidate, task.seeds, task.space

    def grid(self) -> Traces:
        """Every learning rate, at the delays where a figure shows them all."""
        return self._by_rule("grid", self.candidate.lrs, [d for d in self.regime.delays if d in self.regime.grid_at])

    def winners(self) -> Traces:
        """The learning rates that won somewhere at the other delays, and at Figure 3's."""
        delays = [*(delay for delay in self.regime.delays if delay not in self.regime.grid_at), OVER_TIME]
        lrs = {lr for trace in self.grid().values() for lr in best_lrs(trace)}
        return self._by_rule("won", sorted(lrs), list(dict.fromkeys(delays)), records=RECORDS)

    def over_time(self, rule: str) -> Trace:
        """SGD's last iterate is not what the sweep recorded (that is its average) and gets a run of its own."""
        lr = best_lrs(self.grid()[rule])[0]
        trace = self._run("sgd", "sgd-over-time", [lr], [OVER_TIME], RECORDS) if rule == "sgd" else self.winners()[rule]
        return _select(trace, OVER_TIME, lr)

    def _by_rule(self, part: str, lrs: Sequence[float], delays: list[Delay], records: int = 1) -> Traces:
        """One simulation; SGD's is judged by its average and by its last iterate."""
        name = f"{self.candidate.rule}-{part}"
        trace = self._run(self.candidate.rule, name, lrs, delays, records)
        if self.candidate.rule != "sgd-linear":
            return {self.candidate.rule: trace}
        last = self.space.trace(f"{self.regime.name}-{name}-last", {"of": trace.config["made_from"]},
                                lambda: self._at_last_iterate(trace))  # fmt: skip
        return {"sgd-linear": trace, "sgd": last}

    def _run(self, rule: str, name: str, lrs: Sequence[float], delays: list[Delay], records: int) -> Trace:
        regime, updates = self.regime, self.regime.updates
        key = {"regime": dataclasses.asdict(regime), "updates": updates, "rule": rule, "lrs": list(lrs),
               "delays": delays, "seeds": self.seeds, "records": records}  # fmt: skip
        built = Candidate(rule, ()).build(column(lrs), regime.domain)
        return self.space.trace(f"{regime.name}-{name}", key, lambda: simulate(
            regime.problem(), built, delays, updates, seed=list(range(self.seeds)), device=self.space.device,
            record_every=-(-updates // records),
        ))  # fmt: skip

    def _at_last_iterate(self, trace: Trace) -> Trace:
        """The end of the same run judged by its last iterate instead of its average, without the vectors."""
        loss, accuracy = judge_query(trace, self.regime.problem(), self.space.device)
        nothing = trace.query[..., :0].clone()
        return dataclasses.replace(trace, steps=trace.steps[-1:], loss=loss.unsqueeze(0),
                                   accuracy=accuracy.unsqueeze(0), output=nothing, query=nothing.clone())  # fmt: skip


def judge_query(trace: Trace, problem: SoftmaxRegression, device: str) -> tuple[Tensor, Tensor]:
    on_device, query = problem.to(device), trace.query.to(device)
    accuracy = on_device.accuracy(query)
    assert accuracy is not None
    return on_device.loss(query).squeeze(-1).cpu(), accuracy.squeeze(-1).cpu()


def best_lrs(trace: Trace) -> list[float]:
    """The learning rates that win at the delays where they are tuned."""
    return [trace.axes[-1].values[best_position(trace, delay)] for delay in TUNED_AT]


def _join(regime: Regime, grid: Trace, winners: Trace) -> Trace:
    """Both parts on the axes of the whole sweep, without the vectors."""
    axes = (grid.axes[0], Axis("delay", regime.delays), grid.axes[2])
    values: dict[str, Any] = {}
    for name in ("loss", "accuracy"):
        whole = torch.full([len(axis.values) for axis in axes], torch.nan, dtype=torch.float64)
        for part in (winners, grid):  # where both have a run it is the same one
            delays = part.axis("delay").values
            own = [i for i, delay in enumerate(delays) if delay in regime.delays]  # Figure 3's may not be among them
            rows = torch.tensor([regime.delays.index(delays[i]) for i in own], dtype=torch.int64)
            columns = torch.tensor([axes[2].values.index(lr) for lr in part.axes[2].values])
            whole[:, rows.unsqueeze(-1), columns] = getattr(part, name)[-1][:, own]
        values[name] = whole.unsqueeze(0)
    return dataclasses.replace(grid, steps=grid.steps[-1:], axes=axes, **values)


def _select(trace: Trace, delay: Delay, lr: float) -> Trace:
    """The runs with one delay and one learning rate, without the vectors."""
    place = (..., trace.axis("delay").values.index(delay), trace.axes[2].values.index(lr))
    assert trace.accuracy is not None
    return dataclasses.replace(trace, axes=trace.axes[:1], loss=trace.loss[place], accuracy=trace.accuracy[place],
                               delays=trace.delays[..., place[1]], output=trace.output[..., :0],
                               query=trace.query[..., :0])  # fmt: skip


def final_accuracy(trace: Trace) -> Tensor:
    """Test accuracy at the end, ``(seeds, delays, lrs)``; 0 for runs that diverged."""
    assert trace.accuracy is not None
    return torch.where(torch.isfinite(trace.loss[-1]), trace.accuracy[-1], 0.0)


def best_position(trace: Trace, delay: Delay) -> int:
    return int(final_accuracy(trace)[:, trace.axis("delay").values.index(delay)].mean(0).argmax())
