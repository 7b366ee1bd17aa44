"""Where the rows of a minibatch come from: tensors, a file on disk, a ``torch.utils.data.Dataset``, or a stream; and
which rows are for training, for validation and for tests.

A source gives the inputs and targets of row numbers. The numbers are drawn elsewhere (:mod:`~.minibatches`), so that a
run on any source except a stream can be replayed.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lategrad.problems.data import Dataset
from lategrad.support.runs import checksum
from lategrad.support.seeds import Stream, derived_seed, torch_generator
from lategrad.support.validation import Range, require

PathLike = str | os.PathLike[str]
Inputs = Tensor | dict[str, Tensor]
"""What a module is called with: a tensor, or its keyword arguments by name."""

Columns = tuple[str | tuple[str, ...], str]
"""For rows that are dicts: the column (or the columns, as keyword arguments) of the inputs, and that of the targets."""

_FINGERPRINTED = 64  # rows of a data set that is not in memory; all of it could take hours


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    return {name: function(value) for name, value in inputs.items()} if isinstance(inputs, dict) else function(inputs)


class Source(Protocol):
    """Rows that can be looked up by their numbers."""

    on_device: bool  #: Whether rows are looked up on the device alone, so that a GPU can repeat it as a graph.

    def __len__(self) -> int: ...

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of row numbers, whose shape comes first in theirs."""

    def fingerprint(self) -> bytes:
        """Differs between sources."""

    def to(self, device: torch.device | str) -> "Source":
        """The same with what is in memory, and the rows, on a device."""


@dataclass(eq=False, repr=False)
class Tensors:
    """Rows in memory.

    >>> Tensors(torch.arange(6.0).view(3, 2), torch.arange(3)).rows(torch.tensor([2, 0]))
    (tensor([[4., 5.],
            [0., 1.]]), tensor([2, 0]))
    """

    x: Inputs
    y: Tensor
    on_device = True

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        return map_inputs(lambda values: values[numbers], self.x), self.y[numbers]

    def fingerprint(self) -> bytes:
        return checksum((self.x, self.y)).encode()

    def to(self, device: torch.device | str) -> "Tensors":
        return Tensors(map_inputs(lambda values: values.to(device), self.x), self.y.to(device))


class Subset:
    """Some rows of a source, in a given order."""

    def __init__(self, source: Source, numbers: Tensor) -> None:
        self.source, self.numbers, self.on_device = source, numbers, source.on_device

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        return self.source.rows(self.numbers[numbers])

    def fingerprint(self) -> bytes:
        return self.source.fingerprint() + checksum((self.numbers, self.numbers)).encode()

    def to(self, device: torch.device | str) -> "Subset":
        return Subset(self.source.to(device), self.numbers.to(device))


@dataclass(eq=False, repr=False)
class Items:
    """Rows of a ``torch.utils.data.Dataset``, or of anything that has a length and gives a row for a number.

    A row is a pair (input, target), or a dict, of which ``columns`` names the inputs and the targets. Random
    augmentation may draw from the global generators of torch, Python and numpy, which a problem seeds.
    """

    dataset: Any
    columns: Columns | None = None
    device: torch.device | str = "cpu"
    on_device = False

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        batch = default_collate([self.dataset[number] for number in numbers.flatten().tolist()])
        inputs, targets = pair(batch, self.columns)

        def shape(values: Tensor) -> Tensor:
            return values.to(self.device).reshape(*numbers.shape, *values.shape[1:])

        return map_inputs(shape, inputs), shape(targets)

    def fingerprint(self) -> bytes:
        return str(len(self)).encode() + _checksum_of_some(self)

    def to(self, device: torch.device | str) -> "Items":
        return Items(self.dataset, self.columns, device)


class NpyRows:
    """Rows of two ``.npy`` files that stay on disk: only what a minibatch needs is read.

    Args:
        x: file of the inputs, an array whose first dimension are rows.
        y: file of the targets, as many.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, array in (("x", np.eye(3, dtype=np.float32)), ("y", np.arange(3))):
    ...         np.save(f"{folder}/{name}.npy", array)
    ...     NpyRows(f"{folder}/x.npy", f"{folder}/y.npy").rows(torch.tensor([1]))
    (tensor([[0., 1., 0.]]), tensor([1]))
    """

    on_device = False

    def __init__(self, x: PathLike, y: PathLike, *, device: torch.device | str = "cpu") -> None:
        self.paths, self.device = (Path(x).resolve(), Path(y).resolve()), torch.device(device)
        for path in self.paths:
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {str(path)!r}: check the path")
        self._arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in self.paths]
        rows, targets = map(len, self._arrays)
        require("y", str(y), rows == targets, f"as long as x: they have {rows} and {targets} rows")

    def __len__(self) -> int:
        return len(self._arrays[1])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NpyRows, device=self.device), self.paths  # not the arrays, which would be read in full

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        index = numbers.cpu().numpy()
        x, y = (torch.from_numpy(np.ascontiguousarray(array[index])).to(self.device) for array in self._arrays)
        return x, y

    def fingerprint(self) -> bytes:
        return str([path.stat().st_size for path in self.paths]).encode() + _checksum_of_some(self)

    def to(self, device: torch.device | str) -> "NpyRows":
        return NpyRows(*self.paths, device=device)

    def __repr__(self) -> str:
        return f"NpyRows({', '.join(path.name for path in self.paths)})"


