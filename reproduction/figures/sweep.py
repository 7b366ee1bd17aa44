"""The sweep behind the four figures: learning rates under delays, for each rule, regime and horizon, cached on disk.

What the paper leaves open (batch size, number of updates, preprocessing, the constraint set) is chosen here and
nowhere else. Its theorem asks for delays up to about the root of the number of updates T: a regime says which delays
that covers, and figures judge claims there alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lategrad.delays import as_delay_model
from lategrad.problems import SoftmaxRegression
from lategrad.problems.problem import Measures
from lategrad.rules import SGD, AnyRule
from lategrad.rules.sgd import SGDState
from lategrad.simulator import simulate
from lategrad.support.validation import require
from lategrad.trace import Axis, Trace
from reproduction import study, style
from reproduction.jobs import Job, Lane, cores
from reproduction.report import Section, Verdict, verdict
from reproduction.study import Candidate, Plan, Request, Study, Task, Workspace, column, dataset, lr_grid
from reproduction.style import TITLES

LOGNORMAL = "lognormal:7,0.4"
HEAVY = f"queue:{LOGNORMAL}"  # in an update queue, as in the paper: a delay is drawn as the query is handed out
Delay = int | str
LATE = 500  # the delay of the paper's Figures 2 and 3
_MANY_CORES = 8
Traces = dict[str, Trace]  # by rule; axes seed, delay and lr
SGDS = ("sgd", "sgd-linear")  # SGD's two outputs: its last iterate and its average, which come from the same run


@lru_cache
def mean_delay(delay: Delay) -> float:
    """Once it does not depend on the start any more.

    >>> mean_delay(500), round(mean_delay("lognormal:7,0.4"), -1)
    (500.0, 1190.0)
    """
    return as_delay_model(delay).draw(60_000, 0).delays[20_000:].double().mean().item()


@dataclass(frozen=True)
class Regime:
    """Softmax regression in a constraint set for a number of updates, and the rules that are compared there."""

    place: str  # such as "constrained"
    title: str
    domain: str
    updates: int
    batch: int
    candidates: tuple[Candidate, ...]
    l2: float = 0.0
    delays: tuple[Delay, ...] = (0, 100, LATE, 1000)
    grid_at: tuple[Delay, ...] = (0, LATE)  # where figures show every learning rate; else only winners are run
    tuned_at: tuple[Delay, ...] = (0, LATE)  # where a learning rate can win, which is then followed to all delays
    records: int = 1  # of losses and accuracies along a run
    data: str = "fashion-mnist"
    preprocessing: str = "standardise-globally"
    optimum_tolerance: float = 1e-3

    def __post_init__(self) -> None:
        require("grid_at", self.grid_at, set(self.grid_at) <= set(self.delays), f"among the delays {self.delays}")
        require("tuned_at", self.tuned_at, set(self.tuned_at) <= set(self.grid_at), f"among grid_at, {self.grid_at}")

    @property
    def name(self) -> str:
        own = "" if self.data == "fashion-mnist" else f"-{Path(self.data).stem}"
        return f"{self.place}-{self.updates}{own}"

    @property
    def label(self) -> str:
        return f"{self.place}, {self.updates:,} updates"

    @property
    def root(self) -> int:
        """The root of the number of updates: delays up to about here are what the paper's theorem is about."""
        return math.isqrt(self.updates)

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(candidate.rule for candidate in self.candidates)

    @property
    def curves(self) -> tuple[str, ...]:
        """What figures show: SGD stands for its last iterate and its average."""
        return ("sgd", *self.rules) if "sgd-linear" in self.rules else self.rules

    def covers(self, *delays: Delay) -> bool:
        """Whether the theorem is about runs of this length with these mean delays."""
        return all(mean_delay(delay) ** 2 <= self.updates for delay in delays)

    def problem(self) -> SoftmaxRegression:
        return _JudgedTwice(dataset(self.data, self.preprocessing), batch=self.batch, l2=self.l2)


def claim(block: str, holds: bool, regime: Regime, at: Iterable[Delay], **values: Any) -> Verdict:
    """A verdict on the paper where its theorem is about these delays; elsewhere what was measured, not counted."""
    counted = regime.covers(*at)
    note = "" if counted else f" (not counted: these delays are above √T = {regime.root:,})"
    found = verdict(block, holds if counted else None, place=regime.label, **values)
    return dataclasses.replace(found, measured=found.measured + note)


