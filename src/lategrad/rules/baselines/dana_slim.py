"""DANA-Slim (Hakimi et al. 2019): every worker keeps its own momentum, and looks ahead along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.validation import Scalar, require_number, require_share


class DANASlimState(NamedTuple):
    """State of :class:`DANASlim`."""

    x: Tensor  # x_{t+1}, the iterate
    velocity: Tensor  # v_i of the worker i whose gradient came last


@dataclass(frozen=True, eq=False)
class DANASlim(LastIterate):
    r"""DANA-Slim: Nesterov momentum at the workers, plain SGD at the server.

    .. math:: v_i \leftarrow \gamma v_i + g, \qquad x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(\gamma v_i + g)\big)

    with i the worker that sends g. A worker that has handed in its gradient is given the next query: its momentum
    travels with the query, as the ticket. At a constant delay :math:`\tau` that is exactly :math:`\tau + 1` workers
    in turn, each from rest; without delay it is SGD with Nesterov momentum. Where delays are random, a query that
    several gradients are computed at lends its momentum to all of them.

    Source: not checked: neither the paper's algorithm nor its authors' code was found, only notes of a reader with the
    same two formulas. Ours: the momentum in the ticket, and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        momentum: :math:`\gamma`, 0.9.

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
        x = first_query(self, x0)
        return DANASlimState(x=x, velocity=torch.zeros_like(x))

    def ticket(self, state: DANASlimState) -> Tensor:
        """The momentum of the worker that gets the query."""
        return state.velocity

    def update(self, state: DANASlimState, grad: Tensor, delay: Delay, ticket: Tensor) -> DANASlimState:
        velocity = self.momentum * ticket + grad
        move = as_dtype(self.lr, grad) * (self.momentum * velocity + grad)
        return DANASlimState(x=self.domain.project(state.x - move), velocity=velocity)
