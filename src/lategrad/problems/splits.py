"""Which rows a module is trained on, and which ones judge it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.data import Dataset
from lategrad.problems.sources import Batches, Columns, Source, Subset, Tensors, as_source
from lategrad.support.seeds import Stream, torch_generator
from lategrad.support.validation import require, require_share

_STREAM_ROWS = 1024  # of a stream, that the training loss is the mean over unless it is said how many


@dataclass(frozen=True)
class Parts:
    """The parts of the data."""

    name: str
    train: Source | Batches
    """What gradients use."""
    judged: Source
    """What the training loss is the mean over: the same rows, or the first ones of a stream."""
    validation: Source | None
    test: Source | None
    has_classes: bool
    """Whether targets are classes."""
    labels: Tensor | None
    """The class of every row, where they are in memory; on the CPU."""

    @property
    def held_out(self) -> Source | None:
        """What records judge by: the validation part if there is one, else the test part if there is one."""
        return self.validation or self.test

    def to(self, device: torch.device | str) -> Parts:
        """The same with what is in memory on a device."""
        validation, test = (None if part is None else part.to(device) for part in (self.validation, self.test))
        return dataclasses.replace(
            self, train=self.train.to(device), judged=self.judged.to(device), validation=validation, test=test
        )


def parts_of(data: Any, test: Any, validation: float, evaluate: int | None, columns: Columns | None) -> Parts:
    """The parts of what a user gives; see :class:`~lategrad.problems.ModuleProblem` for the arguments."""
    require_share("validation", validation)
    if isinstance(data, Dataset):
        require("test", type(test).__name__, test is None, "None: the data set has a test part")
        require("columns", columns, columns is None, "None: the rows of this data set are not dicts")
        train: Source | Batches = Tensors(data.x_train, data.y_train)
        test_part: Source | None = Tensors(data.x_test, data.y_test)
    else:
        train = as_source("data", data, columns)
        given = None if test is None else as_source("test", test, columns)
        if isinstance(given, Batches):
            raise ValueError("test must be a data set whose rows have numbers, got a function")
        test_part = given
    labels = data.y_train if isinstance(data, Dataset) and data.classes is not None else None
    name = data.name if isinstance(data, Dataset) else getattr(data, "__name__", type(data).__name__)
    held_out: Source | None = None
    if isinstance(train, Batches):
        if validation:
            raise ValueError(f"validation must be 0 for a stream of batches, got {validation}: give test= instead")
        judged: Source = train.first_rows(evaluate or _STREAM_ROWS)
    else:
        if validation:
            held_out, train = _split(train, validation)
            labels = None if labels is None else labels[train.numbers]
        judged = train
    has_classes = labels is not None if isinstance(data, Dataset) else _are_classes(judged)
    return Parts(name, train, judged, held_out, test_part, has_classes, labels)


def _split(source: Source, share: float) -> tuple[Subset, Subset]:
    """So large a share of the rows, chosen at random but always the same, and the others."""
    rows = len(source)
    held_out = round(share * rows)
    require("validation", share, 0 < held_out < rows, f"large enough to hold out some of {rows} rows, but not all")
    order = torch.randperm(rows, generator=torch_generator(0, Stream.VALIDATION))
    return Subset(source, order[:held_out].sort().values), Subset(source, order[held_out:].sort().values)


def _are_classes(source: Source) -> bool:
    _, targets = source.rows(torch.zeros(1, dtype=torch.int64))
    return not targets.is_floating_point()
