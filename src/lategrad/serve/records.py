"""Loss, accuracy and metrics of a rule's output as a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.problem import Problem, measure


class Records:
    """One record of the start, then one every so many updates.

    >>> from lategrad.problems import Quadratic
    >>> records = Records(Quadratic(), every=10)
    >>> records.take(0, Quadratic().start())
    >>> records.steps, records.is_due(9), records.is_due(10)
    ([0], False, True)
    """

    def __init__(self, problem: Problem, every: int) -> None:
        self._problem, self.every = problem, every
        self.steps: list[int] = []
        self._series: dict[str, list[float]] = {}
        self.listener: Callable[[Tensor], None] | None = None
        """Called with the output after each record."""

    def is_due(self, version: int) -> bool:
        """Whether a record is to be taken after so many updates."""
        return version % self.every == 0

    def take(self, version: int, output: Tensor) -> None:
        """Evaluate what the rule would output now, unless that has been done."""
        if self.steps and self.steps[-1] == version:
            return
        measured = measure(self._problem, output)
        own = {"loss": measured.loss, "accuracy": measured.accuracy, "test_loss": measured.test_loss}
        self.steps.append(version)
        for name, value in {**own, **measured.metrics}.items():
            if value is not None:
                values = self._series.setdefault(name, [])
                values += [math.nan] * (len(self.steps) - 1 - len(values))  # a metric that a resumed run has anew
                values.append(value.item())
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

    def restore(self, saved: dict[str, list[Any]]) -> None:
        """Go on from what a checkpoint says."""
        self.steps = list(saved["steps"])
        self._series = {name: list(values) for name, values in saved.items() if name != "steps" and values}

    def tensors(self) -> dict[str, Any]:
        """As a trace has them."""
        series = {name: torch.tensor(values, dtype=torch.float64) for name, values in self.series().items()}
        own = {name: series.pop(name, None) for name in ("loss", "accuracy", "test_loss")}
        return {"steps": torch.tensor(self.steps), **own, "metrics": series}
