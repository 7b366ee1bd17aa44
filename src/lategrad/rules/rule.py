r"""The contract of a server rule.

The server counts its updates t = 1, 2, ... Before update t it hands out the query point :math:`x_t`.
Update t receives one gradient, taken at an earlier query :math:`x_{t - \tau_t}`, and returns the next state:

======  ==========================================================================================
query   :math:`x_t`, the point at which the next worker computes its gradient
update  consumes one gradient and its delay :math:`\tau_t`, returns the next state
output  the weights that are evaluated, saved and shipped; not always the query
ticket  only for rules that need the past: data sent with the query and returned with the gradient
weigh   only for rules that weigh gradients by the local steps behind them: writes the weight into the ticket
======  ==========================================================================================

A host treats all rules alike: it calls :func:`issue_ticket` when it hands out a query and :func:`apply_update` when
the gradient returns; where workers take different numbers of local steps, with the ticket of :func:`weigh_ticket`.

Vectors have shape ``(*runs, d)``, scalars ``(*runs, 1)``. Rules are pure: the host of a rule owns the
memory (:mod:`lategrad.execution`). Nothing in a rule may branch on the value of a tensor.
"""

from typing import Literal, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

from lategrad.sets import ConvexSet
from lategrad.support.runs import owned, require_state, runs_shape, spread
from lategrad.support.validation import Scalar

__all__ = ["AnyRule", "Rule", "TicketRule", "WeighingRule", "apply_update", "as_number", "first_query", "first_state",
           "issue_ticket", "needs_ticket", "weigh_ticket"]  # fmt: skip

State = TypeVar("State")

Delay = Tensor | int
"""The number of updates since the gradient's query was handed out: one for all runs, one for each, or ``(*runs,
blocks)``, one for each block of a rule that has ``delay_blocks``."""


class _Server(Protocol[State]):
    """Members of every server rule: a frozen dataclass of hyper-parameters, whose state is a separate object."""

    @property
    def domain(self) -> ConvexSet:
        """The constraint set, which contains every query and every output."""

    def init(self, x0: Tensor) -> State:
        """The state before any update; the first query is the projection of ``x0``."""

    def query(self, state: State) -> Tensor:
        """The point at which the next worker computes its gradient."""

    def output(self, state: State) -> Tensor:
        """The current result; before any update, the start."""


class Rule(_Server[State], Protocol[State]):
    """A server rule that needs a gradient and, at most, its delay."""

    def update(self, state: State, grad: Tensor, delay: Delay) -> State:
        """Consume one gradient; ``delay`` counts the updates since its point was the query (at most t - 1)."""


class TicketRule(_Server[State], Protocol[State]):
    """A server rule that needs data from the moment at which the gradient's query was handed out."""

    def ticket(self, state: State) -> Tensor:
        """The data to send with the query of this state, shape ``(*runs, k)``; like the query it may share memory."""

    def update(self, state: State, grad: Tensor, delay: Delay, ticket: Tensor) -> State:
        """Consume one gradient, with the ticket of the query that it was computed at."""


class WeighingRule(TicketRule[State], Protocol[State]):
    """A server rule that weighs gradients by the local steps behind them; its tickets hold the weight."""

    def weigh(self, ticket: Tensor, weight: Tensor) -> Tensor:
        """The ticket of a gradient of this weight, of shape ``(*runs, 1)``; as it was issued, it has weight 1."""


AnyRule = Rule[State] | TicketRule[State]


def needs_ticket(rule: AnyRule[State]) -> TypeGuard[TicketRule[State]]:
    """Whether the rule's update takes a ticket."""
    return hasattr(rule, "ticket")


