"""NAdam with much momentum (Ajanthan et al. 2025): Nesterov's look-ahead as the correction of a delay."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import LastIterate, Moments, geometric, next_moments, root_mean_square, start_moments
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class NAdamState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments
    product: Tensor  # mu_1 .. mu_t, float64
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class NAdam(LastIterate):
    r"""NAdam with decoupled weight decay, in the form of ``torch.optim.NAdam``.

    .. math:: \mu_t = \beta_1 (1 - \tfrac12\, 0.96^{\psi t}), \qquad
        x_{t+1} = \Pi_K\Big((1 - \mathrm{lr}\,\lambda) x_t - \frac{\mathrm{lr}}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
            \Big(\frac{(1 - \mu_t)\, g}{1 - \mu_1 \cdots \mu_t}
            + \frac{\mu_{t+1}\, m_t}{1 - \mu_1 \cdots \mu_{t+1}}\Big)\Big)

    with Adam's m and v. For asynchronous pipelines Ajanthan et al. raise :math:`\beta_1` to 0.99: the look-ahead
    along a long memory then stands in for where the weights will be.

    Source: checked against the authors' code (PluralisResearch/AsyncPP, ``run.bash`` and ``main_with_runtime.py``),
    which runs ``torch.optim.NAdam`` with the constants below; equal to that optimizer. Ours: the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        beta1, beta2, weight_decay, momentum_decay: the authors' 0.99, 0.999, 0.01 and :math:`\psi` = 0.004.
        eps: torch's 1e-8.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.NAdam(lr=0.1)
    >>> state = rule.init(torch.zeros(2))
    >>> rule.output(rule.update(state, torch.tensor([5.0, -0.2]), delay=torch.tensor(0)))
    tensor([-0.1007,  0.1007])

    Must know: nothing.

    Guarantee: none for this form; its authors prove a rate for Nesterov's method under a fixed delay.

    References: T. Dozat, Incorporating Nesterov momentum into Adam, 2016; T. Ajanthan et al., Nesterov method for
    asynchronous pipeline parallel optimization, 2025.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    beta1: BelowOne[float] = 0.99
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    momentum_decay: NonNegative[float] = 4e-3

    def init(self, x0: Tensor) -> NAdamState:
        x = first_query(self, x0)
        return NAdamState(x=x, moments=start_moments(x), product=per_run(x, 1), t=per_run(x, 0))

    def _momentum(self, t: Tensor) -> Tensor:
        return self.beta1 * (1 - 0.5 * geometric(0.96, self.momentum_decay * t))

    def update(self, state: NAdamState, grad: Tensor, delay: Delay) -> NAdamState:
        t = state.t + 1
        now, ahead = self._momentum(t), self._momentum(t + 1)
        product = state.product * now
        moments = next_moments(state.moments, grad, self.beta1, self.beta2)
        of_grad = ((1 - now) / (1 - product)).to(grad.dtype)
        of_momentum = (ahead / (1 - product * ahead)).to(grad.dtype)
        numerator = of_grad * grad + of_momentum * moments.first
        direction = numerator / root_mean_square(moments.second, t, self.beta2, self.eps)
        move = as_dtype(self.lr, grad) * (direction + self.weight_decay * state.x)
        return NAdamState(x=self.domain.project(state.x - move), moments=moments, product=product, t=t)
