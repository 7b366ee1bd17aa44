"""The axes of a trace: a name and values for each run dimension of a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lategrad.rules.rule import AnyRule
from lategrad.support.validation import require
from lategrad.trace import Axis


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
    return [
        _rule_axis(rule, runs, position, None if names is None else names[position]) for position in range(len(runs))
    ]


def _rule_axis(rule: AnyRule[Any], runs: torch.Size, position: int, given: str | None) -> Axis:
    varying = {}
    for name, value in _named_tensors(rule):
        shape = (1,) * (len(runs) + 1 - value.dim()) + tuple(value.shape)
        if shape[position] == runs[position]:
            alone = all(length == 1 for i, length in enumerate(shape) if i != position)
            varying[name] = tuple(value.flatten().tolist()) if alone else None
    counted = tuple(range(runs[position]))
    if given is not None:
        return Axis(given, varying.get(given) or counted)
    ((name, values),) = varying.items() if len(varying) == 1 else [(f"run{position}", None)]
    return Axis(name if values else f"run{position}", values or counted)


def _named_tensors(part: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _named_tensors(value)
