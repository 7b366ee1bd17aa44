"""The record of a run: losses, accuracies and delays, the final vectors, the configuration.

A trace is one file (safetensors: tensors and JSON, nothing that executes on loading), written atomically.
"""

import csv
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lategrad.delays import DelaySummary, summarise
from lategrad.problems.problem import Measures
from lategrad.support.files import replacing
from lategrad.support.runs import checksum
from lategrad.support.validation import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "lategrad-trace-2"
_OPTIONAL = ("accuracy", "test_loss", "val_loss", "time", "worker", "sequence", "parent_job", "local_steps")
_TENSORS = ("steps", "loss", "delays", "output", "query", *_OPTIONAL)
_TOGETHER, _COLUMNS = 10, 3  # curves in one panel; panels in a row of a figure
_METRIC = "metric."  # prefix of the names of metrics in a file


@dataclass(frozen=True)
class Axis:
    """One dimension of the runs: the quantity that varies along it, and its values."""

    name: str
    values: tuple[Any, ...]

    def at(self, position: int) -> str:
        """Name and value at a position, with round numbers.

        >>> Axis("lr", (0.10000000149011612,)).at(0)
        'lr 0.1'
        """
        value = self.values[position]
        return f"{self.name} {value:.4g}" if isinstance(value, float) else f"{self.name} {value}"


class Certificate(NamedTuple):
    """How late the gradients of a run were, in updates and in the space of the parameters."""

    drift: Tensor | None
    """``(*runs,)``: V, the mean distance between the query of a gradient and the query at its arrival; None without
    ``drift=True``, NaN if it was measured in a part of the run only."""
    mean_delay: Tensor  #: ``(*arrivals,)``
    outstanding: Tensor
    """``(*arrivals,)``: mean number of gradients in flight at an update, its own included, that is 1 + ``mean_delay``.
    Those that are never applied do not count."""
    max_outstanding: Tensor  #: ``(*arrivals,)``: the largest such number


