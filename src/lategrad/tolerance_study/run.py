"""One run of the user's training function at one delay."""

import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lategrad.delays.stages import StageDelays, by_stage
from lategrad.support.validation import require

if TYPE_CHECKING:
    from lategrad.optim import Delayed

OWN = "own"  # the name of the training function's own optimizer

Train = Callable[["Wrap"], Any]
Build = Callable[[list[nn.Parameter]], Optimizer]
Optimizers = Mapping[str, Build]


@dataclass(frozen=True)
class Task:
    """One run to make."""

    optimizer: str
    delay: int
    seed: int


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    task: Task
    updates: tuple[int, ...]  # the number of updates before each value
    values: tuple[float, ...]  # the values over time, the last of which is the result; NaN for one that is not finite
    seconds: float
    memory: int  # peak memory of the process, or its GPU, in bytes
    drift: float | None = None  # mean distance between the parameters of a gradient and those at its update

    def as_json(self) -> dict[str, Any]:
        """Plain values; null for values that are not finite."""
        return {**asdict(self), "values": [finite_or_none(value) for value in self.values]}

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "Run":
        values = tuple(math.nan if value is None else value for value in saved["values"])
        return Run(Task(**saved["task"]), tuple(saved["updates"]), values, saved["seconds"], saved["memory"],
                   saved.get("drift"))  # fmt: skip


def finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_profile(profile: str | None) -> int | None:
    """The number of stages in ``"stages:8"``; None for the same delay everywhere.

    >>> parse_profile("stages:8"), parse_profile(None)
    (8, None)
    """
    if profile is None:
        return None
    kind, _, count = profile.partition(":")
    valid = kind == "stages" and count.isdecimal() and int(count) >= 2
    require("profile", profile, valid, "None, or 'stages:P' with P >= 2, such as 'stages:8'")
    return int(count)


class Wrap:
    """The argument of a training function, which delays its optimizer: ``optimizer = wrap(optimizer)``.

    ``wrap.delay`` and ``wrap.seed`` identify the run. Delays by stage need the model: ``wrap(optimizer, model)``.
    """

    def __init__(self, task: Task, build: Build | None = None, stages: int | None = None,
                 drift: bool = False) -> None:  # fmt: skip
        self.name, self.delay, self.seed = task.optimizer, task.delay, task.seed
        self.wrapped: Delayed | None = None
        self._build, self._stages, self._drift = build, stages, drift

    def __call__(self, optimizer: Optimizer, model: nn.Module | None = None) -> "Delayed":
        """The optimizer, or the one that replaces it in this run, with delayed gradients."""
        from lategrad.optim import Delayed  # here: it imports torch's compiler, which takes a second

        if self.wrapped is not None:
            raise ValueError("wrap was called twice: a training function wraps one optimizer")
        if self._build is not None and isinstance(optimizer, Optimizer):
            optimizer = self._build([p for group in optimizer.param_groups for p in group["params"]])
        require(f"optimizer {self.name!r}", optimizer, isinstance(optimizer, Optimizer), "a torch.optim.Optimizer")
        delays: int | StageDelays = self.delay
        if self._stages is not None:
            if model is None:
                raise ValueError(f"profile 'stages:{self._stages}' needs the model: wrap(optimizer, model)")
            delays = by_stage(model, self._stages, delay=self.delay)
        self.wrapped = Delayed(optimizer, delays, drift=self._drift)
        return self.wrapped


def run_training(train: Train, builders: Mapping[str, Build | None], stages: int | None, drift: bool,
                 task: Task) -> Run:  # fmt: skip
    """Run a training function once, with all global random generators at the task's seed."""
    random.seed(task.seed)
    np.random.seed(task.seed)
    torch.manual_seed(task.seed)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    wrap, begin = Wrap(task, builders[task.optimizer], stages, drift), time.perf_counter()
    updates, values = list[int](), list[float]()

    def all_values() -> Iterator[Any]:
        result = train(wrap)
        if isinstance(result, Generator):
            result = yield from result
        if result is not None or not values:
            yield result

    for value in all_values():
        if wrap.wrapped is None:
            raise ValueError("the training function gave a value before it called wrap(optimizer)")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"the training function must give numbers, got {value!r}") from None
        values.append(number if math.isfinite(number) else math.nan)
        updates.append(wrap.wrapped.updates)
    if wrap.wrapped is None or not wrap.wrapped.updates:
        raise ValueError("the optimizer that wrap returned has made no update: write optimizer = wrap(optimizer), and "
                         "train longer than the delay")  # fmt: skip
    return Run(task, tuple(updates), tuple(values), time.perf_counter() - begin, _peak_memory(),
               finite_or_none(wrap.wrapped and wrap.wrapped.drift))  # fmt: skip


def _peak_memory() -> int:
    """Of the GPU if there is one, else of the process; 0 if unknown."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return int(torch.cuda.max_memory_allocated())
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
