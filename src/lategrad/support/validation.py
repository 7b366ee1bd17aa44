"""Argument checks: a bad argument raises a ValueError with its name, its value and what is valid."""

import dataclasses
import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from numbers import Integral
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

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


class Range:
    """Numbers, or tensors of them, between two ends: a check, which an annotation may contain.

    >>> Range(0, 1)("momentum", 1.0)
    Traceback (most recent call last):
    ...
    ValueError: momentum must be a number in [0, 1), got 1.0
    """

    def __init__(self, low: float, high: float = math.inf, ends: str = "[)") -> None:
        self.low, self.high, self.ends = low, high, ends

    def __repr__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf and self.ends[1] == ")":
            return f"a finite number {'>=' if self.ends[0] == '[' else '>'} {self.low:g}"
        return f"a number in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"

    def __call__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            require(name, value, value.is_floating_point(), "a floating-point tensor")
            per_run = value.dim() == 0 or value.shape[-1] == 1
            require(name, tuple(value.shape), per_run, "of shape (*runs, 1), one value for each run: use unsqueeze(-1)")
        else:
            require(name, value, isinstance(value, int | float) and not isinstance(value, bool), repr(self))
        above = value >= self.low if self.ends[0] == "[" else value > self.low
        below = value <= self.high if self.ends[1] == "]" else value < self.high
        require(name, value, above & below, repr(self))


class Integers(Range):
    """Integers from a lowest one on, Python's or numpy's."""

    def __repr__(self) -> str:
        return f"an integer >= {self.low}"

    def __call__(self, name: str, value: Any) -> None:
        require(name, value, is_count(value, self.low), repr(self))


Value = TypeVar("Value")
NonNegative = Annotated[Value, Range(0)]
Positive = Annotated[Value, Range(0, ends="()")]
AtLeastOne = Annotated[Value, Range(1)]
BelowOne = Annotated[Value, Range(0, 1)]
UpToOne = Annotated[Value, Range(0, 1, "[]")]
Finite = Annotated[Value, Range(-math.inf, ends="()")]
Count = Annotated[int, Integers(0)]
PositiveCount = Annotated[int, Integers(1)]


class Validated:
    """A dataclass whose annotations say what is valid, such as ``lr: NonNegative[Scalar]``, a Literal or a bool.

    A check stays if a subclass declares the field again without one.
    """

    def __post_init__(self) -> None:
        owner: Any = type(self)
        for name, (check, is_optional) in _checks(owner).items():
            if (value := getattr(self, name)) is not None or not is_optional:
                check(name, value)


Check = Callable[[str, Any], None]


@cache
def _checks(owner: type) -> dict[str, tuple[Check, bool]]:
    """For each field with a check: the check, and whether the field may be None."""
    found: dict[str, tuple[Check, bool]] = {}
    arguments = {field.name for field in dataclasses.fields(owner) if field.init}
    for base in reversed(owner.__mro__):
        for name, hint in inspect.get_annotations(base).items():
            hint = _evaluated(hint, base)
            check = _check_of(hint)
            if check is not None and name in arguments:
                found[name] = check, NoneType in get_args(hint)
    return found


def _evaluated(hint: Any, owner: type) -> Any:
    """An annotation, evaluated if it is a text; object, which has no check, if its names exist for checkers alone."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, getattr(sys.modules.get(owner.__module__), "__dict__", {}))
    except (NameError, AttributeError, TypeError):
        return object


def _check_of(hint: Any) -> Check | None:
    if hint is bool:
        return require_switch
    if get_origin(hint) is Literal:
        return partial(require_choice, choices=get_args(hint))
    for kind in (hint, *get_args(hint)):
        for check in getattr(kind, "__metadata__", ()):
            return check if Tensor in get_args(kind.__origin__) else partial(_require_plain, check)
    return None


def _require_plain(check: Range, name: str, value: Any) -> None:
    require(name, value, not isinstance(value, Tensor), repr(check))
    check(name, value)


def require_number(name: str, value: Scalar, *, low: float, strict: bool = False) -> None:
    """Require a finite number (or a tensor of them) with ``value >= low``, or ``> low`` when strict."""
    Range(low, ends="()" if strict else "[)")(name, value)


def is_count(value: Any, low: float = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= low  # type: ignore[operator]


def require_count(name: str, value: int, low: int = 0) -> None:
    Integers(low)(name, value)


def require_switch(name: str, value: bool) -> None:
    require(name, value, isinstance(value, bool), "True or False")


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
