"""Options of classes and functions, read off their signatures and written as texts such as ``lr=0.1|1,power=2``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from lategrad.support.validation import did_you_mean

REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""

_WORDS = {"true": True, "false": False}
_READABLE = (float, int, bool, str)


@dataclass(frozen=True)
class Option:
    """One hyper-parameter that can be written as text."""

    name: str
    types: tuple[Any, ...]
    """Those of its annotation, or of its default; none at all: anything."""
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is REQUIRED

    @property
    def sweeps(self) -> bool:
        """Whether it may have a value for each run."""
        return Tensor in self.types

    def __str__(self) -> str:
        return self.name if self.required else f"{self.name}={as_text(self.default)}"

    def parse(self, text: str, owner: str) -> tuple[Any, ...]:
        """The value that a text gives it, or the values, ``0.1|1|10``; ``owner`` is whose option messages say it is."""
        values = tuple(self._parse_one(part.strip(), owner) for part in text.split("|"))
        if len(values) > 1 and not self.sweeps:
            raise ValueError(f"{self.name} of {owner} takes one value, got {text!r}")
        return values

    def _parse_one(self, text: str, owner: str) -> Any:
        readers = self._readers()
        for _, convert in readers:
            try:
                return convert(text)
            except (KeyError, ValueError):
                continue
        valid = " or ".join(valid for valid, _ in readers)
        raise ValueError(f"{self.name} of {owner} must be {valid}, got {text!r}")

    def _readers(self) -> list[tuple[str, Callable[[str], Any]]]:
        """What may be written, in words, and how it is read; the first that can read a text does."""
        readers: list[tuple[str, Callable[[str], Any]]] = []
        if NoneType in self.types:
            readers.append(("none", lambda text: {"none": None}[text.lower()]))
        if bool in self.types:
            readers.append(("true or false", lambda text: _WORDS[text.lower()]))
        if self.choices:
            readers.append(("one of " + ", ".join(self.choices), {c: c for c in self.choices}.__getitem__))
        if int in self.types or type(self.default) is int or not self.types:
            readers.append(("an integer", int))
        if float in self.types or not self.types:
            readers.append(("a number", float))
        if (str in self.types and not self.choices) or not self.types:
            readers.append(("a text", str))
        return readers


def as_text(value: Any) -> str:
    """A value as it would be written: 30 for 30.0, true for True."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_of(make: Callable[..., Any]) -> dict[str, Option]:
    """The options of a class or a function that can be written as text, in their order.

    >>> import lategrad as lg
    >>> [str(option) for option in options_of(lg.Steady).values()]
    ['lr=1', 'c=30', 'per_coordinate=false', 'weight_decay=0']
    """
    options = {}
    hints = _hints(make)
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        option = _option(name, hints.get(name), parameter.default)
        if option is not None:
            options[name] = option
    return options


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    annotated = make.__init__ if isinstance(make, type) and not dataclasses.is_dataclass(make) else make  # type: ignore[misc]
    try:
        return get_type_hints(annotated)
    except NameError:  # a name that only type checkers import: the defaults must tell then
        return {}


def _option(name: str, hint: Any, default: Any) -> Option | None:
    if hint is None:
        known = default is not REQUIRED and default is not None
        return Option(name, (type(default),) if known else (), default) if not known or _simple(default) else None
    members = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
    choices = tuple(c for member in members if get_origin(member) is Literal for c in get_args(member))
    types = tuple(type(c) for c in choices) + tuple(m for m in members if get_origin(m) is not Literal)
    return Option(name, types, default, tuple(map(str, choices))) if set(types) & set(_READABLE) else None


def _simple(value: Any) -> bool:
    return type(value) in _READABLE


def parse_options(text: str, options: Mapping[str, Option], owner: str) -> dict[str, tuple[Any, ...]]:
    """The values that ``lr=0.1|1,power=2`` gives; a part without ``=`` belongs to the value before it.

    >>> import lategrad as lg
    >>> parse_options("lr=0.1|1,c=20", options_of(lg.Steady), "Steady")
    {'lr': (0.1, 1.0), 'c': (20.0,)}
    """
    given: dict[str, tuple[Any, ...]] = {}
    for name, value in split_options(text, owner):
        if name not in options:
            valid = ", ".join(map(str, options.values())) or "none"
            raise ValueError(f"{owner} has no option {name!r}{did_you_mean(name, options)}; its options: {valid}")
        if name in given:
            raise ValueError(f"{name} of {owner} is given twice in {text!r}")
        given[name] = options[name].parse(value, owner)
    return given


def split_options(text: str, owner: str) -> list[tuple[str, str]]:
    """Pairs of names and texts: ``box:0,1`` has a comma of its own.

    >>> split_options("lr=1,domain=box:0,1", "steady")
    [('lr', '1'), ('domain', 'box:0,1')]
    """
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text else []:
        name, equals, value = part.partition("=")
        if equals:
            pairs.append((name.strip(), value.strip()))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part.strip()}")
        else:
            raise ValueError(f"the options of {owner} are written NAME=VALUE,NAME=VALUE, got {text!r}")
    return pairs


def own_target(text: str) -> tuple[str, str, str] | None:
    """``package.module:Name`` or ``path/to/file.py:Name``, with ``:options`` after it or not, in its three parts.

    >>> own_target("my.rules:Mine:lr=0.1,k=3"), own_target("steady:lr=1")
    (('my.rules', 'Mine', 'lr=0.1,k=3'), None)
    """
    module, _, rest = text.partition(":")
    name, _, options = rest.partition(":")
    return (module, name, options) if module and name.isidentifier() else None


def load_object(module: str, name: str) -> Any:
    """A class or function of the user's own, from a module that Python finds or from a file.

    The current folder, or the file's, joins Python's path: worker processes then find the module, too.
    """
    folder, imported = os.getcwd(), module
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {module!r}: check the path")
        folder, imported = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = importlib.import_module(imported)
    if module.endswith(".py") and Path(loaded.__file__ or "").resolve() != path:
        raise ImportError(f"{module!r} cannot be loaded: Python has another module {imported!r}; rename the file")
    if not hasattr(loaded, name):
        public = [n for n in vars(loaded) if not n.startswith("_")]
        raise ValueError(f"{module!r} has no {name!r}{did_you_mean(name, public)}")
    return getattr(loaded, name)
