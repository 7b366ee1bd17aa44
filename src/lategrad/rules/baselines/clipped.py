"""Clipped asynchronous SGD: a constant step on gradients of bounded norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules.rule import Delay, first_query
from lategrad.sets import ConvexSet, WholeSpace, norm, resolve_domain
from lategrad.support.validation import Scalar, require_number


class ClippedState(NamedTuple):
    """State of :class:`ClippedSGD`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""


@dataclass(frozen=True, eq=False)
class ClippedSGD:
    r"""Clipped asynchronous SGD, :math:`x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, \min(1, c/\|g\|)\, g)`.

    However late a gradient is, the iterate has moved by at most :math:`\mathrm{lr}\, c\, \tau` since its
    query. In theory lr and c depend on smoothness and noise, here they are tuned and the
    default c = 1 is ours. The projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
        clip: c > 0, the largest norm of a gradient (of the whole vector).

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.ClippedSGD(lr=1.0, clip=1.0)
    >>> state = rule.init(torch.zeros(2))
    >>> rule.query(rule.update(state, torch.tensor([3.0, 4.0]), delay=torch.tensor(0)))
    tensor([-0.6000, -0.8000])

    Must know: nothing of the delays; for the guarantee, smoothness and noise.

    Guarantee: the query of a gradient is at most :math:`\mathrm{lr}\, c\, \tau` away, on any input; rates in its
    paper, without a projection.

    Reference: S. Erickson and M. Johansson, Clipping makes distributed and federated asynchronous SGD robust
    to stragglers, 2026.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    clip: Scalar = 1.0

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("clip", self.clip, low=0, strict=True)

    def init(self, x0: Tensor) -> ClippedState:
        """Start at the projection of ``x0``."""
        return ClippedState(x=first_query(self, x0))

    def query(self, state: ClippedState) -> Tensor:
        """The iterate."""
        return state.x

    def update(self, state: ClippedState, grad: Tensor, delay: Delay) -> ClippedState:
        """One projected step on the clipped gradient."""
        step = self.lr * (self.clip / norm(grad)).clamp_max(1.0)  # a zero gradient: c/0 = inf, clamped to 1
        return ClippedState(x=self.domain.project(state.x - step.to(grad.dtype) * grad))

    def output(self, state: ClippedState) -> Tensor:
        """The last iterate."""
        return state.x
