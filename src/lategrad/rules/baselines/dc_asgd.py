"""DC-ASGD (Zheng et al. 2017): late gradients corrected by an estimate of how they would have changed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import CarriesQuery, IterateOnly, IterateState
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import BelowOne, NonNegative, Scalar


@dataclass(frozen=True, eq=False)
class DCASGD(CarriesQuery, IterateOnly):
    r"""DC-ASGD-c, SGD with delay compensation: :math:`g` is moved from the old query to the iterate.

    .. math:: x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(g + \lambda\, g \odot g \odot (x_t - x_{t-\tau_t}))\big)

    The squared gradient stands in for the diagonal of the Hessian, a fair guess for log-likelihoods near their
    optimum. A query carries itself.

    Source: checked against the authors' code (microsoft/Delayed-Compensation-..., ``dcasgd_updater.h``, which has
    :math:`|g|` in the place of the paper's :math:`g \odot g`) and MXNet's ``DCASGD``, which has the form above and
    :math:`\lambda` = 0.04. Ours: the projection.

    Args:
        lr: learning rate; to be tuned.
        domain: K, the constraint set.
        lam: :math:`\lambda`, 0.04 as in MXNet.

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

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    lam: NonNegative[Scalar] = 0.04

    def update(self, state: IterateState, grad: Tensor, delay: Delay, ticket: Tensor) -> IterateState:
        compensated = grad + as_dtype(self.lam, grad) * grad * grad * (state.x - ticket)
        return IterateState(x=self.domain.project(state.x - as_dtype(self.lr, grad) * compensated))


class AdaptiveDCASGDState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    mean_square: Tensor  # the moving average of the squared gradients


@dataclass(frozen=True, eq=False)
class AdaptiveDCASGD(CarriesQuery):
    r"""DC-ASGD-a: :class:`DCASGD` with a :math:`\lambda` of its own for every coordinate.

    .. math:: \lambda_t = \lambda_0 / \sqrt{m_t + 10^{-7}}, \qquad
        m_t = 0.95\, m_{t-1} + 0.05\, g \odot g, \quad m_0 = 0

    A query carries itself.

    Source: checked against the authors' code (``dcasgda_updater.h`` of the same repository), which has the 1e-7 and
    keeps one :math:`m` for every worker, where this rule has one in all. The defaults 2 and 0.95 are those of another
    implementation (torch_scala's ``DCASGDa``). Ours: the projection.

    Args:
        lr: learning rate; to be tuned.
        domain: K, the constraint set.
        lam: :math:`\lambda_0`.
        decay: 0.95.

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

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    lam: NonNegative[Scalar] = 2.0
    decay: BelowOne[Scalar] = 0.95

    def init(self, x0: Tensor) -> AdaptiveDCASGDState:
        x = first_query(self, x0)
        return AdaptiveDCASGDState(x=x, mean_square=torch.zeros_like(x))

    def update(self, state: AdaptiveDCASGDState, grad: Tensor, delay: Delay, ticket: Tensor) -> AdaptiveDCASGDState:
        decay = as_dtype(self.decay, grad)
        mean_square = decay * state.mean_square + (1 - decay) * grad * grad
        lam = as_dtype(self.lam, grad) / (mean_square + 1e-7).sqrt()
        compensated = grad + lam * grad * grad * (state.x - ticket)
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * compensated)
        return AdaptiveDCASGDState(x=x, mean_square=mean_square)
