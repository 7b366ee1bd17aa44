"""Staleness-aware SGD (Zhang, Gupta, Lian & Liu 2016): the step divided by the delay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules.rule import Delay, as_number, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.validation import Scalar, require_number


class StalenessAwareState(NamedTuple):
    """State of :class:`StalenessAware`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""


@dataclass(frozen=True, eq=False)
class StalenessAware:
    r"""Staleness-aware SGD, :math:`x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, g / \max(1, \tau_t))`.

    lr is tuned. Written from memory of the paper. The projection is ours
    and outside its theory.

    Args:
        lr: the step of a gradient that is at most one update late.
        domain: K.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.StalenessAware(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> for tau in (0, 1):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(tau))
    >>> rule.query(rule.update(state, torch.tensor([1.0]), delay=torch.tensor(2)))  # 1 + 1 + 1/2
    tensor([-2.5000])

    Must know: the delay of every gradient.

    Guarantee: none that we know of for this form.

    Reference: W. Zhang, S. Gupta, X. Lian and J. Liu, Staleness-aware async-SGD for distributed deep
    learning, 2016.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)

    def init(self, x0: Tensor) -> StalenessAwareState:
        """Start at the projection of ``x0``."""
        return StalenessAwareState(x=first_query(self, x0))

    def query(self, state: StalenessAwareState) -> Tensor:
        """The iterate."""
        return state.x

    def update(self, state: StalenessAwareState, grad: Tensor, delay: Delay) -> StalenessAwareState:
        """One projected step, the shorter the later the gradient."""
        step = self.lr / as_number(delay).clamp_min(1)
        return StalenessAwareState(x=self.domain.project(state.x - step.to(grad.dtype) * grad))

    def output(self, state: StalenessAwareState) -> Tensor:
        """The last iterate."""
        return state.x