def issue_ticket(rule: AnyRule[State], state: State) -> Tensor:
    """What to keep with the query of ``state`` until its gradient returns: a ticket, or nothing (k = 0).

    A ticket may share memory with the state, as a query may: a host that overwrites its state keeps a copy.

    >>> import torch, lategrad as lg
    >>> rule = lg.SGD(lr=0.1)
    >>> issue_ticket(rule, rule.init(torch.zeros(3, 5))).shape
    torch.Size([3, 0])
    """
    return rule.ticket(state) if needs_ticket(rule) else rule.query(state)[..., :0]


def weigh_ticket(rule: AnyRule[State], ticket: Tensor, weight: Tensor) -> Tensor:
    """The ticket of a gradient with a weight below 1, for rules that use weights.

    Args:
        rule: a rule without a method ``weigh`` leaves the ticket as it is.
        ticket: as it was issued.
        weight: the share of a job's local steps that the worker took, in (0, 1], ``(*runs, 1)``.
    """
    return cast("WeighingRule[State]", rule).weigh(ticket, weight) if hasattr(rule, "weigh") else ticket


def apply_update(rule: AnyRule[State], state: State, grad: Tensor, delay: Delay, ticket: Tensor) -> State:
    """The rule's update, with the ticket that was issued with the gradient's query."""
    try:
        if needs_ticket(rule):
            return rule.update(state, grad, delay, ticket)
        return cast("Rule[State]", rule).update(state, grad, delay)
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise ValueError(f"the update of {type(rule).__name__} branches on a tensor, as `if delay > 3` does, but there "
                         "is a delay for each run: write torch.where(delay > 3, ..., ...)") from error  # fmt: skip


def first_query(rule: _Server[State], x0: Tensor) -> Tensor:
    """:math:`x_1`: the start, projected, with a row for every run of the rule."""
    return rule.domain.project(spread(rule, x0))


def first_state(rule: _Server[State], x0: Tensor) -> State:
    """The state before any update, with memory of its own, as every host starts with it.

    Raises a ValueError for a state that hosts cannot keep (``lategrad.support.runs.require_state``), and for
    one whose query is not as long as the start, with a row for every run of the rule.
    """
    state = rule.init(x0)
    require_state(state, type(rule).__name__)
    require_query(rule, state, x0)
    return owned(state)


def require_query(rule: _Server[State], state: State, x0: Tensor) -> None:
    """Raise unless the query is as long as the start, with a row for every run of the rule."""
    shape = torch.Size((*torch.broadcast_shapes(x0.shape[:-1], runs_shape(rule)), x0.shape[-1]))
    if (got := rule.query(state).shape) != shape:
        raise ValueError(f"the query of {type(rule).__name__} must have shape {tuple(shape)}, got {tuple(got)}: begin "
                         f"its init with first_query(self, x0), which makes a row for each value of a hyper-parameter, "
                         f"or run it with one value at a time")  # fmt: skip


def average_in(mean: Tensor, point: Tensor, share: Tensor) -> Tensor:
    """The running average after ``point`` has joined with ``share`` of the total weight."""
    return mean + share.to(mean.dtype) * (point - mean)


Average = Literal["none", "uniform", "linear"]
"""Outputs of a rule: its last iterate, or the average of its queries with weights 1 or t."""


def start_mean(x: Tensor, average: str) -> Tensor:
    """The average before any update: the start; without averaging an empty tensor, which costs nothing."""
    return (x[..., :0] if average == "none" else x).clone()


def next_mean(mean: Tensor, query: Tensor, t: Tensor, average: str) -> Tensor:
    """The average of the queries :math:`x_1, \\dots, x_t`, given that of one fewer."""
    if average == "none":
        return mean
    return average_in(mean, query, 1 / t if average == "uniform" else 2 / (t + 1))


def as_dtype(value: Scalar, like: Tensor) -> Scalar:
    """A hyper-parameter to multiply ``like`` with: in its dtype, so that the product keeps it."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def as_number(delay: Delay) -> Tensor:
    """A delay to calculate with, in float64."""
    return torch.as_tensor(delay, dtype=torch.float64)
