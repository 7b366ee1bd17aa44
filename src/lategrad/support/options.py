"""Objects written as texts: one grammar for rules, constraint sets, delays, problems and schedules.

======================================  ============================================================================
``NAME``                                ``steady``, ``whole``, ``digits``
``NAME:VALUE,VALUE``                    ``ball:5``, ``box:-1,1``, ``lognormal:7,0.4``, ``sgd:0.1``
``NAME:OPTION=VALUE,OPTION=VALUE``      ``steady:lr=1,c=20``, ``ball:radius=5``, ``cluster:workers=50,slow=1x100``
``package.module:Class:...``            your own rule or problem: a class, or a function that returns the object
``path/to/file.py:Class:...``           the same, from a file
======================================  ============================================================================

NAME is a name of ``lategrad list``. The arguments are those of the class in Python: first values in their order, then
values by name. They are converted by the argument's annotation, or else by its default: numbers, words, ``true``,
``false``, ``none``. An argument may be a text of the same grammar, such as ``domain=box:0,1`` of a rule: a part without
``=`` that follows a named value belongs to it. A hyper-parameter of a rule may have several values, ``lr=0.1|1|10``:
a sweep, in which each value is a run. The texts of sets and delays, which a run's folder keeps, never load code.
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lategrad.support.validation import did_you_mean, require

Built = TypeVar("Built", covariant=True)
Self = TypeVar("Self", bound="Spec[Any]")

REQUIRED = inspect.Parameter.empty  # the default of an option that has none
_WORDS = {"true": True, "false": False}
_READABLE = (float, int, bool, str)


@dataclass(frozen=True)
class Option:
    """An argument that can be written as text."""

    name: str
    types: tuple[Any, ...] = ()  # those of its annotation, or of its default; none at all: anything
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    convert: Callable[[str], Any] | None = None  # reads the text instead, such as lategrad.parse_set

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def sweeps(self) -> bool:
        return Tensor in self.types

    def __str__(self) -> str:
        return self.name if self.required else f"{self.name}={as_text(self.default)}"

    def parse(self, text: str, owner: str) -> tuple[Any, ...]:
        """The value of a text, or the values of a sweep, ``0.1|1|10``; ``owner`` is for messages."""
        values = tuple(self._parse_one(part.strip(), owner) for part in text.split("|"))
        if len(values) > 1 and not self.sweeps:
            raise ValueError(f"{self.name} of {owner} takes one value, got {text!r}")
        return values

    def _parse_one(self, text: str, owner: str) -> Any:
        if self.convert is not None:
            return self.convert(text)
        readers = self._readers()
        for _, convert in readers:
            try:
                return convert(text)
            except (KeyError, ValueError):
                continue
        valid = " or ".join(valid for valid, _ in readers)
        raise ValueError(f"{self.name} of {owner} must be {valid}, got {text!r}{did_you_mean(text, self.choices)}")

    def _readers(self) -> list[tuple[str, Callable[[str], Any]]]:
        """Descriptions of what is valid and functions that read it; the first that can read a text does."""
        anything = not self.types
        readers: list[tuple[bool, str, Callable[[str], Any]]] = [
            (NoneType in self.types, "none", lambda text: {"none": None}[text.lower()]),
            (bool in self.types, "true or false", lambda text: _WORDS[text.lower()]),
            (bool(self.choices), "one of " + ", ".join(self.choices), {c: c for c in self.choices}.__getitem__),
            (int in self.types or type(self.default) is int or anything, "an integer", int),
            (float in self.types or anything, "a number", float),
            ((str in self.types and not self.choices) or anything, "a text", str),
        ]
        return [(valid, convert) for applies, valid, convert in readers if applies]


def as_text(value: Any) -> str:
    """A value as it would be written: 30 for 30.0, true for True."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_of(make: Callable[..., Any]) -> dict[str, Option]:
    """The arguments of a class or a function that can be written as text, in their order.

    >>> import lategrad as lg
    >>> [str(option) for option in options_of(lg.Steady).values()]
    ['lr=1', 'c=30', 'per_coordinate=false', 'weight_decay=0']
    """
    annotated = make.__init__ if isinstance(make, type) and not dataclasses.is_dataclass(make) else make  # type: ignore[misc]
    try:
        hints = get_type_hints(annotated)
    except NameError:  # a name that only type checkers import: the defaults must tell then
        hints = {}
    named = [p for p in inspect.signature(make).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = (_option(p.name, hints.get(p.name), p.default) for p in named)
    return {option.name: option for option in options if option is not None}


def _option(name: str, hint: Any, default: Any) -> Option | None:
    if hint is None:
        if default is REQUIRED or default is None:
            return Option(name, (), default)
        return Option(name, (type(default),), default) if type(default) in _READABLE else None
    members = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
    choices = tuple(c for member in members if get_origin(member) is Literal for c in get_args(member))
    types = tuple(type(c) for c in choices) + tuple(m for m in members if get_origin(m) is not Literal)
    return Option(name, types, default, tuple(map(str, choices))) if set(types) & set(_READABLE) else None


def parse_options(text: str, options: Mapping[str, Option], owner: str) -> dict[str, tuple[Any, ...]]:
    """The values of ``0.1|1,power=2``: without a name in the order of the options, then by name.

    >>> import lategrad as lg
    >>> parse_options("0.1|1,c=20", options_of(lg.Steady), "Steady")
    {'lr': (0.1, 1.0), 'c': (20.0,)}
    """
    pairs: list[tuple[str, str]] = []
    named = False
    for position, part in enumerate(text.split(",") if text.strip() else []):
        name, equals, value = part.partition("=")
        if equals:
            named = True
            pairs.append((name.strip(), value.strip()))
        elif named:  # a comma of the value before, as in domain=box:0,1
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part.strip()}")
        elif position < len(options):
            pairs.append((list(options)[position], part.strip()))
        else:
            most = f"{len(options)} value{'' if len(options) == 1 else 's'}"
            raise ValueError(f"{owner} takes at most {most}, got {text!r}; its options: {_shown(options)}")
    values: dict[str, tuple[Any, ...]] = {}
    for name, value in pairs:
        if name not in options:
            meant = did_you_mean(name, options)
            raise ValueError(f"{owner} has no option {name!r}{meant}; its options: {_shown(options)}")
        if name in values:
            raise ValueError(f"{name} of {owner} is given twice in {text!r}")
        values[name] = options[name].parse(value, owner)
    return values


