"""Centered clipping: SGD along a momentum that no single gradient can move far, against faulty or hostile workers."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, norm
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class CenteredClippingState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    center: Tensor  # v_t, the momentum: what a gradient is expected to be


@dataclass(frozen=True, eq=False)
class CenteredClipping(LastIterate):
    r"""SGD along a running momentum, which each gradient moves by at most a given length.

    .. math:: v_t = v_{t-1} + (1 - \beta) \min\left(1, \frac{r}{|g_t - v_{t-1}|}\right) (g_t - v_{t-1}), \qquad
        x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, v_t)

    The published method clips the messages of all workers around the last momentum and averages them, once a round.
    Here there are no rounds: each gradient is clipped when it arrives. A bad gradient moves the momentum by at most
    :math:`(1 - \beta) r`; one bad worker of n therefore costs a bias of the order of r/n.

    Args:
        lr: learning rate.
        radius: r, about the usual distance of a gradient from the mean gradient. Smaller is safer, and slower.
        momentum: :math:`\beta`.
        domain: K.

    >>> rule = CenteredClipping(lr=1.0, radius=1.0, momentum=0.5)
    >>> state = rule.init(torch.zeros(1))
    >>> state = rule.update(state, torch.tensor([1e30]), delay=torch.tensor(0))
    >>> rule.output(state)
    tensor([-0.5000])

    Must know: the radius r.

    Guarantee: a gradient moves the momentum by at most :math:`(1 - \beta) r`, whatever it is; the rates of the
    published method are for rounds without delay.

    Reference: S. Karimireddy, L. He and M. Jaggi, Learning from history for Byzantine robust optimization, 2021.
    """

    lr: NonNegative[Scalar]
    radius: Positive[Scalar]
    momentum: BelowOne[Scalar] = 0.9
    domain: ConvexSet = WholeSpace()

    def init(self, x0: Tensor) -> CenteredClippingState:
        x = first_query(self, x0)
        return CenteredClippingState(x=x, center=torch.zeros_like(x))

    def update(self, state: CenteredClippingState, grad: Tensor, delay: Delay) -> CenteredClippingState:
        lr, momentum = (as_dtype(number, grad) for number in (self.lr, self.momentum))
        surprise = grad - state.center
        share = (self.radius / norm(surprise)).clamp_max(1.0)  # 0 where the norm overflows float64
        center = state.center + (1 - momentum) * share.to(grad.dtype) * surprise
        return CenteredClippingState(x=self.domain.project(state.x - lr * center), center=center)
