"""Asynchronous AdaGrad: late gradients treated as if they were on time."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import AveragedIterate
from lategrad.rules.rule import Average, Delay, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar


class AsyncAdaGradState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    z: Tensor  # for every coordinate 1 plus the sum of the squared gradients, float64
    mean: Tensor  # the average of x_1 .. x_t; without averaging it has no entries
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class AsyncAdaGrad(AveragedIterate):
    r"""AsyncAdaGrad: AdaGrad, coordinate by coordinate, on gradients that happen to be late.

    .. math:: z \leftarrow z + g^2, \qquad x \leftarrow \Pi_K(x - \mathrm{lr}\, g / \sqrt{z})

    The descent form (Duchi et al. average in the dual): :class:`AdaptiveRevision` without the revision and without the
    products of gradients that missed each other, which are all that delays change there.

    Source: checked against M. Li's implementation (dmlc/wormhole, ``AdaGradHandle``), which divides by
    :math:`1 + \sqrt{\sum g^2}` where this divides by :math:`\sqrt{1 + \sum g^2}`, as :class:`AdaptiveRevision` does;
    neither paper was found in full. Ours: that start, and the averages. The projection is coordinate by coordinate in
    theory (WholeSpace, Box and their products); others are outside it.

    Args:
        lr: learning rate of a coordinate whose gradients are small; to be tuned.
        domain: K, the constraint set.
        average: of the queries, which is the output: "uniform", "linear" or "none", as in :class:`~lategrad.SGD`.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AsyncAdaGrad(lr=1.0, average="none")
    >>> state = rule.init(torch.zeros(2))
    >>> rule.output(rule.update(state, torch.tensor([3.0, 0.1]), torch.tensor(0)))
    tensor([-0.9487, -0.0995])

    Must know: nothing.

    Guarantee: of the form that averages in the dual, where delays are bounded and data is sparse; none for this form.

    References: J. Duchi, M. Jordan and H. B. McMahan, Estimation, optimization, and parallelism when data is sparse,
    2013; H. B. McMahan and M. Streeter, Delay-tolerant algorithms for asynchronous distributed online learning, 2014.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    average: Average = "uniform"

    def init(self, x0: Tensor) -> AsyncAdaGradState:
        x = first_query(self, x0)
        z = torch.ones_like(x, dtype=torch.float64)
        return AsyncAdaGradState(x=x, z=z, mean=start_mean(x, self.average), t=per_run(x, 0))

    def update(self, state: AsyncAdaGradState, grad: Tensor, delay: Delay) -> AsyncAdaGradState:
        t = state.t + 1
        z = state.z + grad.double() ** 2
        x = self.domain.project(state.x - (self.lr * grad / z.sqrt()).to(state.x.dtype))
        return AsyncAdaGradState(x=x, z=z, mean=next_mean(state.mean, state.x, t, self.average), t=t)
