"""Schedule-Free SGD and AdamW (Defazio et al. 2024): gradients between the iterate and its average."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import OutputsX, root_mean_square
from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar, UpToOne


class ScheduleFreeState(NamedTuple):
    z: Tensor  # z_{t+1}, the iterate
    x: Tensor  # the average of z_2 .. z_{t+1}
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class ScheduleFree(OutputsX):
    r"""Schedule-Free SGD: query y, output x.

    .. math:: y_t = (1 - b) z_t + b\, x_t, \qquad z_{t+1} = \Pi_K(z_t - \mathrm{lr}\, g), \qquad
        x_{t+1} = x_t + (z_{t+1} - x_t)/t

    The first update sets :math:`x_2 = z_2`, so that the start is not in the average; with the start in it, this is
    ``Anytime(OGD(lr, schedule="constant"), power=0, interpolation=b)``.

    Source: equal to the authors' ``schedulefree.SGDScheduleFree`` without warm-up, with b = 0.9. Ours: the projection.

    Args:
        lr: learning rate of z.
        domain: K, the constraint set.
        interpolation: b, the package's momentum.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.ScheduleFree(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(2):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(0))
    >>> rule.output(state), rule.query(state)  # z_3 = -2, x_3 = -1.5
    (tensor([-1.5000]), tensor([-1.5500]))

    Must know: nothing.

    Guarantee: none under delay.

    Reference: A. Defazio, X. Yang, H. Mehta, K. Mishchenko, A. Khaled and A. Cutkosky, The road less scheduled, 2024.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    interpolation: UpToOne[Scalar] = 0.9

    def init(self, x0: Tensor) -> ScheduleFreeState:
        z = first_query(self, x0)
        return ScheduleFreeState(z=z, x=z.clone(), t=per_run(z, 0))

    def query(self, state: ScheduleFreeState) -> Tensor:
        return torch.lerp(state.z, state.x, as_dtype(self.interpolation, state.x))

    def update(self, state: ScheduleFreeState, grad: Tensor, delay: Delay) -> ScheduleFreeState:
        t = state.t + 1
        z = self.domain.project(state.z - as_dtype(self.lr, grad) * grad)
        return ScheduleFreeState(z=z, x=average_in(state.x, z, 1 / t), t=t)


class ScheduleFreeAdamWState(NamedTuple):
    z: Tensor  # z_{t+1}, the iterate
    x: Tensor  # the average of z_2 .. z_{t+1}
    second: Tensor  # Adam's moving average of the squared gradients
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class ScheduleFreeAdamW(OutputsX):
    r"""Schedule-Free AdamW: Adam's normalized gradients, averaging instead of momentum; query y, output x.

    .. math:: y_t = (1 - b) z_t + b\, x_t, \qquad
        z_{t+1} = \Pi_K\Big(z_t - \mathrm{lr}\Big(\frac{g}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
            + \lambda y_t\Big)\Big), \qquad x_{t+1} = x_t + (z_{t+1} - x_t)/t

    Source: equal to the authors' ``schedulefree.AdamWScheduleFree`` without warm-up (its weights, the squares of lr,
    are then all equal), constants included. Ours: the projection.

    Args:
        lr: learning rate of z.
        domain: K, the constraint set.
        interpolation: b, the package's first beta, 0.9.
        beta2, eps, weight_decay: the package's 0.999, 1e-8 and 0.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.ScheduleFreeAdamW(lr=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(2):
    ...     state = rule.update(state, torch.tensor([3.0]), delay=torch.tensor(0))
    >>> rule.output(state), rule.query(state)  # z_3 = -2, x_3 = -1.5
    (tensor([-1.5000]), tensor([-1.5500]))

    Must know: nothing.

    Guarantee: none under delay.

    Reference: A. Defazio, X. Yang, H. Mehta, K. Mishchenko, A. Khaled and A. Cutkosky, The road less scheduled, 2024.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    interpolation: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.0

    def init(self, x0: Tensor) -> ScheduleFreeAdamWState:
        z = first_query(self, x0)
        return ScheduleFreeAdamWState(z=z, x=z.clone(), second=torch.zeros_like(z), t=per_run(z, 0))

    def query(self, state: ScheduleFreeAdamWState) -> Tensor:
        return torch.lerp(state.z, state.x, self.interpolation)

    def update(self, state: ScheduleFreeAdamWState, grad: Tensor, delay: Delay) -> ScheduleFreeAdamWState:
        t = state.t + 1
        second = self.beta2 * state.second + (1 - self.beta2) * grad * grad
        direction = grad / root_mean_square(second, t, self.beta2, self.eps) + self.weight_decay * self.query(state)
        z = self.domain.project(state.z - as_dtype(self.lr, grad) * direction)
        return ScheduleFreeAdamWState(z=z, x=average_in(state.x, z, 1 / t), second=second, t=t)
