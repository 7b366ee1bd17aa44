"""Delayed Nesterov (Liu et al. 2024): the outer momentum is updated once in N arrivals, with their mean."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, BelowOne, NonNegative, Scalar, require


class DelayedNesterovState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    velocity: Tensor  # m, the momentum, as it was when the buffer was last full
    buffer: Tensor  # Delta, the sum of the gradients since then
    arrivals: Tensor  # the number of gradients in the buffer


@dataclass(frozen=True, eq=False)
class DelayedNesterov(LastIterate):
    r"""Delayed Nesterov: every arrival is applied at once, and every N-th one also updates the momentum.

    .. math:: \Delta \leftarrow \Delta + g, \qquad
        \text{every N-th time: } m \leftarrow \gamma m + \Delta / N,\ \Delta \leftarrow 0, \qquad
        x_{t+1} = \Pi_K\big(x_t - \mathrm{lr}\,(s_t\, \gamma\, m + g / N)\big)

    with :math:`s_t = 1 - cN + c` every N-th time and c otherwise, so that in N arrivals the momentum is applied once
    in all: at once (c = 0), or in equal parts (c = 1/N). N arrivals make one step of Nesterov momentum with their
    mean. Made for the pseudo-gradients of workers that take local steps.

    Source: checked against the implementation in HALoS (utnslab/halos, ``opt.py``), which cites the paper and has its
    default c = 0; the authors' own repository (google-deepmind/asyncdiloco) leaves the rule out. Ours: the defaults of
    lr (DiLoCo's) and N (that of :func:`lategrad.train`), and the projection.

    Args:
        lr: learning rate; DiLoCo's 0.7 where gradients are pseudo-gradients.
        domain: K, the constraint set.
        momentum: :math:`\gamma`, the authors' 0.9.
        period: N >= 1; the authors take the number of workers.
        activation: c in [0, 1/N].

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.DelayedNesterov(lr=1.0, period=2)
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(3):
    ...     state = rule.update(state, torch.tensor([1.0]), delay=torch.tensor(0))
    ...     print(f"{rule.query(state).item():.1f}")  # 1/2; then 1/2 and momentum 0.9; then 1/2
    -0.5
    -1.9
    -2.4

    Must know: N, in theory the number of workers.

    Guarantee: none; its paper is empirical.

    Reference: B. Liu, R. Chhaparia, A. Douillard, S. Kale, A. A. Rusu, J. Shen, A. Szlam and M. Ranzato,
    Asynchronous local-SGD training for language modeling, 2024, Algorithm 3.
    """

    lr: NonNegative[Scalar] = 0.7
    domain: ConvexSet = WholeSpace()
    momentum: BelowOne[float] = 0.9
    period: AtLeastOne[Scalar] = 4
    activation: NonNegative[Scalar] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("period", self.period, self.period % 1 == 0, "a whole number")
        require("activation", self.activation, self.activation * self.period <= 1, "at most 1/period")

    def init(self, x0: Tensor) -> DelayedNesterovState:
        x = first_query(self, x0)
        zero = torch.zeros_like(x)
        return DelayedNesterovState(x=x, velocity=zero, buffer=zero.clone(), arrivals=per_run(x, 0))

    def update(self, state: DelayedNesterovState, grad: Tensor, delay: Delay) -> DelayedNesterovState:
        lr, period, share = (as_dtype(value, grad) for value in (self.lr, self.period, self.activation))
        arrivals = state.arrivals + 1
        full = arrivals >= self.period
        buffer = state.buffer + grad
        velocity = torch.where(full, self.momentum * state.velocity + buffer / period, state.velocity)
        momentum = self.momentum * torch.where(full, (1 - share * period + share) * velocity, share * velocity)
        x = self.domain.project(state.x - lr * (momentum + grad / period))
        buffer, arrivals = torch.where(full, 0.0, buffer), torch.where(full, 0.0, arrivals)
        return DelayedNesterovState(x=x, velocity=velocity, buffer=buffer, arrivals=arrivals)
