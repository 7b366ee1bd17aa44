r"""The contract of a server rule.

The server counts its updates t = 1, 2, ... Before update t it hands out the query point :math:`x_t`.
Update t receives one gradient, taken at an earlier query :math:`x_{t - \tau_t}`, and moves on:

======  ==========================================================================================
query   :math:`x_t`, the point that the next worker computes its gradient at
update  consumes one gradient and its delay :math:`\tau_t`, returns the next state
output  what is evaluated, saved and shipped; not always the query, and never a mode of it
======  ==========================================================================================

Vectors have shape ``(*runs, d)``, scalars ``(*runs, 1)``. Rules are pure: whoever hosts a rule owns the
memory (:mod:`lategrad.inplace`). Nothing in a rule may branch on the value of a tensor.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from lategrad.runs import spread
from lategrad.sets import ConvexSet

State = TypeVar("State")


class Rule(Protocol[State]):
    """A server rule: hyper-parameters in a frozen dataclass, all that changes in its state."""

    @property
    def domain(self) -> ConvexSet:
        """The set that every query and every output is in."""
        ...

    def init(self, x0: Tensor) -> State:
        """The state before any update; the first query is the projection of ``x0``."""
        ...

    def query(self, state: State) -> Tensor:
        """The point that the next worker gets."""
        ...

    def update(self, state: State, grad: Tensor, delay: Tensor) -> State:
        """Consume one gradient; ``delay`` counts the updates since its point was the query."""
        ...

    def output(self, state: State) -> Tensor:
        """The rule's answer so far; before any update, the start."""
        ...


def first_query(rule: Rule[State], x0: Tensor) -> Tensor:
    """:math:`x_1`: the start, projected, with a row for every run of the rule."""
    return rule.domain.project(spread(rule, x0))


def average_in(mean: Tensor, point: Tensor, share: Tensor) -> Tensor:
    """The running average after ``point`` has joined with ``share`` of the total weight."""
    return mean + share.to(mean.dtype) * (point - mean)
