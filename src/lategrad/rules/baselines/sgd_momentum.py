"""SGD with momentum (Polyak 1964), or Nesterov's, in the form of ``torch.optim.SGD``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.validation import Scalar, require, require_number, require_share


class SGDMomentumState(NamedTuple):
    """State of :class:`SGDMomentum`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    velocity: Tensor
    """:math:`v_t`, the decaying sum of the gradients."""


@dataclass(frozen=True, eq=False)
class SGDMomentum:
    r"""SGD with heavy-ball momentum, or with Nesterov's.

    .. math:: v_t = \gamma\, v_{t-1} + g, \qquad x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, v_t)

    With ``nesterov`` the step is :math:`g + \gamma v_t` instead of :math:`v_t`; on pseudo-gradients that is DiLoCo's
    outer optimizer, with a step of 0.7. Late gradients act like more momentum. The projection is ours and outside its
    theory.

    Args:
        lr: the step.
        domain: K.
        momentum: :math:`\gamma`; 0.9, the usual choice.
        nesterov: whether to look ahead along the momentum.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.SGDMomentum(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(2):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(0))
    >>> rule.output(state)  # -1, then -1.9 more
    tensor([-2.9000])

    Must know: nothing.

    Guarantee: none that we know of for late gradients.

    References: B. T. Polyak, Some methods of speeding up the convergence of iteration methods, 1964; I. Sutskever,
    J. Martens, G. Dahl and G. Hinton, On the importance of initialization and momentum in deep learning, 2013;
    A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_share("momentum", self.momentum)
        require("nesterov", self.nesterov, isinstance(self.nesterov, bool), "True or False")

    def init(self, x0: Tensor) -> SGDMomentumState:
        """Start at the projection of ``x0``, at rest."""
        x = first_query(self, x0)
        return SGDMomentumState(x=x, velocity=torch.zeros_like(x))

    def query(self, state: SGDMomentumState) -> Tensor:
        """The iterate."""
        return state.x

    def update(self, state: SGDMomentumState, grad: Tensor, delay: Delay) -> SGDMomentumState:
        """One projected step along the velocity."""
        velocity = self.momentum * state.velocity + grad
        move = grad + self.momentum * velocity if self.nesterov else velocity
        return SGDMomentumState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * move), velocity=velocity)

    def output(self, state: SGDMomentumState) -> Tensor:
        """The last iterate."""
        return state.x
