"""FedAsync (Xie, Koyejo & Gupta 2019): the server's model mixed with each worker's, the later the less."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lategrad.rules._common import CarriesQuery, IterateOnly, IterateState
from lategrad.rules.rule import Delay, as_number, average_in
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import NonNegative, Scalar


@dataclass(frozen=True, eq=False)
class FedAsync(CarriesQuery, IterateOnly):
    r"""FedAsync: the share :math:`\alpha s(\tau)` of the way towards the model that a worker has arrived at.

    .. math:: x_{t+1} = \Pi_K\big((1 - \alpha s(\tau))\, x_t + \alpha s(\tau)\, (x_{t-\tau} - g)\big), \qquad
        s(\tau) = 1, \quad (1 + \tau)^{-a} \quad\text{or}\quad \min\Big(1, \frac{1}{1 + a (\tau - b)^+}\Big)

    where g is a pseudo-gradient, so that :math:`x_{t-\tau} - g` is the worker's model; a query therefore carries
    itself. On plain gradients the worker's model is one step of length 1.

    Source: checked against the authors' code (xcgoner/async_fl), whose delays count from 0 as ours do. Its
    :math:`\alpha` is 0.9 by default and 0.8 in its script, and is halved once; ours stays. The defaults 0.6, 0.5, 10
    and 4 are those of the paper as we remember it, not of that code. Ours: the projection.

    Args:
        mixing: :math:`\alpha`. Above 1 it overshoots the worker's model.
        domain: K, the constraint set.
        staleness: "constant", "polynomial" or "hinge".
        power: a of the polynomial.
        slope: a of the hinge.
        grace: b of the hinge.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.FedAsync(mixing=0.5)
    >>> state = rule.init(torch.zeros(1))
    >>> state = rule.update(state, torch.tensor([1.0]), torch.tensor(0), rule.ticket(state))
    >>> rule.query(state)  # half-way to -1
    tensor([-0.5000])
    >>> rule.query(rule.update(state, torch.tensor([1.0]), torch.tensor(3), torch.zeros(1)))  # a quarter of the way
    tensor([-0.6250])

    Must know: the delay of every gradient.

    Guarantee: in its paper, for local SGD on weakly convex objectives, with bounded delays and without a projection.

    Reference: C. Xie, S. Koyejo and I. Gupta, Asynchronous federated optimization, 2019.
    """

    mixing: NonNegative[Scalar] = 0.6
    domain: ConvexSet = WholeSpace()
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    power: NonNegative[Scalar] = 0.5
    slope: NonNegative[Scalar] = 10.0
    grace: NonNegative[Scalar] = 4.0

    def _weight(self, delay: Tensor) -> Tensor:
        """s, of shape ``(*runs, 1)`` or one for all runs."""
        if self.staleness == "polynomial":
            return (1 + delay) ** -self.power
        if self.staleness == "hinge":
            return 1 / (1 + self.slope * (delay - self.grace).clamp_min(0))
        return torch.ones_like(delay)

    def update(self, state: IterateState, grad: Tensor, delay: Delay, ticket: Tensor) -> IterateState:
        share = self.mixing * self._weight(as_number(delay))
        return IterateState(x=self.domain.project(average_in(state.x, ticket - grad, share)))
