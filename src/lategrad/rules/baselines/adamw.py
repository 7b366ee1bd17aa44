"""AdamW (Loshchilov & Hutter 2019), in the form of ``torch.optim.AdamW``."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import AveragedIterate, Moments
from lategrad.rules.rule import Average, Delay, as_dtype, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class AdamWState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments
    mean: Tensor  # the average of x_1 .. x_t; without averaging it has no entries
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class AdamW(AveragedIterate):
    r"""AdamW: Adam with decoupled weight decay.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) g, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g^2, \quad
        x_{t+1} = \Pi_K\Big((1 - \mathrm{lr}\,\lambda) x_t
            - \mathrm{lr}\, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}\Big)

    Source: equal to ``torch.optim.AdamW``, whose defaults these are. Ours: the projection and the averages.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        beta1, beta2, eps, weight_decay: torch's 0.9, 0.999, 1e-8 and 0.01.
        average: of the queries as the output: "none", "uniform" or "linear", as in :class:`~lategrad.SGD`.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdamW(lr=0.1, weight_decay=0.0)
    >>> state = rule.init(torch.zeros(2))
    >>> rule.output(rule.update(state, torch.tensor([5.0, -0.2]), delay=torch.tensor(0)))  # whatever its size
    tensor([-0.1000,  0.1000])

    Must know: nothing.

    Guarantee: none under delay.

    Reference: I. Loshchilov and F. Hutter, Decoupled weight decay regularization, 2019.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    average: Average = "none"

    def init(self, x0: Tensor) -> AdamWState:
        x = first_query(self, x0)
        return AdamWState(x=x, moments=Moments.start(x), mean=start_mean(x, self.average), t=per_run(x, 0))

    def update(self, state: AdamWState, grad: Tensor, delay: Delay) -> AdamWState:
        t = state.t + 1
        moments = state.moments.next(grad, self.beta1, self.beta2)
        direction = moments.direction(t, self.beta1, self.beta2, self.eps) + self.weight_decay * state.x
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        return AdamWState(x=x, moments=moments, mean=next_mean(state.mean, state.x, t, self.average), t=t)