@dataclass(frozen=True, eq=False)
class Trace:
    """The record of a simulation or of a training run. The run dimensions are ``axes``; a single run has none."""

    steps: Tensor  #: ``(records,)``: the number of updates before each record; the first is 0, the start.
    loss: Tensor  #: ``(records, *runs)``: the objective at the rule's output, float64.
    accuracy: Tensor | None  #: ``(records, *runs)``: test accuracy at the rule's output, if the problem has one.
    delays: Tensor  #: ``(updates, *arrivals)``: the delay of every update, int32; arrivals are the axes seed and delay.
    output: Tensor  #: ``(*runs, dim)``: the rule's output at the end: the weights to evaluate and ship.
    query: Tensor  #: ``(*runs, dim)``: the next query at the end; for most rules not the output.
    axes: tuple[Axis, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)  #: Problem, rule, delays, seeds, versions; plain JSON values.
    time: Tensor | None = None
    """``(updates, *arrivals)``: when each update was applied, in (virtual) seconds, if known."""
    worker: Tensor | None = None  #: ``(updates, *arrivals)``: the worker that sent each gradient, if known.
    sequence: Tensor | None = None
    """``(updates,)``: the number of each gradient's sample in its worker's stream, in a training run."""
    parent_job: Tensor | None = None
    """``(updates,)``: the job of the same worker that left the state in which this one began, -1 for a new worker's;
    where workers have state."""
    local_steps: Tensor | None = None
    """``(updates, *arrivals)``: the number of local steps of each sender, if the problem has local steps."""
    test_loss: Tensor | None = None
    """``(records, *runs)``: the loss on test data at the rule's output, if the problem has some."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """``(records, *runs)`` each: the user's own metrics at the rule's output, by name."""
    val_loss: Tensor | None = None
    """``(records, *runs)``: the loss on validation data at the rule's output, where some training rows are held out."""

    def __repr__(self) -> str:
        runs = f" of {self.loss[-1].numel()} runs" if self.axes else ""
        last = [f"{name} {_range(values[-1])}" for name, values in self.recorded().items()]
        delays = f", delay up to {int(self.delays.max())}" if len(self.delays) else ""
        return f"Trace({len(self.delays):,} updates{runs}, {len(self.steps)} records; {', '.join(last)}{delays})"

    def recorded(self) -> dict[str, Tensor]:
        """Loss, accuracy, test and validation loss, as far as the problem has them, and the user's metrics."""
        return Measures(self.loss, self.accuracy, self.test_loss, self.metrics, self.val_loss).by_name()

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        by_name = {axis.name: axis for axis in self.axes}
        require("axis", name, name in by_name, f"one of {', '.join(by_name) or 'none: this is a single run'}")
        return by_name[name]

    def delay_summary(self) -> DelaySummary:
        """Mean, spread, quantiles, maximum and histogram of all delays."""
        return summarise(self.delays.flatten())

    def certificate(self) -> Certificate:
        """Mean distance (with ``drift=True``), mean delay, and the gradients in flight, over the whole run."""
        require("trace", "one without updates", len(self.delays) > 0, "of one update at least")
        drift, fetched = self.metrics.get("drift"), torch.zeros(self.delays.shape, dtype=torch.int64)
        fetched = fetched.scatter_add(0, self.version, torch.ones_like(fetched)).cumsum(0)
        outstanding = fetched.movedim(0, -1) - torch.arange(len(fetched))
        if drift is not None:
            drift = (drift[1:].movedim(0, -1) * self.steps.diff()).sum(-1) / self.steps[-1]
        return Certificate(drift, self.delays.double().mean(0), outstanding.double().mean(-1), outstanding.amax(-1))

    @property
    def version(self) -> Tensor:
        """``(updates, *arrivals)``: the number of updates before the query of each gradient."""
        return torch.arange(len(self.delays)).view(-1, *[1] * (self.delays.dim() - 1)) - self.delays

    @property
    def complete(self) -> bool:
        """Whether the run reached its number of updates."""
        return bool(self.steps[-1].item() == self.config.get("steps"))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace to one file; a reader sees the old file or the new one, never half of one."""
        path = Path(path)
        tensors = {name: value.detach().contiguous().cpu() for name in _TENSORS
                   if (value := getattr(self, name)) is not None}  # fmt: skip
        tensors |= {_METRIC + name: value.contiguous().cpu() for name, value in self.metrics.items()}
        axes = [{"name": axis.name, "values": list(axis.values)} for axis in self.axes]
        metadata = {"format": _FORMAT, "axes": json.dumps(axes), "config": json.dumps(self.config)}
        with replacing(path) as part:
            save_file(tensors, part, metadata=metadata)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Trace":
        """Read a trace; nothing in the file is executed."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no trace at {os.fspath(path)!r}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                found = metadata.get("format")
                require(f"the format of {os.fspath(path)!r}", found, found == _FORMAT, repr(_FORMAT))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            axes = tuple(Axis(axis["name"], tuple(axis["values"])) for axis in json.loads(metadata["axes"]))
            optional = {name: tensors.pop(name, None) for name in _OPTIONAL}
            metrics = {name[len(_METRIC) :]: tensors.pop(name) for name in list(tensors) if name.startswith(_METRIC)}
            config = dict(json.loads(metadata["config"]))
            trace = Trace(**tensors, **optional, metrics=metrics, axes=axes, config=config)
            form = (len(trace.steps), *(len(axis.values) for axis in axes))
            if wrong := [name for name, values in trace.recorded().items() if values.shape != form or not form[0]]:
                raise TypeError(f"{wrong[0]} is not of shape {form}")
            return trace
        except (SafetensorError, KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"{os.fspath(path)!r} is not a readable trace: {error}") from None

    def rows(self, optimum: float | None = None) -> Iterator[dict[str, Any]]:
        """One row for every record of every run: axes, step, accuracy, loss, excess loss, test loss and metrics.

        Args:
            optimum: the smallest possible loss; without it the excess loss is left empty.
        """
        by_run = {name: values.movedim(0, -1) for name, values in self.recorded().items()}
        for index in product(*(range(len(axis.values)) for axis in self.axes)):
            where = {axis.name: axis.values[i] for axis, i in zip(self.axes, index, strict=True)}
            columns = {name: values[index].tolist() for name, values in by_run.items()}
            for record, (step, loss) in enumerate(zip(self.steps.tolist(), columns["loss"], strict=True)):
                excess = "" if optimum is None else loss - optimum
                row = {**where, "step": step, "accuracy": "", "loss": loss, "excess_loss": excess}
                yield row | {name: column[record] for name, column in columns.items()}

    def to_csv(self, path: str | os.PathLike[str], optimum: float | None = None) -> Path:
        """Write :meth:`rows` to a CSV file."""
        return write_csv(path, self.rows(optimum))

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Loss and accuracy over updates, a line for each run, averaged over seeds with their range.

        Args:
            path: also save the figure there (.png, .svg or .pdf).
        """
        return plot_traces({str(self.config.get("title", "")): self}, path)


def plot_traces(traces: Mapping[str, Trace], path: str | os.PathLike[str] | None = None) -> "Figure":
    """Loss and accuracy of several traces over updates: a line for each run, over seeds their mean and range.

    More than ten runs get panels of the accuracy (or loss): for each delay, or with several traces for each of them,
    and then only of the best run at every delay. A title says what the runs of a panel share, the legend the rest.

    Args:
        traces: by their names.
        path: also save the figure there (.png, .svg or .pdf).
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = [curve for name, trace in traces.items() for curve in _curves(name, trace)]
    quantities = ["loss", "accuracy"] if any(curve.accuracy is not None for curve in curves) else ["loss"]
    groups = [curves]
    if len(curves) > _TOGETHER:
        quantities = quantities[-1:]
        groups = [_best(group) for group in _split(curves, 0)] if len(traces) > 1 else _split(curves, 1)
    panels = [(group, quantity) for group in groups for quantity in quantities]
    columns, rows = min(len(panels), _COLUMNS), -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    for i, (group, quantity) in enumerate(panels):
        ax = figure.add_subplot(rows, columns, i + 1, sharey=figure.axes[0] if len(groups) > 1 and i else None)
        parts = list(zip(*(curve.place for curve in group), strict=True))
        shared = [len(set(part)) == 1 for part in parts]
        colours = colormaps["tab10" if len(group) <= _TOGETHER else "viridis"].resampled(max(len(group), _TOGETHER))
        for k, curve in enumerate(group):
            label = ", ".join(part for part, same in zip(curve.place, shared, strict=True) if part and not same)
            if (of_seeds := getattr(curve, quantity)) is not None:
                ax.plot(curve.steps, of_seeds.mean(-1), label=label or None, color=colours(k))
                if of_seeds.shape[-1] > 1:
                    low, high = of_seeds.amin(-1), of_seeds.amax(-1)
                    ax.fill_between(curve.steps, low, high, alpha=0.2, color=colours(k), linewidth=0)
        title = ", ".join(part[0] for part, same in zip(parts, shared, strict=True) if part[0] and same)
        ax.set(xlabel="updates", ylabel=quantity, title=title)
        if quantity == "loss" and all(bool((curve.loss > 0).all()) for curve in group):
            ax.set_yscale("log")
        if not all(shared) and quantity == quantities[-1]:
            ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        ax.grid(alpha=0.3)
    return saved_figure(figure, path, dpi=150)


