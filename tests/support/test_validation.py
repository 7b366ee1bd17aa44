"""Annotations that say what is valid: each of them refuses what is outside, and names the field and its value."""

import importlib
import inspect
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

import numpy as np
import pytest
import torch

import lategrad as lg
from lategrad.registry import LEARNERS, RULES
from lategrad.support.validation import (
    BelowOne,
    Count,
    Finite,
    NonNegative,
    Positive,
    PositiveCount,
    Range,
    Scalar,
    UpToOne,
    Validated,
)


@dataclass(frozen=True)
class Example(Validated):
    lr: NonNegative[Scalar] = 0.0
    scale: Positive[float] = 1.0
    momentum: BelowOne[Scalar] = 0.0
    share: UpToOne[float] = 1.0
    shift: Finite[float] = -3.0
    pause: Annotated[float, Range(0, math.inf, "[]")] = math.inf
    updates: Count = 0
    workers: PositiveCount | None = None
    average: Literal["none", "uniform"] = "none"
    ahead: bool = False


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("lr", -1e-30, "a finite number >= 0"),
        ("lr", math.inf, "a finite number >= 0"),
        ("lr", math.nan, "a finite number >= 0"),
        ("lr", True, "a finite number >= 0"),
        ("lr", None, "a finite number >= 0"),
        ("lr", "1", "a finite number >= 0"),
        ("lr", torch.tensor([[1.0], [math.nan]]), "a finite number >= 0"),
        ("lr", torch.tensor([1]), "a floating-point tensor"),
        ("lr", torch.ones(3), "of shape (*runs, 1)"),
        ("scale", 0, "a finite number > 0"),
        ("momentum", 1.0, "a number in [0, 1)"),
        ("momentum", torch.tensor([[0.5], [1.0]]), "a number in [0, 1)"),
        ("share", 1.001, "a number in [0, 1]"),
        ("shift", -math.inf, "a finite number"),
        ("scale", torch.tensor(1.0), "a finite number > 0"),
        ("pause", -1.0, "a number in [0, inf]"),
        ("pause", math.nan, "a number in [0, inf]"),
        ("updates", 1.0, "an integer >= 0"),
        ("updates", False, "an integer >= 0"),
        ("workers", 0, "an integer >= 1"),
        ("average", "unifrom", "one of 'none', 'uniform', got 'unifrom'; did you mean 'uniform'?"),
        ("ahead", 1, "True or False"),
    ],
)
def test_a_value_outside_is_refused_by_name(field, value, valid):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Example(**{field: value})
    assert str(refused.value).startswith(f"{field} must be {valid}")


def test_values_at_the_ends_are_taken():
    Example(lr=0, momentum=torch.zeros(2, 1), share=0, updates=np.int64(7), workers=np.int32(1), average="uniform")
    Example(lr=torch.tensor(0.5), share=1, shift=1e300, pause=0.0, ahead=True)


@pytest.mark.parametrize("name", [*RULES, *LEARNERS])
def test_every_rule_and_learner_checks_its_numbers_and_its_set(name):
    entry = {**RULES, **LEARNERS}[name]
    one = entry.make(**{entry.parameter: 0.5})
    part = getattr(one, "learner", one)
    assert isinstance(replace(part, domain="ball:3").domain, lg.Ball)
    assert isinstance(replace(part, domain=None).domain, lg.WholeSpace)
    for field in fields(part):
        if isinstance(getattr(part, field.name), bool):
            bad = 1
        elif isinstance(getattr(part, field.name), float | int | str):
            bad = -1.0
        else:
            continue
        with pytest.raises(ValueError, match=f"^{field.name} must be"):
            replace(part, **{field.name: bad})


USERS_RULES = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
import lategrad as lg
from lategrad.support.validation import Positive
if TYPE_CHECKING:
    from collections.abc import Callable

@dataclass(frozen=True, eq=False)
class Mine(lg.SGD):
    lr: float = 0.5
    scale: Positive[float] = 1.0
    hook: Callable[[int], int] | None = None
    is_on: bool = field(init=False)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "is_on", True)

class Plain(lg.SGD):
    cache: Callable
"""


def test_rules_of_users_may_have_annotations_of_any_kind(tmp_path, monkeypatch):
    (tmp_path / "users_rules.py").write_text(USERS_RULES)
    monkeypatch.syspath_prepend(tmp_path)
    users_rules = importlib.import_module("users_rules")
    assert users_rules.Mine(hook=abs).is_on
    assert users_rules.Plain(0.1).lr == 0.1
    with pytest.raises(ValueError, match="^lr must be a finite number >= 0"):  # declared again, without its check
        users_rules.Mine(lr=-1.0)
    with pytest.raises(ValueError, match="^scale must be a finite number > 0"):
        users_rules.Mine(scale=0.0)
    with pytest.raises(ValueError, match="^weight_decay must be"):
        users_rules.Plain(0.1, weight_decay=-1.0)


def test_a_signature_says_what_is_valid():
    assert "a finite number >= 0" in str(inspect.signature(lg.SGD))
