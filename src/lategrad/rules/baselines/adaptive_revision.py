"""AdaptiveRevision (McMahan & Streeter 2014): AdaGrad that takes back the steps it made without knowing better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import AVERAGES, Delay, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_choice, require_number


class AdaptiveRevisionState(NamedTuple):
    """State of :class:`AdaptiveRevision`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    grad_sum: Tensor
    """:math:`\\bar g`, the sum of all gradients received, float64."""
    z: Tensor
    """For every coordinate 1 plus the squares of the gradients and their products with those they missed, float64."""
    z_max: Tensor
    """:math:`z'`, the largest z so far, float64."""
    mean: Tensor
    """The average of :math:`x_1, \\dots, x_t`; without averaging it has no entries."""
    t: Tensor
    """Updates so far."""


@dataclass(frozen=True, eq=False)
class AdaptiveRevision:
    r"""AdaptiveRevision: per coordinate AdaGrad with late gradients, whose past steps are revised.

    A query carries the gradient sum :math:`\bar g_{\mathrm{old}}` of the moment it was handed out; what has
    arrived since is :math:`b = \bar g - \bar g_{\mathrm{old}}`. For every coordinate, with
    :math:`\eta = \mathrm{lr}/\sqrt{z'}`, :math:`z = z' = 1` at the start:

    .. math::

        z \leftarrow z + g^2 + 2 g b, \quad z' \leftarrow \max(z, z'), \quad
        x \leftarrow \Pi_K(x - \eta_{\mathrm{new}} g + (\eta_{\mathrm{old}} - \eta_{\mathrm{new}}) b), \quad
        \bar g \leftarrow \bar g + g

    The revision in the third step takes back a part of the steps that were made, too long, while g was on its
    way. lr is tuned. Reported by its authors to beat AdaGrad
    at delays of 1000 and more. It has a regret bound, so that the average of the queries is the output in
    theory; the authors run the last iterate. The algorithm is written from memory of the paper. The
    projection is ours and outside its theory.

    Args:
        lr: the paper's :math:`\alpha`.
        domain: K.
        average: the output is the average of :math:`x_1, \dots, x_T` with weights 1 ("uniform") or t
            ("linear"), or the last iterate ("none").

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdaptiveRevision(lr=1.0, average="none")
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # two workers read x_1
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), ticket)
    >>> rule.output(state)  # z' = 2
    tensor([-0.7071])
    >>> rule.output(rule.update(state, torch.tensor([1.0]), torch.tensor(1), ticket))  # z' = 5: -2/sqrt(5)
    tensor([-0.8944])

    Must know: the gradient sum of the moment at which the query was handed out, its ticket; nothing of the
    smoothness, and no bound on the delays.

    Guarantee: in its paper, a bound on the regret for every coordinate and any delays, without a projection.

    Reference: H. B. McMahan and M. Streeter, Delay-tolerant algorithms for asynchronous distributed online
    learning, 2014.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    average: str = "uniform"

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_choice("average", self.average, AVERAGES)

    def init(self, x0: Tensor) -> AdaptiveRevisionState:
        """Start at the projection of ``x0``, with z = z' = 1 and no gradient received."""
        x = first_query(self, x0)
        ones = torch.ones_like(x, dtype=torch.float64)
        mean = start_mean(x, self.average)
        return AdaptiveRevisionState(
            x=x, grad_sum=torch.zeros_like(ones), z=ones, z_max=ones.clone(), mean=mean, t=per_run(x, 0)
        )

    def query(self, state: AdaptiveRevisionState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: AdaptiveRevisionState) -> Tensor:
        """The sum of the gradients received before the query was handed out, float64."""
        return state.grad_sum

    def update(self, state: AdaptiveRevisionState, grad: Tensor, delay: Delay, ticket: Tensor) -> AdaptiveRevisionState:
        """One projected step, and the revision of the steps that were made since the query."""
        t = state.t + 1
        missed = state.grad_sum - ticket
        g = grad.double()
        eta_old = self.lr / state.z_max.sqrt()
        z = state.z + g**2 + 2 * g * missed
        z_max = torch.maximum(z, state.z_max)
        eta = self.lr / z_max.sqrt()
        move = -eta * g + (eta_old - eta) * missed
        return AdaptiveRevisionState(
            x=self.domain.project(state.x + move.to(state.x.dtype)),
            grad_sum=state.grad_sum + g,
            z=z,
            z_max=z_max,
            mean=next_mean(state.mean, state.x, t, self.average),
            t=t,
        )

    def output(self, state: AdaptiveRevisionState) -> Tensor:
        """The average of the queries that have had their update, or the last iterate."""
        return state.x if self.average == "none" else state.mean
