"""Learning rates that fall with the delay: delay-adaptive asynchronous SGD (Mishchenko et al. 2022, Koloskova et al.
2022) and staleness-aware SGD (Zhang et al. 2016)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import IterateOnly, IterateState, LastIterate
from lategrad.rules.rule import Delay, as_number, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, NonNegative, Scalar


class DelayAdaptiveState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    delay_sum: Tensor  # the sum of the delays of all gradients received
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class DelayAdaptive(LastIterate):
    r"""Delay-adaptive asynchronous SGD: a smaller learning rate for delays beyond the number of workers.

    .. math:: x_{t+1} = \Pi_K\Big(x_t - \mathrm{lr}\, \frac{M}{\max(M, \tau_t)}\, g\Big)

    With M workers that are never idle the delays average to M - 1, so that most gradients have the full learning rate
    and only those of stragglers a smaller one. In theory lr is of order 1/(LM).

    Source: checked against the authors' notebook (konstmish/asynchronous_sgd). Ours: the estimate of M, one more than
    the mean delay so far, where it is not given, and the projection.

    Args:
        lr: the full learning rate; to be tuned.
        domain: K, the constraint set.
        workers: M >= 1; by default estimated from the delays.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.DelayAdaptive(lr=1.0, workers=2)
    >>> state = rule.init(torch.zeros(1))
    >>> for tau in (0, 1, 2, 3):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(tau))
    >>> rule.query(state)  # 1 + 1 + 1 + 2/3
    tensor([-3.6667])

    Must know: the delay of every gradient, and the number of workers M.

    Guarantee: in its papers, on smooth objectives and with lr of order 1/(LM): rates that depend on the number of
    workers and not on the largest delay, without a projection.

    References: K. Mishchenko, F. Bach, M. Even and B. Woodworth, Asynchronous SGD beats minibatch SGD under
    arbitrary delays, 2022; A. Koloskova, S. Stich and M. Jaggi, Sharper convergence guarantees for
    asynchronous SGD for distributed and federated learning, 2022.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    workers: AtLeastOne[Scalar] | None = None

    def init(self, x0: Tensor) -> DelayAdaptiveState:
        x = first_query(self, x0)
        return DelayAdaptiveState(x=x, delay_sum=per_run(x, 0), t=per_run(x, 0))

    def update(self, state: DelayAdaptiveState, grad: Tensor, delay: Delay) -> DelayAdaptiveState:
        t = state.t + 1
        delay_sum = state.delay_sum + delay
        M = 1 + delay_sum / t if self.workers is None else self.workers * torch.ones_like(t)
        lr = self.lr * M / torch.maximum(M, as_number(delay))
        return DelayAdaptiveState(x=self.domain.project(state.x - lr.to(grad.dtype) * grad), delay_sum=delay_sum, t=t)


@dataclass(frozen=True, eq=False)
class StalenessAware(IterateOnly):
    r"""Staleness-aware SGD, :math:`x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, g / \max(1, \tau_t))`.

    Source: checked against the paper (Sections 2.4 and 4.3: :math:`\alpha_0 / \tau`, delays counted in updates from 0),
    where the server updates with every gradient (its n-softsync, n the number of workers). Ours: the projection.

    Args:
        lr: learning rate of a gradient whose delay is at most 1; to be tuned.
        domain: K, the constraint set.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.StalenessAware(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> for tau in (0, 1):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(tau))
    >>> rule.query(rule.update(state, torch.tensor([1.0]), delay=torch.tensor(2)))  # 1 + 1 + 1/2
    tensor([-2.5000])

    Must know: the delay of every gradient.

    Guarantee: in its paper (Section 3), the rate of synchronous SGD, without a projection.

    Reference: W. Zhang, S. Gupta, X. Lian and J. Liu, Staleness-aware async-SGD for distributed deep learning, 2016.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def update(self, state: IterateState, grad: Tensor, delay: Delay) -> IterateState:
        lr = self.lr / as_number(delay).clamp_min(1)
        return IterateState(x=self.domain.project(state.x - lr.to(grad.dtype) * grad))