def _shown(options: Mapping[str, Option]) -> str:
    return ", ".join(map(str, options.values())) or "none"


@dataclass(frozen=True)
class Entry(Generic[Built]):
    """What a name stands for."""

    summary: str
    make: Callable[..., Built]  # takes the options by name
    options: Mapping[str, Option]
    form: str = ""  # how it is written, where it is not NAME:OPTION=VALUE
    whole: bool = False  # whether its one option is all of the text, commas included

    @property
    def parameter(self) -> str:
        return next(iter(self.options), "")


def entry_of(summary: str, make: Callable[..., Built], form: str = "", **defaults: Any) -> Entry[Built]:
    """An entry with the options of a class, some with another default."""
    options = {name: replace(option, default=defaults.get(name, option.default))
               for name, option in options_of(make).items()}  # fmt: skip
    return Entry(summary, partial(make, **defaults), options, form)


@dataclass(frozen=True)
class Spec(Generic[Built]):
    """A text that has been read: the entry that it names, and the values of its options, several for a sweep."""

    kind: str
    name: str
    entry: Entry[Built]
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def swept(self) -> list[str]:
        """The options with several values, in the order of the axes that they make."""
        return [name for name, values in self.values.items() if len(values) > 1]

    def with_option(self: Self, name: str, *values: Any) -> Self:
        return replace(self, values={**self.values, name: values})

    def build(self, **more: Any) -> Built:
        """The object; ``more`` are values of options that the text leaves open (None: none). A sweep makes tensors."""
        owner, more = f"{self.kind} {self.name!r}", {name: value for name, value in more.items() if value is not None}
        takes = inspect.signature(self.entry.make).parameters.values()
        for name, value in more.items():
            require(name, value, name not in self.values, f"None: {owner} has its own")
        values = {**{name: self._value(name) for name in self.values}, **more}
        for name, value in values.items():
            known = any(p.name == name or p.kind is p.VAR_KEYWORD for p in takes)
            require(name, value, known, f"None: {owner} takes no {name}")
        missing = [name for name, option in self.entry.options.items() if option.required and name not in values]
        if missing:
            form = self.entry.form or f"{self.name}:{','.join(f'{name}=VALUE' for name in missing)}"
            raise ValueError(f"{owner} needs {' and '.join(missing)}: write {form}")
        with _as_one_line(owner):
            return self.entry.make(**values)

    def _value(self, name: str) -> Any:
        values = self.values[name]
        if len(values) == 1:
            return values[0]
        after = len(self.swept) - self.swept.index(name)
        return torch.tensor(values, dtype=torch.float64).view(-1, *[1] * after)


