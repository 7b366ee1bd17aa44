"""The records of a simulation: losses, metrics, and the trace."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lategrad.problems.problem import measure
from lategrad.trace import Axis, Trace

if TYPE_CHECKING:
    from lategrad.simulator.run import Simulation


class Recorder:
    """Collects the records of a simulation; the trace can be made at any time."""

    def __init__(
        self,
        simulation: Simulation,
        axes: list[Axis],
        single: tuple[bool, bool],
        config: dict[str, Any],
        save_to: str | Path | None,
    ) -> None:
        self.simulation, self.config, self.save_to = simulation, config, save_to
        self.single = single
        self.axes = tuple(axis for axis, dropped in zip(axes, [*single, *[False] * len(axes)], strict=False)
                          if not dropped)  # fmt: skip
        self.steps: list[int] = []
        self.losses: list[Tensor] = []
        self.accuracies: list[Tensor] = []
        self.test_losses: list[Tensor] = []
        self.metrics: dict[str, list[Tensor]] = {}
        self.begin = time.monotonic()

    def record(self, step: int) -> None:
        """Evaluate the rule's present output."""
        rule, state, problem = self.simulation.rule, self.simulation.state, self.simulation.problem
        output = rule.output(state)
        measured = measure(problem, output)
        self.losses.append(measured.loss.squeeze(-1).cpu())
        if measured.accuracy is not None:
            self.accuracies.append(measured.accuracy.squeeze(-1).cpu())
        if measured.test_loss is not None:
            self.test_losses.append(measured.test_loss.squeeze(-1).cpu())
        for name, value in measured.metrics.items():
            self.metrics.setdefault(name, []).append(value.squeeze(-1).cpu())
        self.output, self.query = output.cpu().clone(), rule.query(state).cpu().clone()
        self.steps.append(step)
        if self.save_to is not None:
            self.trace().save(self.save_to)

    def trace(self) -> Trace:
        """What has been recorded so far, without a record that Ctrl-C interrupted."""
        whole = slice(len(self.steps))
        updates, elapsed = self.steps[-1], time.monotonic() - self.begin
        runs = math.prod(self.simulation.shape[:-1])
        arrivals, workers = self.simulation.arrivals, self.simulation.workers
        refused = self._drop(self.simulation.refused.squeeze(-1).cpu(), before=0).tolist()
        speed = {"seconds": elapsed, "run_steps_per_second": updates * runs / elapsed}
        return Trace(
            steps=torch.tensor(self.steps),
            loss=self._drop(torch.stack(self.losses[whole]), before=1),
            accuracy=self._drop(torch.stack(self.accuracies[whole]), before=1) if self.accuracies else None,
            delays=self._drop(self.simulation.delays[:updates].int(), before=1),
            output=self._drop(self.output, before=0),
            query=self._drop(self.query, before=0),
            axes=self.axes,
            config={**self.config, **speed, "refused": refused},
            time=self._arrivals([[one.time for one in row] for row in arrivals], updates),
            worker=self._arrivals([[one.worker for one in row] for row in arrivals], updates),
            local_steps=None if workers is None else self._drop(workers.local_steps[:updates], before=1),
            test_loss=self._drop(torch.stack(self.test_losses[whole]), before=1) if self.test_losses else None,
            metrics={name: self._drop(torch.stack(values[whole]), before=1) for name, values in self.metrics.items()},
        )

    def _drop(self, value: Tensor, before: int) -> Tensor:
        """Without the dimensions of a single seed and a single delay."""
        for position in (1, 0):
            if self.single[position]:
                value = value.squeeze(before + position)
        return value

    def _arrivals(self, values: list[list[Tensor | None]], updates: int) -> Tensor | None:
        if any(value is None for row in values for value in row):
            return None
        stacked = torch.stack([torch.stack(row, dim=-1) for row in values], dim=1)  # type: ignore[arg-type]
        return self._drop(stacked[:updates], before=1)
