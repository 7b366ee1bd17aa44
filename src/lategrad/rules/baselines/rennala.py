"""Rennala SGD (Tyurin & Richtárik 2023): minibatches collected from the workers that are ready first."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, NonNegative, Scalar


class RennalaState(NamedTuple):
    x: Tensor  # the iterate
    batch_mean: Tensor  # the mean of the gradients collected at x
    arrivals: Tensor  # the number of gradients collected
    updates: Tensor  # updates since x last changed: a gradient with a larger delay was taken at an older x


@dataclass(frozen=True, eq=False)
class Rennala(LastIterate):
    r"""Rennala SGD: wait for B gradients taken at the current x, then step with their mean.

    .. math:: x \leftarrow \Pi_K\Big(x - \frac{\mathrm{lr}}{B} \sum_{i=1}^{B} g_i\Big), \qquad g_i \text{ taken at } x

    Gradients taken at an older x are thrown away; the delay of a gradient tells. In theory B is of order
    :math:`\sigma^2/\epsilon`, at least 1, for the noise :math:`\sigma^2` and the squared gradient norm
    :math:`\epsilon` wanted, and lr of order 1/L.

    Source: checked against the authors' code (vectozavr/ringmaster-lmo, ``RennalaSGD``) and Algorithm 1 of a later
    paper of A. Tyurin, which has "stop, or ignore" for the unfinished gradients. Ours: B = 10 (their code has no
    default and tunes 1 to 16), and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        batch: B >= 1.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.Rennala(lr=1.0, batch=2)
    >>> state = rule.init(torch.zeros(1))
    >>> for tau, g in [(0, 1.0), (1, 3.0), (2, 9.0), (0, 1.0)]:  # the third was taken at x_1, too late
    ...     state = rule.update(state, torch.tensor([g]), delay=torch.tensor(tau))
    ...     print(rule.query(state).item())
    0.0
    -2.0
    -2.0
    -2.0

    Must know: the delay of every gradient, and B.

    Guarantee: in its paper, on smooth objectives without a projection: the best time where each worker's speed stays.

    Reference: A. Tyurin and P. Richtárik, Optimal time complexities of parallel stochastic optimization
    methods under a fixed computation model, 2023.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    batch: AtLeastOne[Scalar] = 10

    def init(self, x0: Tensor) -> RennalaState:
        x = first_query(self, x0)
        return RennalaState(x=x, batch_mean=torch.zeros_like(x), arrivals=per_run(x, 0), updates=per_run(x, 0))

    def update(self, state: RennalaState, grad: Tensor, delay: Delay) -> RennalaState:
        at_x = delay <= state.updates
        arrivals = state.arrivals + at_x.double()
        mean = average_in(state.batch_mean, grad, 1 / arrivals.clamp_min(1))
        batch_mean = torch.where(at_x, mean, state.batch_mean)
        full = arrivals >= self.batch
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * batch_mean)
        rest = (torch.where(full, 0.0, value) for value in (batch_mean, arrivals, state.updates + 1))
        return RennalaState(torch.where(full, x, state.x), *rest)
