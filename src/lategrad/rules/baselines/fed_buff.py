"""FedBuff (Nguyen et al. 2022): a buffer of K arrivals, then one step with their mean."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, NonNegative, Scalar, require


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