def saved_figure(figure: "Figure", path: str | os.PathLike[str] | None, dpi: int) -> "Figure":
    """The figure, after it was written to a file, if there is a path, in the format that its name ends in."""
    if path is not None:
        path = Path(path)
        with replacing(path) as part:
            figure.savefig(part, dpi=dpi, format=path.suffix.removeprefix(".") or "png")
    return figure


class _Curve(NamedTuple):
    """The runs of a trace that differ only in their seed."""

    place: tuple[str, str, str]  # the name of the trace, the delay, and the other axes
    steps: Tensor
    loss: Tensor  # `(records, seeds)`
    accuracy: Tensor | None


def _curves(name: str, trace: Trace) -> Iterator[_Curve]:
    seed = next((i for i, axis in enumerate(trace.axes) if axis.name == "seed"), None)
    others = [axis for i, axis in enumerate(trace.axes) if i != seed]

    def at(values: Tensor, index: tuple[int, ...]) -> Tensor:
        by_seed = values.unsqueeze(-1) if seed is None else values.movedim(seed + 1, -1)
        return by_seed.movedim(0, -2)[index]

    for index in product(*(range(len(axis.values)) for axis in others)):
        place = {axis.name: axis.at(i) for axis, i in zip(others, index, strict=True)}
        delay, accuracy = place.pop("delay", ""), None if trace.accuracy is None else at(trace.accuracy, index)
        yield _Curve((name, delay, ", ".join(place.values())), trace.steps, at(trace.loss, index), accuracy)


def _split(curves: list[_Curve], part: int) -> list[list[_Curve]]:
    """The curves that share a part of their place, for each of its values."""
    values = dict.fromkeys(curve.place[part] for curve in curves)
    return [[curve for curve in curves if curve.place[part] == value] for value in values]


def _best(curves: list[_Curve]) -> list[_Curve]:
    """At each delay the curve with the best end."""

    def score(curve: _Curve) -> float:
        end = -curve.loss[-1] if curve.accuracy is None else curve.accuracy[-1]
        return float(end.mean().nan_to_num(nan=-torch.inf))

    return [max(group, key=score) for group in _split(curves, 1)]


def write_csv(path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]) -> Path:
    """Write dictionaries as a CSV file; missing keys are left empty."""
    path, rows = Path(path), list(rows)
    names = list(dict.fromkeys(key for row in rows for key in row))
    with replacing(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _range(values: Tensor) -> str:
    """One number, or the smallest and the largest of several."""
    low, high = f"{values.min().item():.4g}", f"{values.max().item():.4g}"
    return low if low == high else f"{low} to {high}"


def describe(part: object) -> Any:
    """A rule, learner, set or delay model as plain JSON values: its class and its fields.

    >>> import torch, lategrad as lg
    >>> describe(lg.FTRL(lr=0.5, domain=lg.Ball(torch.tensor([2.0]))))
    {'type': 'FTRL', 'lr': 0.5, 'domain': {'type': 'Ball', 'radius': [2.0], 'center': None}}
    """
    if isinstance(part, Tensor):
        if part.numel() <= 4096:
            return part.tolist()
        return f"tensor of shape {tuple(part.shape)}, {checksum(part)[:16]}"
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {f.name: describe(getattr(part, f.name)) for f in dataclasses.fields(part)}
        return {"type": type(part).__name__, **fields}
    if isinstance(part, tuple | list):
        return [describe(item) for item in part]
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, FunctionType):
        return f"function {part.__qualname__}"  # its repr has its address in memory
    return repr(part)
