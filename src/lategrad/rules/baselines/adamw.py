"""AdamW (Loshchilov & Hutter 2019), in the form of ``torch.optim.AdamW``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lategrad.rules._common import AveragedIterate, Moments, adam_direction, next_moments, start_moments
from lategrad.rules.rule import AVERAGES, Delay, as_dtype, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_choice, require_number, require_share


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

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    average: str = "none"

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_adam(self)
        require_choice("average", self.average, AVERAGES)

    def init(self, x0: Tensor) -> AdamWState:
        x = first_query(self, x0)
        return AdamWState(x=x, moments=start_moments(x), mean=start_mean(x, self.average), t=per_run(x, 0))

    def update(self, state: AdamWState, grad: Tensor, delay: Delay) -> AdamWState:
        t = state.t + 1
        moments = next_moments(state.moments, grad, self.beta1, self.beta2)
        direction = adam_direction(moments, t, self.beta1, self.beta2, self.eps) + self.weight_decay * state.x
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        return AdamWState(x=x, moments=moments, mean=next_mean(state.mean, state.x, t, self.average), t=t)


def require_adam(rule: Any) -> None:
    """Raise a ValueError for a hyper-parameter of Adam that is out of its range."""
    require_number("lr", rule.lr, low=0)
    require_share("beta1", rule.beta1)
    require_share("beta2", rule.beta2)
    require_number("eps", rule.eps, low=0, strict=True)
    require_number("weight_decay", rule.weight_decay, low=0)
