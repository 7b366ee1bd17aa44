"""Sets as texts such as ``ball:5``, which every rule and learner of the library takes for its domain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lategrad.sets import Ball, Box, ConvexSet, L1Ball, Simplex, WholeSpace
from lategrad.support.validation import did_you_mean


@dataclass(frozen=True)
class SetEntry:
    """A convex set written as ``name:numbers``."""

    summary: str
    form: str
    counts: tuple[int, ...]
    """How many numbers the form takes."""
    build: Callable[..., ConvexSet]


SETS: dict[str, SetEntry] = {
    "whole": SetEntry("no constraint", "whole", (0,), WholeSpace),
    "ball": SetEntry("Euclidean ball around the origin", "ball:RADIUS", (1,), Ball),
    "box": SetEntry("the same bounds for every coordinate", "box:LOW,HIGH", (2,), Box),
    "simplex": SetEntry("non-negative, with a given sum", "simplex or simplex:TOTAL", (0, 1), Simplex),
    "l1": SetEntry("l1 ball around the origin", "l1:RADIUS", (1,), L1Ball),
}


def parse_set(spec: str) -> ConvexSet:
    """The set that a specification such as ``ball:5`` names.

    >>> parse_set("ball:5")
    Ball(radius=5.0, center=None)
    >>> parse_set("cube:1")
    Traceback (most recent call last):
    ...
    ValueError: unknown set 'cube:1'; valid: whole, ball:RADIUS, box:LOW,HIGH, simplex or simplex:TOTAL, l1:RADIUS
    """
    name, _, rest = spec.partition(":")
    forms = ", ".join(entry.form for entry in SETS.values())
    try:
        numbers = [float(number) for number in rest.split(",")] if rest else []
    except ValueError:
        raise ValueError(f"set {spec!r} has a part that is not a number; valid: {forms}") from None
    if name not in SETS or len(numbers) not in SETS[name].counts:
        raise ValueError(f"unknown set {spec!r}{did_you_mean(name, SETS)}; valid: {forms}")
    return SETS[name].build(*numbers)


def as_set(domain: ConvexSet | str | None) -> ConvexSet:
    """A set from what users write: a set, a text such as ``ball:5``, or None for no constraint."""
    if isinstance(domain, str):
        return parse_set(domain)
    return WholeSpace() if domain is None else domain


class _Domain:
    """A field of a frozen dataclass that is written once, when an object is made; a text becomes the set it names."""

    def __set__(self, owner: object, value: ConvexSet | str | None) -> None:
        owner.__dict__["domain"] = as_set(value)


def take_texts(names: Mapping[str, Any]) -> None:
    """Let all rules and learners among these classes take their ``domain`` as a text.

    >>> import lategrad as lg
    >>> lg.Steady(lr=1.0, domain="ball:5").domain
    Ball(radius=5.0, center=None)
    """
    for made in list(names.values()):
        if isinstance(made, type) and "domain" in {f.name for f in _fields(made)}:
            type.__setattr__(made, "domain", _Domain())  # not in the class body: fields have their defaults by now


def _fields(made: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
