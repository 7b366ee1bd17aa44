"""Gap-Aware (Barkai, Hakimi & Schuster 2020): gradients shrunk by how far the weights have moved since."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import CarriesQuery, root_mean_square
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class GapAwareState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    velocity: Tensor  # v_t, the decaying sum of the shrunk gradients
    mean_square: Tensor  # s_t, the moving average of v_{t-1}^2 for every coordinate
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class GapAware(CarriesQuery):
    r"""Gap-Aware SGD with momentum, coordinate by coordinate.

    .. math:: s_t &= \Gamma s_{t-1} + (1 - \Gamma) v_{t-1}^2, \qquad
        C_t = \mathrm{lr}\,\Big(\sqrt{s_t / (1 - \Gamma^t)} + \epsilon\Big), \\
        v_t &= \gamma v_{t-1} + \frac{g}{1 + |x_t - x_{t-\tau_t}| / C_t}, \qquad
        x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, v_t)

    :math:`C_t` is the usual size of an update: a gap of n such updates divides the gradient by n + 1, while weights
    that stayed where they were take it as it is. A query carries itself.

    Source: checked against the code of the authors' group (saareliad/FTPipe, ``sgd_gap_aware.py``), whose
    :math:`\Gamma` and :math:`\epsilon` these are; where learning rates change it takes the largest so far in
    :math:`C_t`. The paper itself was read in its abstract. Ours: the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        momentum: :math:`\gamma`, 0.9.
        decay: :math:`\Gamma`, 0.999.
        eps: :math:`\epsilon`, 1e-8.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.GapAware(lr=1.0, momentum=0.0)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), ticket)
    >>> rule.output(rule.update(state, torch.tensor([1.0]), torch.tensor(1), ticket))  # C = 0.71 of v_0 = 0 and v_1 = 1
    tensor([-1.4143])

    Must know: the query that the gradient was taken at, its ticket; not the delay.

    Guarantee: in its paper a rate for smooth objectives, which we have not seen; none for the projection.

    Reference: S. Barkai, I. Hakimi and A. Schuster, Gap aware mitigation of gradient staleness, 2020.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    momentum: BelowOne[float] = 0.9
    decay: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8

    def init(self, x0: Tensor) -> GapAwareState:
        x = first_query(self, x0)
        return GapAwareState(x=x, velocity=torch.zeros_like(x), mean_square=torch.zeros_like(x), t=per_run(x, 0))

    def update(self, state: GapAwareState, grad: Tensor, delay: Delay, ticket: Tensor) -> GapAwareState:
        t = state.t + 1
        lr = as_dtype(self.lr, grad)
        mean_square = self.decay * state.mean_square + (1 - self.decay) * state.velocity * state.velocity
        usual = lr * root_mean_square(mean_square, t, self.decay, self.eps)
        gap = (state.x - ticket).abs() / usual.clamp_min(torch.finfo(grad.dtype).tiny)  # lr = 0: 0/tiny
        velocity = self.momentum * state.velocity + grad / (1 + gap)
        x = self.domain.project(state.x - lr * velocity)
        return GapAwareState(x=x, velocity=velocity, mean_square=mean_square, t=t)
