"""Measure what a rule costs: the vectors that it keeps, those sent with a query, and its passes over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from lategrad.execution import UnsupportedError
from lategrad.execution.codegen.run import update_loops
from lategrad.execution.codegen.staged import StagedLoops
from lategrad.rules import Blocks
from lategrad.rules.rule import AnyRule, apply_update, first_state, issue_ticket, needs_ticket
from lategrad.support.runs import tensors

_SIDE = 64
_SIZE = _SIDE * _SIDE  # of the vector that costs are measured on: one square matrix, for rules that look for them
START = torch.zeros(_SIZE)
"""Where measured rules start."""


@dataclass(frozen=True)
class Cost:
    """Of one update, on float32 parameters."""

    vectors: float
    """What the state holds, in vectors as long and as wide as the parameters; a float64 vector counts twice."""
    ticket: float
    """What is sent with a query besides the query itself, in the same vectors."""
    passes: int | None
    """How often an update goes over the vectors; None where it is not made of loops over them."""
    products: int = 0
    """Products of a matrix with one of its size, for every matrix."""

    def sentence(self) -> str:
        """In words.

        >>> Cost(vectors=2, ticket=1, passes=2).sentence()
        'a state of 2 vectors; 1 vector sent with each query; 2 passes over them for an update.'
        """
        parts = [f"a state of {count(self.vectors)}"]
        if self.ticket:
            parts.append(f"{count(self.ticket)} sent with each query")
        if self.passes is not None:
            parts.append(f"{self.passes} pass{'es' * (self.passes > 1)} over them for an update")
        else:
            parts.append("passes as torch compiles them")
        if self.products:
            parts.append(f"{self.products} products of square matrices for each square matrix")
        return "; ".join(parts) + "."


def count(vectors: float) -> str:
    """A number of vectors in words."""
    return f"{vectors:g} vector{'s' * (vectors != 1)}"


def _width(parts: list[torch.Tensor]) -> float:
    """Bytes for each parameter, in float32; single numbers vanish in the rounding."""
    return round(sum(part.numel() * part.element_size() for part in parts) / (4 * _SIZE), 1)


def with_matrix(rule: AnyRule[Any]) -> AnyRule[Any]:
    """The rule, told that its vector is a square matrix if it wants to know."""
    if not hasattr(rule, "blocks"):
        return rule
    blocks = Blocks.of_module(torch.nn.Linear(_SIDE, _SIDE, bias=False))
    return cast("AnyRule[Any]", replace(rule, blocks=blocks))  # type: ignore[type-var]


def cost(rule: AnyRule[Any]) -> Cost:
    """Measured on a state of the rule, and on the loops that it is compiled to."""
    state = first_state(rule, START)
    ticket = issue_ticket(rule, state)
    try:
        loops = update_loops(rule, state, torch.float32, [_SIZE], torch.device("cpu"),
                             ticket=ticket if needs_ticket(rule) else None, query_dtype=torch.float32)  # fmt: skip
        passes = 2 if isinstance(loops, StagedLoops) else sum(sums is not None for sums in loops.source.stages)
    except UnsupportedError:
        passes = None
    with FlopCounterMode(display=False) as counted:
        apply_update(rule, state, torch.ones(_SIZE), torch.tensor(0), ticket)
    return Cost(_width(tensors(state)), _width([ticket]), passes, counted.get_total_flops() // (2 * _SIDE**3))
