"""Checks at the edges: every bad argument raises a ValueError with its name, its value and what is valid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scalar = float | Tensor
"""A hyper-parameter: a float, or a tensor of shape ``(*runs, 1)`` with one value for each run."""


def _all_true(condition: bool | Tensor) -> bool:
    return bool(condition.all()) if isinstance(condition, Tensor) else condition


def require(name: str, value: object, condition: bool | Tensor, valid: str) -> None:
    """Raise a ``ValueError`` that names the argument, its value and what would be valid.

    >>> require("radius", -1.0, False, "a finite number >= 0")
    Traceback (most recent call last):
    ...
    ValueError: radius must be a finite number >= 0, got -1.0
    """
    if not _all_true(condition):
        raise ValueError(f"{name} must be {valid}, got {value!r}")


def require_number(name: str, value: Scalar, *, low: float, strict: bool = False) -> None:
    """Require a finite number (or a tensor of them) with ``value >= low``, or ``> low`` when strict."""
    valid = f"a finite number {'>' if strict else '>='} {low:g}"
    if isinstance(value, Tensor):
        require(name, value, value.is_floating_point(), "a floating-point tensor")
        above = value > low if strict else value >= low
        require(name, value, torch.isfinite(value) & above, valid)
    else:
        require(name, value, isinstance(value, int | float) and not isinstance(value, bool), valid)
        require(name, value, math.isfinite(value) and (value > low if strict else value >= low), valid)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Require one of the given words."""
    require(name, value, value in choices, "one of " + ", ".join(map(repr, choices)))
