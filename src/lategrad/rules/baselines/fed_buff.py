"""FedBuff (Nguyen et al. 2022): a buffer of K arrivals, then one step with their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require, require_number


class FedBuffState(NamedTuple):
    """State of :class:`FedBuff`."""

    x: Tensor
    """The iterate."""
    buffer: Tensor
    """:math:`\\Delta`, the weighed sum of what has come since the last step."""
    collected: Tensor
    """How many they are."""
    work: Tensor
    """How many whole jobs they stand for, where that is asked."""
    made: Tensor
    """Steps made so far."""


@dataclass(frozen=True, eq=False)
class FedBuff:
    r"""FedBuff: whatever arrives goes into a buffer, however late; when it holds K, one step with their mean.

    .. math::

        \Delta \leftarrow \Delta + s(\tau)\, g, \qquad
        \text{every K-th time: } x \leftarrow \Pi(x - \mathrm{lr}\, \Delta / K),\ \Delta \leftarrow 0, \qquad
        s(\tau) = 1 / \sqrt{1 + \tau}

    The staleness :math:`\tau` is the number of steps *made* since the gradient's query was handed out, so a query
    carries that number, and ``delay``, which counts arrivals, is not used. The projection is ours and outside its
    theory.

    Where workers take different numbers of local steps, those that take more go further and pull the mean to what is
    best on their data. ``normalised=True`` is FedNova's remedy: with :math:`\omega_i`, the share of the H steps that
    gradient i stands for, each counts by its direction per step, and the step has the length of their mean work:

    .. math::

        x \leftarrow \Pi\Big(x - \mathrm{lr}\,
        \frac{\sum_i \omega_i}{K}\, \frac1K \sum_i s(\tau_i) \frac{g_i}{\omega_i}\Big)

    Without staleness and a set, and with K the number of workers, it is FedNova for inner SGD, whose steps all count
    alike; other inner optimizers are taken as if theirs did. Gradients that are scaled by their workers
    (``LocalSteps(scaled=True)``) have been divided by their steps already.

    Args:
        lr: the server's step; 1 is the mean of the workers' models where gradients are pseudo-gradients.
        domain: the set that :math:`\Pi` projects onto.
        size: K >= 1, the authors' 10.
        weighed: whether stale gradients weigh less, as the authors advise; False for s = 1.
        normalised: whether gradients are divided by their shares of the local steps.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.FedBuff(lr=1.0, size=2)
    >>> state = rule.init(torch.zeros(1))
    >>> first = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(4):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), first)
    ...     print(f"{rule.query(state).item():.3f}")  # the last two are one step late
    0.000
    -1.000
    -1.000
    -1.707

    Must know: K.

    Guarantee: in its paper, for local SGD on smooth objectives with bounded staleness, without a projection.

    Reference: J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek and D. Huba, Federated learning with
    buffered asynchronous aggregation, 2022. Normalised: J. Wang, Q. Liu, H. Liang, G. Joshi and H. V. Poor, Tackling
    the objective inconsistency problem in heterogeneous federated optimization, 2020.
    """

    lr: Scalar = 1.0
    domain: ConvexSet = WholeSpace()
    size: Scalar = 10
    weighed: bool = True
    normalised: bool = False

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("size", self.size, low=1)
        require("size", self.size, self.size % 1 == 0, "a whole number")
        for name in ("weighed", "normalised"):
            require(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")

    def init(self, x0: Tensor) -> FedBuffState:
        """Start at the projection of ``x0``, with an empty buffer."""
        x = first_query(self, x0)
        none = per_run(x, 0)
        return FedBuffState(x=x, buffer=torch.zeros_like(x), collected=none, work=none.clone(), made=none.clone())

    def query(self, state: FedBuffState) -> Tensor:
        """The iterate, the same until the buffer is full."""
        return state.x

    def ticket(self, state: FedBuffState) -> Tensor:
        """The number of steps made before the query was handed out; normalised, also :math:`\\omega`, 1 so far."""
        return torch.cat([state.made, torch.ones_like(state.made)], -1) if self.normalised else state.made

    def weigh(self, ticket: Tensor, weight: Tensor) -> Tensor:
        """With the share of the local steps that the worker took, where that is asked."""
        return torch.cat([ticket[..., :1], ticket[..., 1:] * weight], -1) if self.normalised else ticket

    def update(self, state: FedBuffState, grad: Tensor, delay: Delay, ticket: Tensor) -> FedBuffState:
        """Put the gradient into the buffer; step and empty it when it is full."""
        staleness = state.made - ticket[..., :1]
        weight = torch.rsqrt(1 + staleness) if self.weighed else torch.ones_like(staleness)
        share = ticket[..., 1:] if self.normalised else torch.ones_like(staleness)
        buffer = state.buffer + (weight / share).to(grad.dtype) * grad
        collected, work = state.collected + 1, state.work + share
        full = collected >= self.size
        mean = (work / collected).to(grad.dtype) * (buffer / collected.to(grad.dtype))
        stepped = self.domain.project(state.x - as_dtype(self.lr, grad) * mean)
        return FedBuffState(
            x=torch.where(full, stepped, state.x),
            buffer=torch.where(full, 0.0, buffer),
            collected=torch.where(full, 0.0, collected),
            work=torch.where(full, 0.0, work),
            made=state.made + full.double(),
        )

    def output(self, state: FedBuffState) -> Tensor:
        """The last iterate."""
        return state.x
