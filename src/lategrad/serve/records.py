"""Loss and accuracy of a rule's output as a run goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lategrad.problems.problem import Problem


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
        self.loss: list[float] = []
        self.accuracy: list[float] = []

    def is_due(self, version: int) -> bool:
        """Whether a record is to be taken after so many updates."""
        return version % self.every == 0

    def take(self, version: int, output: Tensor) -> None:
        """Evaluate what the rule would output now, unless that has been done."""
        if self.steps and self.steps[-1] == version:
            return
        accuracy = self._problem.accuracy(output)
        self.steps.append(version)
        self.loss.append(self._problem.loss(output).item())
        if accuracy is not None:
            self.accuracy.append(accuracy.item())

    def saved(self) -> dict[str, list[Any]]:
        """Plain JSON values, for a checkpoint."""
        return {"steps": list(self.steps), "loss": list(self.loss), "accuracy": list(self.accuracy)}

    def restore(self, saved: dict[str, list[Any]]) -> None:
        """Go on from what a checkpoint says."""
        self.steps, self.loss, self.accuracy = (list(saved[name]) for name in ("steps", "loss", "accuracy"))

    def tensors(self) -> dict[str, Tensor | None]:
        """As a trace has them."""
        accuracy = torch.tensor(self.accuracy, dtype=torch.float64) if self.accuracy else None
        return {"steps": torch.tensor(self.steps), "loss": torch.tensor(self.loss, dtype=torch.float64),
                "accuracy": accuracy}  # fmt: skip