@dataclass(eq=False, repr=False)
class Batches:
    """A stream of minibatches made from a seed, for data that cannot be looked up, such as a custom ``DataLoader``.

    Batch number k of a seed is the k-th that ``factory(seed)`` yields; when it is exhausted, ``factory`` is called
    with another seed derived from that one. If the batches depend on the seed alone, runs can be replayed.

    Args:
        factory: from a seed (an int, different for each worker) to an iterable of batches, such as a ``DataLoader``
            with ``generator=torch.Generator().manual_seed(seed)``.
        columns: see :class:`Items`.
    """

    factory: Callable[[int], Iterable[Any]]
    columns: Columns | None = None
    device: torch.device | str = "cpu"
    on_device = False
    _streams: dict[int, tuple[int, Iterator[Any]]] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}  # iterators stay where they are

    def batch(self, seed: int, number: int) -> tuple[Inputs, Tensor]:
        """Quick for the next number; otherwise all batches before it are made again."""
        position, batches = self._streams.get(seed, (0, None))
        if batches is None or position > number:
            position, batches = 0, self._endless(seed)
        for _ in range(position, number):
            next(batches)
        inputs, targets = pair(next(batches), self.columns)
        self._streams[seed] = (number + 1, batches)
        return map_inputs(lambda values: values.to(self.device), inputs), targets.to(self.device)

    def _endless(self, seed: int) -> Iterator[Any]:
        for epoch in itertools.count():
            empty = True
            for batch in self.factory(seed if epoch == 0 else derived_seed(seed, Stream.EPOCHS, epoch)):
                empty = False
                yield batch
            require("data", self.factory, not empty, "a factory of iterables with at least one batch")

    def rows(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """Of samples ``(*streams, 2)``: the seed of the stream and the number of the batch."""
        batches = [self.batch(seed, number) for seed, number in numbers.reshape(-1, 2).tolist()]
        inputs, targets = zip(*batches, strict=True)
        sizes = sorted({len(y) for y in targets})
        require("data", sizes, len(sizes) == 1, "batches of one size where several are stacked: drop_last=True")
        if numbers.dim() == 1:
            return inputs[0], targets[0]

        def stack(parts: Sequence[Tensor]) -> Tensor:
            return torch.stack(list(parts)).view(*numbers.shape[:-1], *parts[0].shape)

        return _join(stack, inputs), stack(targets)

    def first_rows(self, count: int) -> Tensors:
        """At least ``count`` rows of the stream of seed 0, in memory."""
        batches: list[tuple[Inputs, Tensor]] = []
        while sum(len(targets) for _, targets in batches) < count:
            batches.append(self.batch(0, len(batches)))
        inputs, targets = zip(*batches, strict=True)
        return Tensors(_join(torch.cat, inputs), torch.cat(targets))

    def to(self, device: torch.device | str) -> "Batches":
        return Batches(self.factory, self.columns, device)


def _join(join: Callable[[list[Tensor]], Tensor], inputs: Sequence[Inputs]) -> Inputs:
    if isinstance(inputs[0], dict):
        return {name: join([cast(dict[str, Tensor], x)[name] for x in inputs]) for name in inputs[0]}
    return join([cast(Tensor, x) for x in inputs])


def pair(batch: Any, columns: Columns | None) -> tuple[Inputs, Tensor]:
    """The inputs and targets of a batch that is a pair or a dict."""
    if isinstance(batch, Mapping):
        found = ", ".join(map(str, batch))
        if columns is None:
            raise ValueError(f"columns must name the inputs and the targets, as rows are dicts of {found}: "
                             "columns=(input, target), or ((several, inputs), target)")  # fmt: skip
        names, target = columns
        several_names = [names] if isinstance(names, str) else list(names)
        is_valid = all(name in batch for name in [*several_names, target])
        require("columns", columns, is_valid, f"among those of the rows, {found}")
        inputs = {name: _as_tensor(batch[name]) for name in several_names}
        return inputs[names] if isinstance(names, str) else inputs, _as_tensor(batch[target])
    require("columns", columns, columns is None, "None where rows are pairs")
    several = isinstance(batch, Sequence) and not isinstance(batch, str)
    found = f"rows of {len(batch)} parts" if several else f"rows of type {type(batch).__name__}"
    valid = "rows that are pairs (input, target), or dicts; for two tensors use torch.utils.data.TensorDataset(x, y)"
    require("data", found, several and len(batch) == 2, valid)
    return _as_tensor(batch[0]), _as_tensor(batch[1])


def _as_tensor(values: Any) -> Tensor:
    """One tensor for a batch; ``default_collate`` turns rows that are lists of numbers into a tensor per position."""
    if not isinstance(values, list | tuple):
        return torch.as_tensor(values)
    parts = [_as_tensor(part) if isinstance(part, list | tuple) else part for part in values]
    numbers = all(isinstance(part, Tensor) and part.dim() == 1 for part in parts)
    require("data", f"inputs of {len(parts)} parts", numbers, "rows with one input; several inputs are given by name: "
            "rows that are dicts, and columns=((first, second), target)")  # fmt: skip
    stacked = torch.stack(parts, dim=-1)
    return stacked.to(torch.get_default_dtype()) if stacked.is_floating_point() else stacked


def as_source(name: str, data: Any, columns: Columns | None) -> Source | Batches:
    """The source of a user's data; ``name`` is the argument's, for messages."""
    if isinstance(data, Tensors | Items | NpyRows | Batches | Subset):
        return data
    if isinstance(data, DataLoader):
        raise ValueError(f"{name} must not be a DataLoader, whose batches come in an order of their own: give its "
                         "data set (loader.dataset) and batch=, or a function from a seed to a DataLoader")  # fmt: skip
    if isinstance(data, IterableDataset):
        raise ValueError(f"{name} must be a data set whose rows have numbers; for an IterableDataset give a function "
                         "from a seed to a DataLoader")  # fmt: skip
    if isinstance(data, type):
        raise ValueError(f"{name} must be a data set, got the class {data.__name__}: call it, {data.__name__}(...)")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        require(name, data, len(data) > 0, "a data set with rows")
        return Items(data, columns)
    if callable(data):
        return Batches(data, columns)
    raise ValueError(f"{name} must be a data set of lategrad.problems.load, a torch data set, a list of rows, or a "
                     f"function from a seed to a DataLoader, got {type(data).__name__}")  # fmt: skip


def _checksum_of_some(source: Source) -> bytes:
    numbers = torch.linspace(0, len(source) - 1, min(_FINGERPRINTED, len(source))).round().long()
    return checksum(source.rows(numbers)).encode()


# ---- Training, validation and test splits

_STREAM_ROWS = 1024  # of a stream, that the training loss is the mean over by default


@dataclass(frozen=True)
class Splits:
    """The data of a problem by its use."""

    name: str
    train: Source | Batches  #: The rows of gradients.
    loss_rows: Source  #: The rows of the training loss: the same, or the first of a stream.
    validation: Source | None
    test: Source | None
    has_classes: bool
    labels: Tensor | None  #: The class of every training row, where they are in memory; on the CPU.

    @property
    def held_out(self) -> Source | None:
        """The data that records are evaluated on: the validation split if there is one, else the test split."""
        return self.validation or self.test

    def to(self, device: torch.device | str) -> "Splits":
        sources = {name: source.to(device) for name in ("train", "loss_rows", "validation", "test")
                   if (source := getattr(self, name)) is not None}  # fmt: skip
        return replace(self, **sources)


def split_data(data: Any, test: Any, validation: float, evaluate: int | None, columns: Columns | None) -> Splits:
    """The splits of a user's data; see :class:`~lategrad.problems.ModuleProblem` for the arguments."""
    Range(0, 1)("validation", validation)
    train: Source | Batches
    test_split: Source | Batches | None
    if isinstance(data, Dataset):
        require("test", type(test).__name__, test is None, "None: the data set has a test part")
        require("columns", columns, columns is None, "None: the rows of this data set are not dicts")
        name, train, test_split = data.name, Tensors(data.x_train, data.y_train), Tensors(data.x_test, data.y_test)
        labels = None if data.classes is None else data.y_train
    else:
        name, train = getattr(data, "__name__", type(data).__name__), as_source("data", data, columns)
        test_split = None if test is None else as_source("test", test, columns)
        labels = None
        if isinstance(test_split, Batches):
            raise ValueError("test must be a data set whose rows have numbers, got a function")
    held_out: Source | None = None
    if isinstance(train, Batches):
        if validation:
            raise ValueError(f"validation must be 0 for a stream of batches, got {validation}: give test= instead")
        loss_rows: Source = train.first_rows(evaluate or _STREAM_ROWS)
    else:
        if validation:
            held_out, rest = _split(train, validation)
            train, labels = rest, None if labels is None else labels[rest.numbers]
        loss_rows = train
    _, targets = loss_rows.rows(torch.zeros(1, dtype=torch.int64))
    has_classes = labels is not None if isinstance(data, Dataset) else not targets.is_floating_point()
    return Splits(name, train, loss_rows, held_out, test_split, has_classes, labels)


def _split(source: Source, share: float) -> tuple[Subset, Subset]:
    """A share of the rows, chosen at random but always the same, and the other rows."""
    rows = len(source)
    held_out = round(share * rows)
    require("validation", share, 0 < held_out < rows, f"large enough to hold out some of {rows} rows, but not all")
    order = torch.randperm(rows, generator=torch_generator(0, Stream.VALIDATION))
    return Subset(source, order[:held_out].sort().values), Subset(source, order[held_out:].sort().values)
