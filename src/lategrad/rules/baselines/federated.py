"""Federated learning without rounds: FedAsync (Xie et al. 2019) mixes each late model in, FedBuff (Nguyen et al. 2022)
waits for a buffer of them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import CarriesQuery, IterateOnly, IterateState, LastIterate
from lategrad.rules.rule import Delay, as_dtype, as_number, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, NonNegative, Scalar, require


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


class FedBuffState(NamedTuple):
    x: Tensor  # the iterate
    buffer: Tensor  # Delta, the weighted sum of the gradients since the last step
    arrivals: Tensor  # the number of gradients in the buffer
    work: Tensor  # the sum of their shares of the local steps; without ``normalize`` their number
    version: Tensor  # the number of times that x has changed


@dataclass(frozen=True, eq=False)
class FedBuff(LastIterate):
    r"""FedBuff: every arrival goes into a buffer, whatever its delay; when it holds K, one step with their mean.

    .. math:: \Delta \leftarrow \Delta + s(\tau)\, g, \qquad
        \text{every K-th time: } x \leftarrow \Pi(x - \mathrm{lr}\, \Delta / K),\ \Delta \leftarrow 0, \qquad
        s(\tau) = 1 / \sqrt{1 + \tau}

    The staleness :math:`\tau` is the number of times that x has changed since the gradient's query was handed out, so a
    query carries that number, and ``delay``, which counts arrivals, is not used.

    Where workers take different numbers of local steps, those that take more go further and pull the mean to what is
    best on their data. ``normalize=True`` is FedNova's remedy: with :math:`\omega_i`, the share of the H local steps
    that gradient i stands for, each counts by its direction per step, and the step has the length of their mean work:

    .. math:: x \leftarrow \Pi\Big(x - \mathrm{lr}\,
        \frac{\sum_i \omega_i}{K}\, \frac1K \sum_i s(\tau_i) \frac{g_i}{\omega_i}\Big)

    Without staleness and a constraint set, and with K the number of workers, it is FedNova for inner SGD, whose steps
    all count alike; other inner optimizers are treated as if theirs did. Gradients that are scaled by their workers
    (``LocalSteps(scaled=True)``) have been divided by their steps already.

    Source: checked against the authors' simulator (facebookresearch/FLSim, ``async_aggregators.py``): weights
    :math:`(1 + \tau)^{-p}`, K = 10, a staleness that counts changes of the model. It sums where this takes the mean, so
    that its learning rate is ours divided by K, and its p has no default; 1/2 is the paper's. Ours: ``normalize`` under
    staleness, and the projection.

    Args:
        lr: the server's learning rate; 1 is the mean of the workers' models where gradients are pseudo-gradients.
        domain: the constraint set, which :math:`\Pi` projects onto.
        size: K >= 1, the authors' 10.
        discount: whether stale gradients weigh less, as the authors advise; False for s = 1.
        normalize: whether gradients are divided by their shares of the local steps.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.FedBuff(lr=1.0, size=2)
    >>> state = rule.init(torch.zeros(1))
    >>> first = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(4):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), first)
    ...     print(f"{rule.query(state).item():.3f}")  # x has changed once before the last two
    0.000
    -1.000
    -1.000
    -1.707

    Must know: K.

    Guarantee: in its paper, for local SGD on smooth objectives with bounded staleness, without a projection.

    Reference: J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek and D. Huba, Federated learning with
    buffered asynchronous aggregation, 2022. Normalized: J. Wang, Q. Liu, H. Liang, G. Joshi and H. V. Poor, Tackling
    the objective inconsistency problem in heterogeneous federated optimization, 2020.
    """

    lr: NonNegative[Scalar] = 1.0
    domain: ConvexSet = WholeSpace()
    size: AtLeastOne[Scalar] = 10
    discount: bool = True
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require("size", self.size, self.size % 1 == 0, "a whole number")

    def init(self, x0: Tensor) -> FedBuffState:
        x = first_query(self, x0)
        zero = per_run(x, 0)
        return FedBuffState(x=x, buffer=torch.zeros_like(x), arrivals=zero, work=zero.clone(), version=zero.clone())

    def ticket(self, state: FedBuffState) -> Tensor:
        """The version of x, and with ``normalize`` also :math:`\\omega`, 1 until :meth:`weigh` says otherwise."""
        return torch.cat([state.version, torch.ones_like(state.version)], -1) if self.normalize else state.version

    def weigh(self, ticket: Tensor, weight: Tensor) -> Tensor:
        """The ticket of a worker that took this share of the local steps."""
        return torch.cat([ticket[..., :1], ticket[..., 1:] * weight], -1) if self.normalize else ticket

    def update(self, state: FedBuffState, grad: Tensor, delay: Delay, ticket: Tensor) -> FedBuffState:
        staleness = state.version - ticket[..., :1]
        weight = torch.rsqrt(1 + staleness) if self.discount else torch.ones_like(staleness)
        share = ticket[..., 1:] if self.normalize else torch.ones_like(staleness)
        buffer = state.buffer + (weight / share).to(grad.dtype) * grad
        arrivals, work = state.arrivals + 1, state.work + share
        full = arrivals >= self.size
        mean = (work / arrivals).to(grad.dtype) * (buffer / arrivals.to(grad.dtype))
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * mean)
        x, version = torch.where(full, x, state.x), state.version + full.double()
        buffer, arrivals, work = (torch.where(full, 0.0, value) for value in (buffer, arrivals, work))
        return FedBuffState(x=x, buffer=buffer, arrivals=arrivals, work=work, version=version)
