"""The skeleton of every study: settings x rules x delays x seeds, cached traces, one job for each rule in each setting.

A study runs a :class:`Plan` (one for each scale): in every :class:`Setting` every :class:`Candidate` is measured, and
the panels of results become a section of the report. Learning rates are chosen by the training loss; accuracies and
held-out losses are only reported.
"""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lategrad.problems import load
from lategrad.registry import build_rule, parse_set
from lategrad.rules import AnyRule
from lategrad.support.validation import Scalar, require_choice
from lategrad.trace import Trace
from reproduction.jobs import Job, Lane, Say, to_stderr
from reproduction.report import Section
from reproduction.style import TITLES

R = TypeVar("R")
S = TypeVar("S", bound="Setting")

dataset = lru_cache(maxsize=2)(load)  # the settings of a study share it


@dataclass(frozen=True)
class Workspace:
    """Where a reproduction runs, and the folder in which it keeps what is finished."""

    out: Path
    device: str = "cpu"
    say: Say = to_stderr

    def path(self, name: str) -> Path:
        return self.out / "traces" / f"{name}.safetensors"

    def trace(self, name: str, key: dict[str, Any], simulate: Callable[[], Trace]) -> Trace:
        """The trace of that name if it was made from the same choices and is complete; else simulate and save it."""
        return self.find(name, key) or self.keep(name, key, simulate())

    def find(self, name: str, key: dict[str, Any]) -> Trace | None:
        """The same trace; None if there is none, or if its file is damaged."""
        try:
            found = Trace.load(self.path(name))
        except (FileNotFoundError, ValueError):
            return None
        return found if found.config.get("made_from") == _fingerprint(key) and found.complete else None

    def keep(self, name: str, key: dict[str, Any], trace: Trace) -> Trace:
        """Save a trace with the choices that it was made from; an interrupted one interrupts the reproduction."""
        if not trace.complete:
            raise KeyboardInterrupt
        trace = dataclasses.replace(trace, config={**trace.config, "made_from": _fingerprint(key)})
        trace.save(self.path(name))
        return trace


def without_vectors(trace: Trace) -> Trace:
    """Losses and accuracies alone, which is what studies keep: vectors and delays of long runs take gigabytes."""
    return dataclasses.replace(trace, delays=trace.delays[-1:], output=trace.output[..., :0].clone(),
                               query=trace.query[..., :0].clone(), time=None, worker=None)  # fmt: skip


