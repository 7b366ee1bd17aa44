"""The records of a simulation: losses, metrics, and the trace with its axes."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lategrad.problems.problem import measure
from lategrad.rules.rule import AnyRule
from lategrad.support.runs import leaf_names, tensors
from lategrad.support.validation import require
from lategrad.trace import Axis, Trace

if TYPE_CHECKING:
    from lategrad.simulator.run import Simulation


class Recorder:
    """Collects the records of a simulation; the trace can be made at any time."""

    def __init__(
        self, simulation: "Simulation", axes: list[Axis], single: tuple[bool, bool], config: dict[str, Any],
        save_to: str | Path | None,
    ) -> None:  # fmt: skip
        self.simulation, self.single, self.config, self.save_to = simulation, single, config, save_to
        self.axes = tuple(axis for i, axis in enumerate(axes) if i > 1 or not single[i])
        self.steps: list[int] = []
        self.values: dict[str, list[Tensor]] = {}
        self.begin = time.monotonic()
        self._drift = torch.zeros(())  # the sum of distances at the last record

    def record(self, step: int) -> None:
        rule, state, problem = self.simulation.rule, self.simulation.state, self.simulation.problem
        output = rule.output(state)
        for name, value in measure(problem, output).by_name().items():
            require("the name of a metric", name, all(name != axis.name for axis in self.axes), "that of no axis")
            self.values.setdefault(name, []).append(value.squeeze(-1).cpu())
        if self.simulation.drift is not None:
            before, self._drift = self._drift, self.simulation.drift.squeeze(-1).cpu().clone()
            updates = step - self.steps[-1] if self.steps else 1
            self.values.setdefault("drift", []).append((self._drift - before) / updates)
        self.output, self.query = output.cpu().clone(), rule.query(state).cpu().clone()
        self.steps.append(step)
        if self.save_to is not None:
            self.trace().save(self.save_to)

    def trace(self) -> Trace:
        """What has been recorded so far, without a record that Ctrl-C interrupted."""
        updates, elapsed = self.steps[-1], time.monotonic() - self.begin
        runs, workers = math.prod(self.simulation.shape[:-1]), self.simulation.workers
        refused = self._drop(self.simulation.refused.squeeze(-1).cpu(), before=0).tolist()
        config = {**self.config, "seconds": elapsed, "run_steps_per_second": updates * runs / elapsed,
                  "backend": self.simulation.backend, "refused": refused}  # fmt: skip
        columns = {name: self._drop(torch.stack(values[: len(self.steps)]), before=1)
                   for name, values in self.values.items()}  # fmt: skip
        return Trace(steps=torch.tensor(self.steps), loss=columns.pop("loss"), accuracy=columns.pop("accuracy", None),
                     delays=self._drop(self.simulation.delays[:updates].int(), before=1),
                     output=self._drop(self.output, before=0), query=self._drop(self.query, before=0), axes=self.axes,
                     time=self._of_arrivals("time", updates), worker=self._of_arrivals("worker", updates),
                     local_steps=None if workers is None else self._drop(workers.local_steps[:updates], before=1),
                     test_loss=columns.pop("test_loss", None), val_loss=columns.pop("val_loss", None),
                     metrics=columns, config=config)  # fmt: skip

    def _drop(self, value: Tensor, before: int) -> Tensor:
        """Without the dimensions of a single seed and a single delay."""
        for position in (1, 0):
            if self.single[position]:
                value = value.squeeze(before + position)
        return value

    def _of_arrivals(self, name: str, updates: int) -> Tensor | None:
        values = [[getattr(one, name) for one in row] for row in self.simulation.arrivals]
        if any(value is None for row in values for value in row):
            return None
        return self._drop(torch.stack([torch.stack(row, dim=-1) for row in values], dim=1)[:updates], before=1)


def rule_axes(rule: AnyRule[Any], runs: torch.Size, names: Sequence[str] | None) -> list[Axis]:
    """An axis for each run dimension of a rule: a name, and the values of the hyper-parameter of that name.

    >>> import lategrad as lg
    >>> rule = lg.Steady(lr=torch.tensor([[[0.5]], [[2.0]]]), c=torch.tensor([[10.0], [20.0], [30.0]]))
    >>> rule_axes(rule, torch.Size([2, 3]), names=None)
    [Axis(name='lr', values=(0.5, 2.0)), Axis(name='c', values=(10.0, 20.0, 30.0))]
    """
    if names is not None:
        require("axes", names, len(names) == len(runs) == len(set(names)),
                f"{len(runs)} different names, one for each run dimension of the rule")  # fmt: skip
    return [_rule_axis(rule, runs, i, None if names is None else names[i]) for i in range(len(runs))]


def _rule_axis(rule: AnyRule[Any], runs: torch.Size, position: int, own_name: str | None) -> Axis:
    varying = {}
    for path, value in zip(leaf_names(rule), tensors(rule), strict=True):
        name = path.rpartition(".")[2]
        shape = (1,) * (len(runs) + 1 - value.dim()) + tuple(value.shape)
        if shape[position] == runs[position]:
            varying[name] = tuple(value.flatten().tolist()) if value.numel() == runs[position] else None
    counted = tuple(range(runs[position]))
    if own_name is not None:
        return Axis(own_name, varying.get(own_name) or counted)
    ((name, values),) = varying.items() if len(varying) == 1 else [(f"run{position}", None)]
    return Axis(name if values else f"run{position}", values or counted)
