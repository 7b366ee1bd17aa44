"""NAdam with much momentum (Ajanthan et al. 2025): Nesterov's look-ahead as the correction of a delay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import Moments, geometric, next_moments, root_mean_square, start_moments
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number, require_share


class NAdamState(NamedTuple):
    """State of :class:`NAdam`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    moments: Moments
    product: Tensor
    """:math:`\\mu_1 \\cdots \\mu_t`, float64."""
    t: Tensor
    """Updates so far."""


@dataclass(frozen=True, eq=False)
class NAdam:
    r"""NAdam with decoupled weight decay, in the form of ``torch.optim.NAdam``.

    .. math::

        \mu_t = \beta_1 (1 - \tfrac12\, 0.96^{\psi t}), \qquad
        x_{t+1} = \Pi_K\Big((1 - \mathrm{lr}\,\lambda) x_t - \frac{\mathrm{lr}}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
            \Big(\frac{(1 - \mu_t)\, g}{1 - \mu_1 \cdots \mu_t}
            + \frac{\mu_{t+1}\, m_t}{1 - \mu_1 \cdots \mu_{t+1}}\Big)\Big)

    with Adam's m and v. For asynchronous pipelines its authors raise :math:`\beta_1` to 0.99: the look-ahead along
    a long memory then stands in for where the weights will be. The projection is ours and outside
    its theory.

    Args:
        lr: the step.
        domain: K.
        beta1: 0.99, as for asynchronous pipelines.
        beta2, eps, momentum_decay: torch's 0.999, 1e-8 and :math:`\psi` = 0.004.
        weight_decay: 0.01, as AdamW's.

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

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    beta1: float = 0.99
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum_decay: float = 4e-3

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_share("beta1", self.beta1)
        require_share("beta2", self.beta2)
        require_number("eps", self.eps, low=0, strict=True)
        require_number("weight_decay", self.weight_decay, low=0)
        require_number("momentum_decay", self.momentum_decay, low=0)

    def init(self, x0: Tensor) -> NAdamState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return NAdamState(x=x, moments=start_moments(x), product=per_run(x, 1), t=per_run(x, 0))

    def query(self, state: NAdamState) -> Tensor:
        """The iterate."""
        return state.x

    def _momentum(self, t: Tensor) -> Tensor:
        return self.beta1 * (1 - 0.5 * geometric(0.96, self.momentum_decay * t))

    def update(self, state: NAdamState, grad: Tensor, delay: Delay) -> NAdamState:
        """One projected step with Nesterov's look-ahead, and the decay of the weights."""
        t = state.t + 1
        now, ahead = self._momentum(t), self._momentum(t + 1)
        product = state.product * now
        moments = next_moments(state.moments, grad, self.beta1, self.beta2)
        of_grad = ((1 - now) / (1 - product)).to(grad.dtype)
        of_momentum = (ahead / (1 - product * ahead)).to(grad.dtype)
        looking_ahead = of_grad * grad + of_momentum * moments.first
        direction = looking_ahead / root_mean_square(moments.second, t, self.beta2, self.eps)
        move = as_dtype(self.lr, grad) * (direction + self.weight_decay * state.x)
        return NAdamState(x=self.domain.project(state.x - move), moments=moments, product=product, t=t)

    def output(self, state: NAdamState) -> Tensor:
        """The last iterate."""
        return state.x
