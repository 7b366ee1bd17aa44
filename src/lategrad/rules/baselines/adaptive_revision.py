"""AdaptiveRevision (McMahan & Streeter 2014), AdaGrad that revises its past steps once late gradients are known, and
AsyncAdaGrad, which treats them as if they were on time."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import AveragedIterate
from lategrad.rules.rule import Average, Delay, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import NonNegative, Scalar


class AdaptiveRevisionState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    grad_sum: Tensor  # the paper's g-bar, the sum of all gradients received, float64
    z: Tensor  # 1 + squares of gradients and twice their products with those they missed, float64
    z_max: Tensor  # z', the largest z so far, float64
    mean: Tensor  # the average of x_1 .. x_t; without averaging it has no entries
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class AdaptiveRevision(AveragedIterate):
    r"""AdaptiveRevision: AdaGrad per coordinate that revises its past steps when a late gradient arrives.

    A query carries the gradient sum :math:`\bar g_{\mathrm{old}}` at the time it was handed out; what has arrived
    since is :math:`b = \bar g - \bar g_{\mathrm{old}}`. For every coordinate, with
    :math:`\eta = \mathrm{lr}/\sqrt{z'}`, :math:`z = z' = 1` at the start:

    .. math:: z \leftarrow z + g^2 + 2 g b, \quad z' \leftarrow \max(z, z'), \quad
        x \leftarrow \Pi_K(x - \eta_{\mathrm{new}} g + (\eta_{\mathrm{old}} - \eta_{\mathrm{new}}) b), \quad
        \bar g \leftarrow \bar g + g

    The revision in the third step takes back a part of the steps that were made, too long, while g was on its way.

    Source: checked against the implementation of M. Li (dmlc/wormhole, ``DTAdaGradHandle2``), which equals this one
    for its default ``beta`` = 1; the paper itself was read in its abstract. Ours: the projection, and the average of
    the queries, which the regret bound speaks of, as the default output.

    Args:
        lr: learning rate, the paper's :math:`\alpha`; to be tuned.
        domain: K, the constraint set.
        average: of the queries, which is the output: "uniform", "linear" or "none", as in :class:`~lategrad.SGD`.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdaptiveRevision(lr=1.0, average="none")
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), ticket)
    >>> rule.output(state)  # z' = 2
    tensor([-0.7071])
    >>> rule.output(rule.update(state, torch.tensor([1.0]), torch.tensor(1), ticket))  # z' = 5: -2/sqrt(5)
    tensor([-0.8944])

    Must know: the gradient sum when the query was handed out, its ticket; nothing of the smoothness and the delays.

    Guarantee: in its paper, a bound on the regret for every coordinate and any delays, without a projection.

    Reference: H. B. McMahan and M. Streeter, Delay-tolerant algorithms for asynchronous distributed online
    learning, 2014.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    average: Average = "uniform"

    def init(self, x0: Tensor) -> AdaptiveRevisionState:
        x = first_query(self, x0)
        z, mean = torch.ones_like(x, dtype=torch.float64), start_mean(x, self.average)
        return AdaptiveRevisionState(x=x, grad_sum=wide_zeros(x), z=z, z_max=z.clone(), mean=mean, t=per_run(x, 0))

    def ticket(self, state: AdaptiveRevisionState) -> Tensor:
        return state.grad_sum

    def update(self, state: AdaptiveRevisionState, grad: Tensor, delay: Delay, ticket: Tensor) -> AdaptiveRevisionState:
        t = state.t + 1
        g, missed = grad.double(), state.grad_sum - ticket
        eta_old = self.lr / state.z_max.sqrt()
        z = state.z + g**2 + 2 * g * missed
        z_max = torch.maximum(z, state.z_max)
        eta = self.lr / z_max.sqrt()
        move = -eta * g + (eta_old - eta) * missed
        x = self.domain.project(state.x + move.to(state.x.dtype))
        mean = next_mean(state.mean, state.x, t, self.average)
        return AdaptiveRevisionState(x=x, grad_sum=state.grad_sum + g, z=z, z_max=z_max, mean=mean, t=t)


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
