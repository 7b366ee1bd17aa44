"""SGD with momentum (Polyak 1964), Nesterov's included, in the form of ``torch.optim.SGD``; and momentum look-ahead
(Ajanthan et al. 2025), whose memory is an average."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate, OutputsX
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import BelowOne, NonNegative, Scalar


class MomentumState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    velocity: Tensor  # v_t, the decaying sum of the gradients, or m_t, their moving average


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

    def init(self, x0: Tensor) -> MomentumState:
        x = first_query(self, x0)
        return MomentumState(x=x, velocity=torch.zeros_like(x))

    def update(self, state: MomentumState, grad: Tensor, delay: Delay) -> MomentumState:
        velocity = self.momentum * state.velocity + grad
        move = grad + self.momentum * velocity if self.nesterov else velocity
        return MomentumState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * move), velocity=velocity)


@dataclass(frozen=True, eq=False)
class MomentumLookAhead(OutputsX):
    r"""Momentum look-ahead: each arrival in full, and the averaged momentum on top of it.

    .. math:: m_t = \gamma\, m_{t-1} + (1 - \gamma)\, g, \qquad
        x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(g + \gamma\, m_t)\big)

    Nesterov momentum whose memory is an average, not a sum: the momentum is as long as one gradient, however many
    arrive. With ``ahead`` workers also start from where the momentum will lead, :math:`\Pi_K(x - \mathrm{lr}\,
    \gamma\, m)`, as HeLoCo has it.

    Source: checked second hand, against the descriptions of two implementations that name the paper, one of them by
    HeLoCo's authors: both have the update above, one with lr = 0.7 and :math:`\gamma` = 0.9. Ours: the projections.

    Args:
        lr: learning rate; DiLoCo's 0.7 where gradients are pseudo-gradients.
        domain: K, the constraint set.
        momentum: :math:`\gamma`, 0.9.
        ahead: hand out the point ahead instead of the iterate.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.MomentumLookAhead(lr=1.0, ahead=True)
    >>> state = rule.update(rule.init(torch.zeros(1)), torch.tensor([1.0]), delay=torch.tensor(0))
    >>> rule.output(state), rule.query(state)  # m = 0.1
    (tensor([-1.0900]), tensor([-1.1800]))

    Must know: nothing.

    Guarantee: none that we know of for late gradients.

    References: T. Ajanthan, S. Ramasinghe, G. Avraham, Y. Zuo and A. Long, Momentum look-ahead for asynchronous
    distributed low-communication training, 2025; for ``ahead``, A. Al Asif et al., HeLoCo: efficient asynchronous
    low-communication training under data and device heterogeneity, 2026.
    """

    lr: NonNegative[Scalar] = 0.7
    domain: ConvexSet = WholeSpace()
    momentum: BelowOne[float] = 0.9
    ahead: bool = False

    def init(self, x0: Tensor) -> MomentumState:
        x = first_query(self, x0)
        return MomentumState(x=x, velocity=torch.zeros_like(x))

    def query(self, state: MomentumState) -> Tensor:
        if not self.ahead:
            return state.x
        return self.domain.project(state.x - as_dtype(self.lr, state.x) * self.momentum * state.velocity)

    def update(self, state: MomentumState, grad: Tensor, delay: Delay) -> MomentumState:
        velocity = self.momentum * state.velocity + (1 - self.momentum) * grad
        move = as_dtype(self.lr, grad) * (grad + self.momentum * velocity)
        return MomentumState(x=self.domain.project(state.x - move), velocity=velocity)
