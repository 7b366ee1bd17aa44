"""What happened in a run: recorded losses, accuracies and delays, the final vectors, the configuration.

A trace is one file (safetensors: tensors and JSON, nothing that executes on loading), written atomically.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lategrad.delays import DelaySummary, summarise
from lategrad.support.files import replacing
from lategrad.support.validation import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "lategrad-trace-1"
_TENSORS = ("steps", "loss", "accuracy", "test_loss", "delays", "time", "worker", "sequence", "output", "query")


@dataclass(frozen=True)
class Axis:
    """One dimension of the runs: what varies along it, and its values."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """The record of a simulation or of a real training; every run has its place along ``axes``.

    The run dimensions are those of ``axes``, in order; a single run has none.
    """

    steps: Tensor
    """``(records,)``: after how many updates each record was taken; the first is 0, the start."""
    loss: Tensor
    """``(records, *runs)``: the objective at the rule's output, float64."""
    accuracy: Tensor | None
    """``(records, *runs)``: test accuracy at the rule's output, where the problem has one."""
    delays: Tensor
    """``(updates, *arrivals)``: the delay of every update, int32; arrivals are the axes seed and delay."""
    output: Tensor
    """``(*runs, dim)``: the rule's output at the end: what to evaluate and ship."""
    query: Tensor
    """``(*runs, dim)``: the next query at the end; for most rules another point than the output."""
    axes: tuple[Axis, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    """What was run: problem, rule, delays, seeds, versions; plain JSON values."""
    time: Tensor | None = None
    """``(updates, *arrivals)``: when each update was applied, in (virtual) seconds, where known."""
    worker: Tensor | None = None
    """``(updates, *arrivals)``: who sent each gradient, where known."""
    sequence: Tensor | None = None
    """``(updates,)``: which sample of its worker's stream each gradient used, in a real training."""
    test_loss: Tensor | None = None
    """``(records, *runs)``: the loss on held-out data at the rule's output, where the problem has one."""

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        by_name = {axis.name: axis for axis in self.axes}
        require("axis", name, name in by_name, f"one of {', '.join(by_name) or 'none: this is a single run'}")
        return by_name[name]

    def delay_summary(self) -> DelaySummary:
        """Mean, spread, quantiles, maximum and histogram of all delays."""
        return summarise(self.delays.flatten())

    @property
    def version(self) -> Tensor:
        """``(updates, *arrivals)``: how many updates the query of each gradient had behind it."""
        made = torch.arange(len(self.delays)).view(-1, *[1] * (self.delays.dim() - 1))
        return made - self.delays

    @property
    def complete(self) -> bool:
        """Whether the run reached the number of updates that it was asked for."""
        return bool(self.steps[-1].item() == self.config.get("steps"))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace to one file; a reader sees the old file or the new one, never half of one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().contiguous().cpu() for name in _TENSORS
                   if (value := getattr(self, name)) is not None}  # fmt: skip
        axes = [{"name": axis.name, "values": list(axis.values)} for axis in self.axes]
        metadata = {"format": _FORMAT, "axes": json.dumps(axes), "config": json.dumps(self.config)}
        with replacing(path) as part:
            save_file(tensors, part, metadata=metadata)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trace:
        """Read a trace; nothing in the file is executed."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no trace at {os.fspath(path)!r}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                require("the format of " + repr(os.fspath(path)), metadata.get("format"),
                        metadata.get("format") == _FORMAT, repr(_FORMAT))  # fmt: skip
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{os.fspath(path)!r} is not a readable trace: {error}") from None
        axes = tuple(Axis(axis["name"], tuple(axis["values"])) for axis in json.loads(metadata["axes"]))
        optional = {name: tensors.pop(name, None) for name in ("accuracy", "test_loss", "time", "worker", "sequence")}
        return Trace(**tensors, **optional, axes=axes, config=json.loads(metadata["config"]))

    def rows(self, optimum: float | None = None) -> Iterator[dict[str, Any]]:
        """One row for every record of every run: its place on the axes, step, accuracy, loss, excess loss, and the
        test loss where there is one.

        Args:
            optimum: the smallest loss that can be had; without it the excess loss is left empty.
        """
        for index in product(*(range(len(axis.values)) for axis in self.axes)):
            where = {axis.name: axis.values[i] for axis, i in zip(self.axes, index, strict=True)}
            losses = self.loss.movedim(0, -1)[index].tolist()
            accuracies = [""] * len(losses)
            if self.accuracy is not None:
                accuracies = self.accuracy.movedim(0, -1)[index].tolist()
            for record, (step, accuracy, loss) in enumerate(zip(self.steps.tolist(), accuracies, losses, strict=True)):
                excess = "" if optimum is None else loss - optimum
                row = {**where, "step": step, "accuracy": accuracy, "loss": loss, "excess_loss": excess}
                yield row if self.test_loss is None else row | {"test_loss": self.test_loss[record][index].item()}

    def to_csv(self, path: str | os.PathLike[str], optimum: float | None = None) -> Path:
        """Write :meth:`rows` to a CSV file."""
        return write_csv(path, self.rows(optimum))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Loss and accuracy over updates, a line for each run, averaged over seeds with their range.

        Args:
            path: also save the figure there (.png, .svg or .pdf).
        """
        from matplotlib.figure import Figure

        panels = [("loss", self.loss)] + ([] if self.accuracy is None else [("accuracy", self.accuracy)])
        figure = Figure(figsize=(6.4 * len(panels), 4.4), layout="constrained")
        seed = next((i for i, axis in enumerate(self.axes) if axis.name == "seed"), None)
        shown = [axis for i, axis in enumerate(self.axes) if i != seed]
        for column, (name, values) in enumerate(panels):
            ax = figure.add_subplot(1, len(panels), column + 1)
            by_seed = values.unsqueeze(-1) if seed is None else values.movedim(seed + 1, -1)
            curves = by_seed.movedim(0, -2)  # (*shown, records, seeds)
            for index in product(*(range(len(axis.values)) for axis in shown)):
                label = ", ".join(f"{axis.name} {axis.values[i]}" for axis, i in zip(shown, index, strict=True))
                of_seeds = curves[index]
                (line,) = ax.plot(self.steps, of_seeds.mean(-1), label=label or None)
                low, high = of_seeds.amin(-1), of_seeds.amax(-1)
                ax.fill_between(self.steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
            ax.set(xlabel="updates", ylabel=name, title=str(self.config.get("title", "")))
            if name == "loss" and bool((values > 0).all()):
                ax.set_yscale("log")
            if shown and column == len(panels) - 1:
                ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
            ax.grid(alpha=0.3)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        return figure


def write_csv(path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]) -> Path:
    """Write dictionaries that share their keys as a CSV file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def describe(part: object) -> Any:
    """A rule, learner, set or delay model as plain JSON values: its class and its fields.

    >>> import torch, lategrad as lg
    >>> describe(lg.SGD(lr=0.5, domain=lg.Ball(torch.tensor([2.0]))))
    {'type': 'SGD', 'lr': 0.5, 'domain': {'type': 'Ball', 'radius': [2.0], 'center': None}, 'average': 'none'}
    """
    if isinstance(part, Tensor):
        if part.numel() <= 4096:
            return part.tolist()
        contents = hashlib.sha256(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        return f"tensor of shape {tuple(part.shape)}, {contents[:16]}"
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {f.name: describe(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return {"type": type(part).__name__, **fields}
    if isinstance(part, tuple | list):
        return [describe(item) for item in part]
    if part is None or isinstance(part, bool | int | float | str):
        return part
    return repr(part)