def _fingerprint(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def lr_grid(low: float, high: float) -> tuple[float, ...]:
    """Learning rates from 10^low to 10^high, both multiples of 1/2: each is the root of ten times the one before.

    >>> lr_grid(-1, 0.5)
    (0.1, 0.316228, 1.0, 3.162278)
    """
    return tuple(round(10 ** (k / 2), 6) for k in range(round(2 * low), round(2 * high) + 1))


def column(lrs: Sequence[float]) -> Tensor:
    """Learning rates as a hyper-parameter with one run for each, ``(lrs, 1)``."""
    return torch.tensor(lrs, dtype=torch.float64).unsqueeze(-1)


def finite_loss(loss: Tensor) -> Tensor:
    """Losses to choose by: infinite where a run diverged."""
    return torch.nan_to_num(loss, nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class Candidate:
    """A rule and the learning rates that it may choose from."""

    rule: str
    lrs: tuple[float, ...]
    ours: bool = False
    synchronous: str = ""  # the rule behind an anchor, which gets the same gradients without delay, in fewer rounds
    elementwise: bool = True  # whether it looks at single entries alone, not at matrices
    projected: bool = False  # whether its theory covers the projection onto a ball
    knob: str = ""  # a second hyper-parameter that neither its paper nor its theory settles
    values: tuple[float, ...] = ()  # of the knob
    undelayed: str = ""  # the rule that it equals without delay, and whose runs stand for its own there

    @property
    def is_baseline(self) -> bool:
        return not (self.ours or self.synchronous)

    def build(self, lr: Scalar, domain: str = "whole", **changes: Any) -> AnyRule[Any]:
        """The rule with these learning rates and, in a dimension before them, every value of its knob."""
        rule = build_rule(self.synchronous or self.rule, lr, parse_set(domain))
        if self.knob:
            changes[self.knob] = torch.tensor(self.values, dtype=torch.float64).view(-1, 1, 1)
        return dataclasses.replace(rule, **changes) if changes else rule  # type: ignore[type-var]

    def lr_in_table(self, position: int) -> str:
        """A learning rate; the first and the last of the grid are marked, as the best may lie beyond."""
        return f"{self.lrs[position]:.2g}" + (" (end)" if position in (0, len(self.lrs) - 1) else "")


class Setting(Protocol):
    """What rules are measured on; a frozen dataclass."""

    @property
    def name(self) -> str:
        """For files and labels."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Those that are measured on it."""


@dataclass(frozen=True)
class Plan(Generic[S]):
    """What a study runs at one scale."""

    settings: tuple[S, ...]
    candidates: tuple[Candidate, ...]
    seeds: int
    lr_stride: int = 1  # take every n-th learning rate of the grids: 1 for a factor of √10 between two, 2 for 10
    judged: bool = True  # whether the runs are long enough to be held against the targets

    def limited(self, models: Sequence[str], rules: Sequence[str]) -> "Plan[S]":
        """The same with these models and rules alone; an empty sequence means all."""
        named = {setting: getattr(setting, "model", "") for setting in self.settings}
        for model in models:
            require_choice("--models", model, tuple(dict.fromkeys(named.values())))
        for rule in rules:
            own = [rule for setting in self.settings for rule in setting.rules]  # some have candidates of their own
            require_choice("--rules", rule, tuple(dict.fromkeys([c.rule for c in self.candidates] + own)))
        chosen: list[Any] = [s for s, model in named.items()
                             if (model in models if models else not getattr(s, "only_by_name", False))]  # fmt: skip
        if rules:
            chosen = [dataclasses.replace(s, rules=tuple(rule for rule in s.rules if rule in rules)) for s in chosen]
        return dataclasses.replace(self, settings=tuple(chosen))

    def tasks(self, space: Workspace) -> "list[Task[S]]":
        """Every rule in every setting, with the learning rates of this scale; a setting may have its own candidates and
        number of seeds."""
        return [
            Task(setting, dataclasses.replace(candidate, lrs=candidate.lrs[:: self.lr_stride]),
                 getattr(setting, "seed_count", self.seeds), space)
            for setting in self.settings for candidate in getattr(setting, "candidates", self.candidates)
            if candidate.rule in setting.rules
        ]  # fmt: skip


@dataclass(frozen=True)
class Task(Generic[S]):
    """One rule in one setting."""

    setting: S
    candidate: Candidate
    seeds: int
    space: Workspace


def rows_of(trace: Trace, columns: Sequence[str], **place: Any) -> list[dict[str, Any]]:
    return [place | {name: row[name] for name in columns} for row in trace.rows()]


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    scale: str
    space: Workspace
    models: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    settings: tuple[Any, ...] = ()  # of one's own, instead of those of the scale


class Part(ABC):
    """A part of the reproduction by its name on the command line."""

    name: str
    hours_on_cpu = False  # beyond the quick scale: then it is not run without a GPU, unless it is asked for by name
    only_by_name = False  # whether ``all`` leaves it out
    has_models = False  # whether ``--models`` and ``--rules`` limit it

    @abstractmethod
    def jobs(self, request: Request) -> list[Job]:
        """The work; jobs with the same label, also of other parts, are done once."""

    @abstractmethod
    def section(self, request: Request) -> Section:
        """Read what the jobs saved."""


class Study(Part, Generic[S, R]):
    """A part that measures every rule in every setting of a plan."""

    plans: Mapping[str, Plan[S]]  # by scale

    @abstractmethod
    def seconds(self, task: Task[S]) -> float:
        """About how long a task takes; for forecasts."""

    @abstractmethod
    def measure(self, task: Task[S]) -> R:
        """All numbers of one rule in one setting; what is finished is read from the workspace."""

    def prepare(self, task: Task[S]) -> Any:
        """What a job does; the section does the rest."""
        return self.measure(task)

    @abstractmethod
    def show(self, plan: Plan[S], panels: dict[S, dict[str, R]]) -> Section:
        """The section of the report, from results by setting and rule."""

    def plan(self, request: Request) -> Plan[S]:
        return self.plans[request.scale].limited(request.models, request.rules)

    def lane(self, task: Task[S]) -> Lane:
        return "processes" if task.space.device == "cpu" else "streams"

    def files(self, task: Task[S]) -> tuple[Path, ...]:
        return ()

    def jobs(self, request: Request) -> list[Job]:
        return self.jobs_of(self.plan(request), request.space)

    def jobs_of(self, plan: Plan[S], space: Workspace) -> list[Job]:
        return [
            Job(f"{self.name}: {task.setting.name}, {TITLES[task.candidate.rule]}", self.seconds(task),
                partial(self.prepare, task), self.files(task), self.lane(task))
            for task in plan.tasks(space)
        ]  # fmt: skip

    def section(self, request: Request) -> Section:
        return self.section_of(self.plan(request), request.space)

    def section_of(self, plan: Plan[S], space: Workspace) -> Section:
        """Measure whatever is not finished, and show all of it."""
        return self.show(plan, self.panels(plan, space))

    def panels(self, plan: Plan[S], space: Workspace) -> dict[S, dict[str, R]]:
        panels: dict[S, dict[str, R]] = {}
        for task in plan.tasks(space):
            panels.setdefault(task.setting, {})[task.candidate.rule] = self.measure(task)
        return panels
