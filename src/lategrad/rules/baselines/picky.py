"""Picky SGD (Cohen, Daniely, Drori, Koren & Schain 2021): only gradients that were taken nearby."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lategrad.rules._common import IterateOnly, IterateState
from lategrad.rules.rule import Delay, as_dtype
from lategrad.sets import ConvexSet, WholeSpace, norm, resolve_domain
from lategrad.support.validation import Scalar, require_number


@dataclass(frozen=True, eq=False)
class PickySGD(IterateOnly):
    r"""Picky SGD: an update if the query of the gradient is near the iterate, else nothing.

    .. math::

        x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, g) \text{ if } \|x_t - x_{t-\tau_t}\| \le \epsilon / (2\beta),
        \text{ else } x_t

    A query carries itself. Its theory speaks of one of the iterates; the output here is the last one.

    Source: not checked: only the abstract and a summary of the paper were found. They confirm that a gradient is used
    if its query is near the iterate, but not the bound :math:`\epsilon / (2\beta)`, which is from memory. Ours: the
    default distance, the last iterate as the output, and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        distance: :math:`\epsilon / (2\beta)`, how far away a gradient may have been taken.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.PickySGD(lr=1.0, distance=1.5)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(10):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), ticket)
    >>> rule.query(state)  # from -2 on they were taken too far away
    tensor([-2.])

    Must know: the query that the gradient was taken at, its ticket; the smoothness :math:`\beta` and the accuracy
    :math:`\epsilon` wanted, through the distance.

    Guarantee: in its paper, on smooth objectives: a gradient of norm :math:`\epsilon` after a number of updates that
    grows with the mean delay and not with the largest, without a projection.

    Reference: A. Cohen, A. Daniely, Y. Drori, T. Koren and M. Schain, Asynchronous stochastic optimization
    robust to arbitrary delays, 2021.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    distance: Scalar = 1.0

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("distance", self.distance, low=0)

    def ticket(self, state: IterateState) -> Tensor:
        return state.x

    def update(self, state: IterateState, grad: Tensor, delay: Delay, ticket: Tensor) -> IterateState:
        near = norm(state.x - ticket) <= self.distance
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * grad)
        return IterateState(x=torch.where(near, x, state.x))
