"""Loss, accuracy and metrics of a rule's output as a run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.problem import Problem, measure
from lategrad.serve.observe.evaluation import Evaluator

_WORTH_A_THREAD = 2e-3  # seconds of an evaluation, above which updates go on beside it
_LOOK_EVERY = 0.2  # seconds: a signal is heeded in between


class Records:
    """One record of the start, then one every so many updates.

    A point that takes long to evaluate is evaluated by a thread, and its record comes later: always in the order of the
    updates, and taken in (:meth:`collect`) in the thread of whoever drives the server.

    >>> from lategrad.problems import Quadratic
    >>> records = Records(Quadratic(), every=10)
    >>> records.take(0, Quadratic().start())
    >>> records.steps, records.is_due(9), records.is_due(10)
    ([0], False, True)
    """

    def __init__(self, problem: Problem, every: int) -> None:
        self.every = every
        self.steps: list[int] = []
        self._series: dict[str, list[float]] = {}
        self._evaluator = Evaluator(lambda output: _values(problem, output))
        self.listener: Callable[[Tensor], None] | None = None
        """Called with the output after each record."""

    def is_due(self, version: int) -> bool:
        """Whether a record is to be taken after so many updates."""
        return version % self.every == 0

    def take(self, version: int, output: Tensor) -> None:
        """Evaluate here and now what the rule would output, unless that has been done."""
        self.drain()
        if not self._is_known(version):
            self.add(version, self._evaluator.now(output))
            self._tell(output)

    def note(self, version: int, output: Tensor) -> None:
        """Evaluate what the rule would output, or a copy of it soon; a short evaluation is not worth a thread."""
        self.collect()
        if self._is_known(version):
            return
        if self._evaluator.waiting or self._evaluator.quickest > _WORTH_A_THREAD:
            self._evaluator.begin(version, output.detach().clone())
        else:
            self.take(version, output)

    def _is_known(self, version: int) -> bool:
        waiting = self._evaluator.waiting
        return (waiting[-1].version if waiting else self.steps[-1] if self.steps else None) == version

    @property
    def are_behind(self) -> bool:
        """Whether updates should wait for evaluations, of which more are asked for than are made."""
        return self._evaluator.is_full

    def collect(self, timeout: float = 0.0) -> None:
        """Take in the evaluations that are done, the first of which is waited for so many seconds."""
        while (done := self._evaluator.take(timeout)) is not None:
            timeout = 0.0
            self.add(done.version, done.values.result())
            self._tell(done.output)

    def drain(self, patience: float = math.inf) -> list[int]:
        """Take in all evaluations that were begun; the versions of those that take longer than so many seconds."""
        end = time.monotonic() + patience
        while self._evaluator.waiting and time.monotonic() < end:
            self.collect(min(_LOOK_EVERY, max(0.0, end - time.monotonic())))
        return [evaluation.version for evaluation in self._evaluator.waiting]

    def add(self, version: int, values: Mapping[str, float]) -> None:
        """Enter what was measured."""
        self.steps.append(version)
        for name, value in values.items():
            series = self._series.setdefault(name, [])
            series += [math.nan] * (len(self.steps) - 1 - len(series))  # a metric that a resumed run has anew
            series.append(value)

    def _tell(self, output: Tensor) -> None:
        if self.listener is not None:
            self.listener(output)

    def series(self) -> dict[str, list[float]]:
        """All that is recorded, by name, as long as ``steps``."""
        return {name: values + [math.nan] * (len(self.steps) - len(values)) for name, values in self._series.items()}

    def last(self) -> dict[str, float]:
        """The newest record."""
        return {name: values[-1] for name, values in self.series().items()}

    def saved(self) -> dict[str, list[Any]]:
        """Plain JSON values, for a checkpoint."""
        return {"steps": list(self.steps), **self.series()}

    def waiting(self) -> dict[int, Tensor]:
        """The outputs that are still to be evaluated, by their versions; for a checkpoint."""
        return {evaluation.version: evaluation.output for evaluation in self._evaluator.waiting}

    def restore(self, saved: dict[str, list[Any]], waiting: Mapping[int, Tensor]) -> None:
        """Go on from what a checkpoint says."""
        self._evaluator.forget()
        self.steps = list(saved["steps"])
        self._series = {name: list(values) for name, values in saved.items() if name != "steps" and values}
        for version in sorted(waiting):
            self._evaluator.begin(version, waiting[version])

    def tensors(self) -> dict[str, Any]:
        """As a trace has them."""
        series = {name: torch.tensor(values, dtype=torch.float64) for name, values in self.series().items()}
        own = {name: series.pop(name, None) for name in ("loss", "accuracy", "test_loss")}
        return {"steps": torch.tensor(self.steps), **own, "metrics": series}


def _values(problem: Problem, output: Tensor) -> dict[str, float]:
    """All that is recorded of a point, as numbers."""
    measured = measure(problem, output)
    own = {"loss": measured.loss, "accuracy": measured.accuracy, "test_loss": measured.test_loss}
    return {name: value.item() for name, value in {**own, **measured.metrics}.items() if value is not None}
