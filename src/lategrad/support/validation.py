"""Argument checks: a bad argument raises a ValueError with its name, its value and what is valid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor
"""A hyper-parameter: a float, or a tensor of shape ``(*runs, 1)`` with one value for each run."""

_MAX_ENTRIES = 8  # of a tensor in a message
_LONGEST = 300  # characters of any other value
_MAX_COUNT = 10**15  # of anything that a file may count


def require(name: str, value: object, condition: bool | Tensor, valid: str) -> None:
    """Raise a ``ValueError`` that names the argument, its value and what would be valid.

    >>> require("radius", -1.0, False, "a finite number >= 0")
    Traceback (most recent call last):
    ...
    ValueError: radius must be a finite number >= 0, got -1.0
    """
    if not (condition.all() if isinstance(condition, Tensor) else condition):
        raise ValueError(f"{name} must be {valid}, got {_format(value)}")


def _format(value: object) -> str:
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    entries = [f"{entry:g}" for entry in value.detach().flatten()[:_MAX_ENTRIES].tolist()]
    more = ", ..." if value.numel() > _MAX_ENTRIES else ""
    return entries[0] if value.numel() == 1 else f"[{', '.join(entries)}{more}]"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A suggestion for a message, or nothing.

    >>> did_you_mean("anytime-sdg", ["anytime-sgd", "sgd", "steady"])
    "; did you mean 'anytime-sgd'?"
    """
    near = difflib.get_close_matches(name, [word for word in valid if word != name], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_number(name: str, value: Scalar, *, low: float, strict: bool = False) -> None:
    """Require a finite number (or a tensor of them) with ``value >= low``, or ``> low`` when strict."""
    valid = f"a finite number {'>' if strict else '>='} {low:g}"
    if isinstance(value, Tensor):
        require(name, value, value.is_floating_point(), "a floating-point tensor")
        per_run = value.dim() == 0 or value.shape[-1] == 1
        require(name, tuple(value.shape), per_run, "of shape (*runs, 1), one value for each run: use unsqueeze(-1)")
        above = value > low if strict else value >= low
        require(name, value, torch.isfinite(value) & above, valid)
    else:
        require(name, value, isinstance(value, int | float) and not isinstance(value, bool), valid)
        require(name, value, math.isfinite(value) and (value > low if strict else value >= low), valid)


def require_share(name: str, value: float) -> None:
    """Require a number in [0, 1), such as a momentum.

    >>> require_share("momentum", 1.0)
    Traceback (most recent call last):
    ...
    ValueError: momentum must be a number in [0, 1), got 1.0
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(name, value, number and 0 <= value < 1, "a number in [0, 1)")


def require_device(name: str, value: str | torch.device) -> torch.device:
    """Require a device that torch can use here; a GPU is returned with its number.

    >>> require_device("device", "cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(value)
    except RuntimeError:
        device = torch.device("meta")
    require(name, str(value), device.type in ("cpu", "cuda"), "'cpu' or 'cuda'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require(name, str(value), (device.index or 0) < count, f"'cpu': torch can use {count} GPU(s) here")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def require_form(name: str, value: Any, form: Any) -> None:
    """Require a JSON value of types, of a form for each item, ``[form]``, or for some or all keys, ``{str: form}``.

    >>> require_form("gate", {"0": {"applied": -1}}, {str: {"applied": int}})
    Traceback (most recent call last):
    ...
    ValueError: gate.0.applied must be of type int, got -1
    """
    kinds = form if isinstance(form, tuple) else (form if isinstance(form, type) else type(form),)
    is_valid = type(value) in kinds and (type(value) is not int or 0 <= value < _MAX_COUNT)
    require(name, value, is_valid, f"of type {' or '.join(kind.__name__ for kind in kinds)}")
    if isinstance(form, list):
        value, form = dict(enumerate(value)), {str: form[0]}
    for key in (*value, *form) if isinstance(form, dict) else ():
        if key is not str and (key in form or str in form):
            require_form(f"{name}.{key}", value.get(key), form.get(key, form.get(str)))


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        valid = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {valid}, got {value!r}{did_you_mean(str(value), choices)}")
