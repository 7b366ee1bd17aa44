"""Training, validation and test splits of a module's data."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.data import Dataset
from lategrad.problems.sources import Batches, Columns, Source, Subset, Tensors, as_source
from lategrad.support.seeds import Stream, torch_generator
from lategrad.support.validation import Range, require

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
        return dataclasses.replace(self, **sources)


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
