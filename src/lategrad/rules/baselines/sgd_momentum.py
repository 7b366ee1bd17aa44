"""SGD with momentum (Polyak 1964), or Nesterov's, in the form of ``torch.optim.SGD``."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import BelowOne, NonNegative, Scalar


class SGDMomentumState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    velocity: Tensor  # v_t, the decaying sum of the gradients


@dataclass(frozen=True, eq=False)
class SGDMomentum(LastIterate):
    r"""SGD with heavy-ball momentum, or with Nesterov's.

    .. math:: v_t = \gamma\, v_{t-1} + g, \qquad x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, v_t)

    With ``nesterov`` the direction is :math:`g + \gamma v_t` instead of :math:`v_t`; on pseudo-gradients that is
    DiLoCo's outer optimizer, with a learning rate of 0.7. Late gradients act like more momentum.

    Source: equal to ``torch.optim.SGD``, with and without ``nesterov``. The momentum 0.9 is DiLoCo's, and the usual
    choice. Ours: the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        momentum: :math:`\gamma`.
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

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    momentum: BelowOne[float] = 0.9
    nesterov: bool = False

    def init(self, x0: Tensor) -> SGDMomentumState:
        x = first_query(self, x0)
        return SGDMomentumState(x=x, velocity=torch.zeros_like(x))

    def update(self, state: SGDMomentumState, grad: Tensor, delay: Delay) -> SGDMomentumState:
        velocity = self.momentum * state.velocity + grad
        move = grad + self.momentum * velocity if self.nesterov else velocity
        return SGDMomentumState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * move), velocity=velocity)
