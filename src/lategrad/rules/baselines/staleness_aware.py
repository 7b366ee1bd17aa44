"""Staleness-aware SGD (Zhang, Gupta, Lian & Liu 2016): the learning rate divided by the delay."""

from dataclasses import dataclass

from torch import Tensor

from lategrad.rules._common import IterateOnly, IterateState
from lategrad.rules.rule import Delay, as_number
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import NonNegative, Scalar


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