def read_spec(
    text: str, kind: str, table: Mapping[str, Entry[Built]], more: Mapping[str, Option] | None = None, *,
    own_code: bool = True,
) -> Spec[Built]:  # fmt: skip
    """Read a text of the grammar above: a ``kind`` of the table or, with ``own_code``, of the user's own.

    ``more`` are options that all entries of the table take.
    """
    name, _, arguments = (part.strip() for part in text.partition(":"))
    own = None if name in table or not own_code else own_target(text)
    if own is not None:
        name, arguments = f"{own[0]}:{own[1]}", own[2]
        make = load_object(own[0], own[1])
        require(kind, name, callable(make), f"a class, or a function that makes a {kind}")
        entry: Entry[Any] = entry_of((make.__doc__ or "").strip().partition("\n")[0], make)
    elif name in table:
        entry = table[name]
    else:
        whole = not (own_code and name.endswith(".py"))
        require(kind, name, whole, f"FILE.py:NAME, with a class of that file, to be a {kind} of one's own")
        forms = ", ".join(entry.form or name for name, entry in table.items())
        raise ValueError(f"unknown {kind} {name!r}{did_you_mean(name, table)}; valid: {forms}")
    owner = f"{kind} {name!r}"
    if entry.whole:
        values = {entry.parameter: entry.options[entry.parameter].parse(arguments, owner)} if arguments else {}
    else:
        values = parse_options(arguments, {**entry.options, **(more or {})}, owner)
    return Spec(kind, name, entry, values)


def parse_spec(text: str, kind: str, table: Mapping[str, Entry[Built]]) -> Built:
    """The object that a text names, which is one of the table's."""
    return read_spec(text, kind, table, own_code=False).build()


def own_target(text: str) -> tuple[str, str, str] | None:
    """``package.module:Name`` or ``path/to/file.py:Name``, with ``:options`` after it or not, in its three parts.

    >>> own_target("my.rules:Mine:lr=0.1,k=3"), own_target("steady:lr=1")
    (('my.rules', 'Mine', 'lr=0.1,k=3'), None)
    """
    module, _, rest = text.partition(":")
    name, _, options = rest.partition(":")
    return (module, name, options) if module and name.isidentifier() else None


@contextmanager
def _as_one_line(what: str) -> Iterator[None]:
    """Code of users may raise anything, and torch writes pages."""
    try:
        yield
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{str(error).partition(chr(10))[0]}") from error


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
    with _as_one_line(repr(module)):
        loaded = importlib.import_module(imported)
    if module.endswith(".py") and Path(loaded.__file__ or "").resolve() != path:
        raise ImportError(f"{module!r} cannot be loaded: Python has another module {imported!r}; rename the file")
    if not hasattr(loaded, name):
        public = [n for n in vars(loaded) if not n.startswith("_")]
        raise ValueError(f"{module!r} has no {name!r}{did_you_mean(name, public)}")
    return getattr(loaded, name)
