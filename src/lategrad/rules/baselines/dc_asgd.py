"""DC-ASGD (Zheng et al. 2017): late gradients corrected by a guess of how they would have changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.validation import Scalar, require, require_number


class DCASGDState(NamedTuple):
    """State of :class:`DCASGD`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""


@dataclass(frozen=True, eq=False)
class DCASGD:
    r"""DC-ASGD-c, SGD with delay compensation: :math:`g` is moved from the old query to the iterate.

    .. math:: x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(g + \lambda\, g \odot g \odot (x_t - x_{t-\tau_t}))\big)

    The squared gradient stands in for the diagonal of the Hessian, a fair guess for log-likelihoods near their
    optimum. A query carries itself. lr and :math:`\lambda` are tuned. The projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
        lam: :math:`\lambda`; the authors' 0.04.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.DCASGD(lr=0.5, lam=0.1)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([2.0]), torch.tensor(0), ticket)  # x_2 = -1
    >>> rule.query(rule.update(state, torch.tensor([2.0]), torch.tensor(1), ticket))  # 2 becomes 2 - 0.1 * 4
    tensor([-1.8000])

    Must know: the query that the gradient was taken at, its ticket; no bound on the delays.

    Guarantee: in its paper, on smooth objectives and bounded delays, without a projection.

    Reference: S. Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    lam: Scalar = 0.04

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("lam", self.lam, low=0)

    def init(self, x0: Tensor) -> DCASGDState:
        """Start at the projection of ``x0``."""
        return DCASGDState(x=first_query(self, x0))

    def query(self, state: DCASGDState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: DCASGDState) -> Tensor:
        """The query itself."""
        return state.x

    def update(self, state: DCASGDState, grad: Tensor, delay: Delay, ticket: Tensor) -> DCASGDState:
        """One projected step on the compensated gradient."""
        compensated = grad + as_dtype(self.lam, grad) * grad * grad * (state.x - ticket)
        return DCASGDState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * compensated))

    def output(self, state: DCASGDState) -> Tensor:
        """The last iterate."""
        return state.x


class AdaptiveDCASGDState(NamedTuple):
    """State of :class:`AdaptiveDCASGD`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    mean_square: Tensor
    """The moving average of the squared gradients."""


@dataclass(frozen=True, eq=False)
class AdaptiveDCASGD:
    r"""DC-ASGD-a: :class:`DCASGD` with a :math:`\lambda` of its own for every coordinate.

    .. math::

        \lambda_t = \lambda_0 / \sqrt{m_t + 10^{-7}}, \qquad
        m_t = 0.95\, m_{t-1} + 0.05\, g \odot g, \quad m_0 = 0

    A query carries itself. lr and :math:`\lambda_0` are tuned. The projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
        lam: :math:`\lambda_0`; the authors' 2.
        decay: 0.95, the authors' choice.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdaptiveDCASGD(lr=0.5)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([0.1]), torch.tensor(0), ticket)  # x_2 = -0.05
    >>> rule.query(rule.update(state, torch.tensor([0.1]), torch.tensor(1), ticket))
    tensor([-0.0840])

    Must know: the query that the gradient was taken at, its ticket; no bound on the delays.

    Guarantee: none that we know of for the adaptive :math:`\lambda`.

    Reference: S. Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    lam: Scalar = 2.0
    decay: Scalar = 0.95

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("lam", self.lam, low=0)
        require_number("decay", self.decay, low=0)
        require("decay", self.decay, self.decay < 1, "a number in [0, 1)")

    def init(self, x0: Tensor) -> AdaptiveDCASGDState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return AdaptiveDCASGDState(x=x, mean_square=torch.zeros_like(x))

    def query(self, state: AdaptiveDCASGDState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: AdaptiveDCASGDState) -> Tensor:
        """The query itself."""
        return state.x

    def update(self, state: AdaptiveDCASGDState, grad: Tensor, delay: Delay, ticket: Tensor) -> AdaptiveDCASGDState:
        """One projected step on the compensated gradient."""
        decay = as_dtype(self.decay, grad)
        mean_square = decay * state.mean_square + (1 - decay) * grad * grad
        lam = as_dtype(self.lam, grad) / (mean_square + 1e-7).sqrt()
        compensated = grad + lam * grad * grad * (state.x - ticket)
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * compensated)
        return AdaptiveDCASGDState(x=x, mean_square=mean_square)

    def output(self, state: AdaptiveDCASGDState) -> Tensor:
        """The last iterate."""
        return state.x