SHORT = (
    Candidate("sgd-linear", lr_grid(-4, 0)),
    Candidate("anytime-sgd", lr_grid(-1, 3)),
    Candidate("steady", lr_grid(-1, 1), ours=True),
)
OPTIMISTIC = Candidate("optimistic-anytime", lr_grid(-1, 3))
LONG = (Candidate("sgd-linear", lr_grid(-5, -1)), Candidate("anytime-sgd", lr_grid(-2, 2)), SHORT[2])
"""Grids lie where the good learning rates of a horizon and a batch size lie; those of SGD and anytime SGD are equally
wide."""


def both_places(updates: int, batch: int, candidates: tuple[Candidate, ...], **options: Any) -> tuple[Regime, ...]:
    """On a ball, and without a constraint."""
    return (
        Regime("constrained", "ball of radius 5", "ball:5", updates, batch, candidates, **options),
        Regime("unconstrained", "no constraint set", "whole", updates, batch, candidates, **options),
    )


def own_experiment(data: str, delays: Sequence[int | str], updates: int) -> tuple[Regime, ...]:
    """Figure 1 on one's own data and constant delays; what is not given is as in the short runs."""
    valid = all(str(delay).isdecimal() for delay in delays) and any(int(delay) > 0 for delay in delays or (1,))
    require("--delays", list(delays), valid, "whole numbers, at least one above 0, such as 10 100")
    require("--updates", updates, updates >= 0, ">= 1, or left out")
    own: dict[str, Any] = {"delays": tuple(sorted({0, *map(int, delays or (10, 100, 1000))}))}
    if data:
        own |= {"data": data, "preprocessing": "standardise"}
        require("--data", data, dataset(data, "standardise").classes is not None,
                "a file whose targets are classes: integers, or words in .csv")  # fmt: skip
    return both_places(updates or 37_500, 64, SHORT, grid_at=(0,), tuned_at=(0,), **own)


STRONGLY_CONVEX = Regime(
    "strongly-convex", "l2 = 0.1, ball of radius 5", "ball:5", 37_500, 64,
    (*SHORT[:2], Candidate("strongly-convex", lr_grid(-1, 3))), l2=0.1, grid_at=(0,), tuned_at=(0,),
)  # fmt: skip
_LONG = partial(both_places, 1_000_000, 4, records=16)  # √T is not below the delays,
_HEAVY = partial(both_places, 1_500_000, 4, delays=(HEAVY,), grid_at=(HEAVY,), tuned_at=())  # nor the mean of these
_PAPER = (*both_places(37_500, 64, (*SHORT, OPTIMISTIC)), *_LONG(LONG, optimum_tolerance=1e-4), *_HEAVY(LONG[:2]),
          STRONGLY_CONVEX)  # fmt: skip
_NARROW = tuple(dataclasses.replace(candidate, lrs=candidate.lrs[:7]) for candidate in LONG)
_QUICK = (*both_places(37_500, 64, SHORT), *_LONG(_NARROW, tuned_at=(0,)), _HEAVY(_NARROW[:2])[0])
PLANS = {
    "quick": Plan(_QUICK, (), seeds=1, lr_stride=2),
    "paper": Plan(_PAPER, (), seeds=3),
    "full": Plan(_PAPER, (), seeds=10),
}
"""The quick scale leaves out what shows least."""


