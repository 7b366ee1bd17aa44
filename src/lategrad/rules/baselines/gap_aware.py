"""Gap-Aware (Barkai, Hakimi & Schuster 2020): gradients shrunk by how far the weights have moved since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number, require_share


class GapAwareState(NamedTuple):
    """State of :class:`GapAware`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    velocity: Tensor
    """:math:`v_t`, the decaying sum of the shrunk gradients."""
    mean_move: Tensor
    """C, the mean of :math:`|x_{i+1} - x_i|` so far, for every coordinate."""
    t: Tensor
    """Updates so far."""


@dataclass(frozen=True, eq=False)
class GapAware:
    r"""Gap-Aware SGD with momentum, coordinate by coordinate.

    .. math::

        G_t = 1 + |x_t - x_{t-\tau_t}| / C_t, \qquad v_t = \gamma v_{t-1} + g / G_t, \qquad
        x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, v_t)

    :math:`C_t` is the mean size of an update so far: a gap of n average updates divides the gradient by n + 1, while
    weights that stayed where they were take it as it is. A query carries itself. Written from
    memory of the paper; that C is the plain mean over all updates is ours. The projection is ours and outside its
    theory.

    Args:
        lr: the step.
        domain: K.
        momentum: :math:`\gamma`, the authors' 0.9.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.GapAware(lr=1.0, momentum=0.0)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), ticket)
    >>> rule.output(rule.update(state, torch.tensor([1.0]), torch.tensor(1), ticket))  # one update away: half of it
    tensor([-1.5000])

    Must know: the query that the gradient was taken at, its ticket; not the delay.

    Guarantee: none that we know of for this form.

    Reference: S. Barkai, I. Hakimi and A. Schuster, Gap aware mitigation of gradient staleness, 2020.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    momentum: float = 0.9

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_share("momentum", self.momentum)

    def init(self, x0: Tensor) -> GapAwareState:
        """Start at the projection of ``x0``, at rest."""
        x = first_query(self, x0)
        return GapAwareState(x=x, velocity=torch.zeros_like(x), mean_move=torch.zeros_like(x), t=per_run(x, 0))

    def query(self, state: GapAwareState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: GapAwareState) -> Tensor:
        """The query itself."""
        return state.x

    def update(self, state: GapAwareState, grad: Tensor, delay: Delay, ticket: Tensor) -> GapAwareState:
        """One projected step along the velocity."""
        t = state.t + 1
        unit = state.mean_move.clamp_min(torch.finfo(grad.dtype).tiny)  # what never moved has no gap
        gap = 1 + (state.x - ticket).abs() / unit
        velocity = self.momentum * state.velocity + grad / gap
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * velocity)
        moved = average_in(state.mean_move, (x - state.x).abs(), 1 / t)
        return GapAwareState(x=x, velocity=velocity, mean_move=moved, t=t)

    def output(self, state: GapAwareState) -> Tensor:
        """The last iterate."""
        return state.x
