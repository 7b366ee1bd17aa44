"""DANA-Slim (Hakimi et al. 2019): every worker keeps its own momentum, and looks ahead along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.validation import Scalar, require_number, require_share


class DANASlimState(NamedTuple):
    """State of :class:`DANASlim`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    velocity: Tensor
    """:math:`v_i` of the worker i whose gradient came last."""


@dataclass(frozen=True, eq=False)
class DANASlim:
    r"""DANA-Slim: Nesterov momentum at the workers, plain SGD at the server.

    .. math:: v_i \leftarrow \gamma v_i + g, \qquad x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(\gamma v_i + g)\big)

    with i the worker that sends g. A worker that has handed in its gradient is given the next query: its momentum
    travels with the query, as the ticket. At a constant delay :math:`\tau` that is exactly :math:`\tau + 1` workers
    in turn, each from rest; without delay it is SGD with Nesterov momentum. Where delays are random, a query that
    several gradients are computed at lends its momentum to all of them. The projection is ours and outside its
    theory.

    Args:
        lr: the step.
        domain: K.
        momentum: :math:`\gamma`, the authors' 0.9.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.DANASlim(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> at_rest = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), at_rest)
    >>> rule.output(rule.update(state, torch.tensor([1.0]), torch.tensor(1), at_rest))  # 1.9 each
    tensor([-3.8000])

    Must know: the momentum of the worker that sends the gradient, its ticket; not the delay.

    Guarantee: none that we know of under delay.

    Reference: I. Hakimi, S. Barkai, M. Gabel and A. Schuster, Taming momentum in a distributed asynchronous
    environment, 2019.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    momentum: float = 0.9

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_share("momentum", self.momentum)

    def init(self, x0: Tensor) -> DANASlimState:
        """Start at the projection of ``x0``, at rest."""
        x = first_query(self, x0)
        return DANASlimState(x=x, velocity=torch.zeros_like(x))

    def query(self, state: DANASlimState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: DANASlimState) -> Tensor:
        """The momentum of the worker that gets the query."""
        return state.velocity

    def update(self, state: DANASlimState, grad: Tensor, delay: Delay, ticket: Tensor) -> DANASlimState:
        """One projected step of what the worker sends."""
        velocity = self.momentum * ticket + grad
        sent = self.momentum * velocity + grad
        return DANASlimState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * sent), velocity=velocity)

    def output(self, state: DANASlimState) -> Tensor:
        """The last iterate."""
        return state.x