class Sweep(Study[Regime, Traces]):
    """Losses and accuracies of every rule of every regime along the run: axes seed, delay, and learning rate.

    What no figure shows is not run and is NaN: learning rates that won nowhere, at delays where the grid is not shown.
    A core runs the seeds one by one; a GPU, for which many runs cost as much as one, all at once.
    """

    plans = PLANS

    def lane(self, task: Task[Regime]) -> Lane:
        """Where there are many cores beside a GPU, they take the runs over time: both then work about as long."""
        many_cores = cores() >= _MANY_CORES and task.setting.records > 1
        return "processes" if task.space.device == "cpu" or many_cores else "gpu"

    def seconds(self, task: Task[Regime]) -> float:
        """Of one run on a core; of a simulation on a GPU."""
        regime = task.setting
        if self.lane(task) == "gpu":
            return 15 + 200e-6 * regime.updates
        shared = 2 if cores() >= _MANY_CORES else 1  # many processes share the bandwidth of the memory
        return shared * regime.updates * (6e-6 + 0.5e-6 * regime.batch) + 0.04 * regime.records

    def jobs_of(self, plan: Plan[Regime], space: Workspace) -> list[Job]:
        jobs = []
        for task in plan.tasks(space):
            regime, lane, groups = task.setting, self.lane(task), self.seeds(task)
            runs = {"grid": len(task.candidate.lrs) * len(regime.grid_at), "won": 2 * len(others(regime))}
            for phase, seeds in ((phase, seeds) for phase, count in runs.items() if count for seeds in groups):
                label = f"{regime.name}, {TITLES[task.candidate.rule]}, {{}}, seed {{}}"
                after = tuple(label.format("grid", other[0]) for other in groups) if phase == "won" else ()
                seconds = self.seconds(task) * (1 if lane == "gpu" else runs[phase]) + 4
                jobs.append(Job(label.format(phase, seeds[0]), seconds, partial(self.piece, task, phase, seeds),
                                (_path(task, phase, seeds),), lane, after))  # fmt: skip
        return jobs

    def seeds(self, task: Task[Regime]) -> list[list[int]]:
        """Those that one piece of work runs."""
        every = list(range(task.seeds))
        return [every] if self.lane(task) == "gpu" else [[seed] for seed in every]

    def piece(self, task: Task[Regime], phase: str, seeds: Sequence[int]) -> Trace:
        """One simulation: the learning rates and delays whose grid is shown, or those that won at the other delays."""
        regime, rule, lrs, delays = task.setting, task.candidate.rule, task.candidate.lrs, list(task.setting.grid_at)
        if phase == "won":
            grid, delays = self.joined(task, ("grid",)), others(regime)
            lrs = tuple(sorted({lrs[best_position(trace, at)] for trace in grid.values() for at in regime.tuned_at}))
        built: AnyRule[Any] = task.candidate.build(column(lrs), regime.domain)
        if isinstance(built, SGD):
            built = _BothOutputs(built.lr, built.domain, built.average)
        own = {name: value for name, value in vars(regime).items()
               if name in ("domain", "updates", "batch", "l2", "records", "data", "preprocessing")}  # fmt: skip
        key = own | {"rule": rule, "lrs": list(lrs), "delays": delays, "seeds": list(seeds)}
        device = "cpu" if self.lane(task) == "processes" else task.space.device
        trace = task.space.trace(_path(task, phase, seeds).stem, key, lambda: study.without_vectors(simulate(
            regime.problem(), built, delays, regime.updates, seed=list(seeds), device=device,
            record_every=-(-regime.updates // regime.records),
        )))  # fmt: skip
        return dataclasses.replace(trace, axes=(*trace.axes[:2], Axis("lr", tuple(lrs))))

    def joined(self, task: Task[Regime], phases: Sequence[str]) -> Traces:
        """All pieces on the axes of the whole sweep, by the rule that is judged: SGD's runs have two outputs."""
        regime, lrs = task.setting, task.candidate.lrs
        parts = [self.piece(task, phase, seeds) for phase in phases for seeds in self.seeds(task)]
        axes = (Axis("seed", tuple(range(task.seeds))), Axis("delay", regime.delays), Axis("lr", lrs))
        shape = len(parts[0].steps), *(len(axis.values) for axis in axes)
        found = {}
        for rule, of_rule in {task.candidate.rule: "", **({"sgd": "last_"} if parts[0].metrics else {})}.items():
            values: dict[str, Any] = {name: torch.full(shape, torch.nan).double() for name in ("loss", "accuracy")}
            for part in parts:
                at = np.ix_(range(shape[0]), *([axis.values.index(value) for value in own.values]
                                               for axis, own in zip(axes, part.axes, strict=True)))  # fmt: skip
                for name, whole in values.items():
                    whole[at] = part.metrics[of_rule + name] if of_rule else getattr(part, name)
            found[rule] = dataclasses.replace(parts[0], axes=axes, metrics={}, **values)
        return found

    def measure(self, task: Task[Regime]) -> Traces:
        return self.joined(task, ("grid", "won") if others(task.setting) else ("grid",))

    def show(self, plan: Plan[Regime], panels: Any) -> Section:
        raise NotImplementedError("the figures show the sweep")


@dataclass(frozen=True)
class SweepResults:
    """What figures are drawn from."""

    plan: Plan[Regime]
    regimes: dict[Regime, Traces]

    def those(self, needed: Callable[[Regime], bool], what: str) -> dict[Regime, Traces]:
        """The regimes that a figure can show; at least one."""
        found = {regime: traces for regime, traces in self.regimes.items() if needed(regime)}
        require("regimes", [regime.name for regime in self.regimes], len(found) > 0, f"with one {what}")
        return found

    def describe(self, regimes: Iterable[Regime]) -> dict[str, Any]:
        return {"regimes": [dataclasses.asdict(regime) for regime in regimes], "seeds": self.plan.seeds}

    def updates(self, regimes: Iterable[Regime]) -> str:
        """In words."""
        runs = dict.fromkeys(f"{r.updates:,} updates of {r.batch} samples (√T = {r.root:,})" for r in regimes)
        return f"{' and '.join(runs)}; {self.plan.seeds} seed(s)"

    def rows(self, regimes: Iterable[Regime], delay: Delay | None = None) -> list[dict[str, Any]]:
        """The end of every run, at one delay or at all."""
        return [
            {"rule": rule, "regime": regime.place, "updates": regime.updates, "batch": regime.batch,
             "delay": row["delay"], "lr": row["lr"], "seed": row["seed"], "accuracy": row["accuracy"],
             "loss": row["loss"]}
            for regime in regimes for rule, trace in self.regimes[regime].items() for row in trace.rows()
            if row["step"] == regime.updates and (delay is None or row["delay"] == delay)
            and not math.isnan(row["accuracy"])  # what was run
        ]  # fmt: skip


def sweep(plan: Plan[Regime], space: Workspace) -> SweepResults:
    panels = Sweep().panels(plan, space)
    found = {regime: {rule: trace for traces in panel.values() for rule, trace in traces.items()}
             for regime, panel in panels.items()}  # fmt: skip
    return SweepResults(plan, found)


_read_once = lru_cache(maxsize=4)(sweep)


class FigurePart(Sweep):
    """One of the figures that show the sweep, and which regimes it needs."""

    def __init__(self, name: str, needed: Callable[[Regime], bool], draw: Callable[[SweepResults], Section]) -> None:
        self.name, self.needed, self.draw = name, needed, draw

    def plan(self, request: Request) -> Plan[Regime]:
        plan = self.plans[request.scale]
        return dataclasses.replace(plan, settings=tuple(filter(self.needed, request.settings or plan.settings)))

    def section(self, request: Request) -> Section:
        return self.draw(_read_once(self.plan(request), request.space))


def others(regime: Regime) -> list[Delay]:
    return [delay for delay in regime.delays if delay not in regime.grid_at]


class _BothOutputs(SGD):
    """SGD that outputs its average and its last iterate, one after the other."""

    def output(self, state: SGDState) -> Tensor:
        return torch.cat([state.mean, state.x], dim=-1)


class _JudgedTwice(SoftmaxRegression):
    """Records the loss and the accuracy of both outputs of :class:`_BothOutputs`."""

    residual_in_c = SoftmaxRegression.residual_in_c  # the gradient is the same

    def measure(self, x: Tensor) -> Measures:
        average, *last = x.split(self.dim, dim=-1)
        metrics: dict[str, Any] = {}
        for x_last in last:
            metrics = {"last_loss": self.loss(x_last), "last_accuracy": self.accuracy(x_last)}
        return Measures(self.loss(average), self.accuracy(average), metrics=metrics)


def _path(task: Task[Regime], phase: str, seeds: Sequence[int]) -> Path:
    return task.space.path(f"{task.setting.name}-{task.candidate.rule}-{phase}-{seeds[0]}")


def final_accuracy(trace: Trace, record: int = -1) -> Tensor:
    """Test accuracy at the end (or at another record), ``(seeds, delays, lrs)``; 0 for runs that diverged."""
    return torch.where(torch.isfinite(trace.loss[record]), trace.recorded()["accuracy"][record], 0.0)


def best_position(trace: Trace, delay: Delay, record: int = -1) -> int:
    """The learning rate with the smallest training loss, the mean over seeds, at a delay where all were run."""
    at_delay = trace.loss[record][:, trace.axis("delay").values.index(delay)]
    return int(study.finite_loss(at_delay).mean(0).argmin())


def plot(regimes: dict[Regime, Traces], draw: Callable[[Any, Regime, Traces], None], ylabel: str, **look: Any) -> Any:
    """A panel for each regime: a row for each place, a column for each horizon."""
    places = list(dict.fromkeys(regime.place for regime in regimes))
    horizons = list(dict.fromkeys((regime.updates, regime.batch) for regime in regimes))
    by_place = {(r.place, (r.updates, r.batch)): r for r in regimes}
    grid = [by_place.get((place, horizon)) for place in places for horizon in horizons]
    titles = [f"{regime.title}\n{regime.updates:,} updates, √T = {regime.root:,}" if regime else "" for regime in grid]
    figure, axes = style.panels(titles, ylabel, columns=len(horizons), **look)
    for ax, regime in zip(axes, grid, strict=True):
        if regime is not None:
            draw(ax, regime, regimes[regime])
    style.legend(figure, axes)
    return figure
