"""FedBuff (Nguyen et al. 2022): a buffer of K arrivals, then one step with their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
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

    Args:
        lr: the server's step; 1 is the mean of the workers' models where gradients are pseudo-gradients.
        domain: the set that :math:`\Pi` projects onto.
        size: K >= 1, the authors' 10.
        weighed: whether stale gradients weigh less, as the authors advise; False for s = 1.

    >>> import torch, lategrad as lg
    >>> rule = lg.rivals.FedBuff(lr=1.0, size=2)
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
    buffered asynchronous aggregation, 2022.
    """

    lr: Scalar = 1.0
    domain: ConvexSet = WholeSpace()
    size: Scalar = 10
    weighed: bool = True

    def __post_init__(self) -> None:
        require_number("lr", self.lr, low=0)
        require_number("size", self.size, low=1)
        require("size", self.size, self.size % 1 == 0, "a whole number")
        require("weighed", self.weighed, isinstance(self.weighed, bool), "True or False")

    def init(self, x0: Tensor) -> FedBuffState:
        """Start at the projection of ``x0``, with an empty buffer."""
        x = first_query(self, x0)
        return FedBuffState(x=x, buffer=torch.zeros_like(x), collected=per_run(x, 0), made=per_run(x, 0))

    def query(self, state: FedBuffState) -> Tensor:
        """The iterate, the same until the buffer is full."""
        return state.x

    def ticket(self, state: FedBuffState) -> Tensor:
        """The number of steps made before the query was handed out, shape ``(*runs, 1)``."""
        return state.made

    def update(self, state: FedBuffState, grad: Tensor, delay: Delay, ticket: Tensor) -> FedBuffState:
        """Put the gradient into the buffer; step and empty it when it is full."""
        staleness = state.made - ticket
        weight = torch.rsqrt(1 + staleness) if self.weighed else torch.ones_like(staleness)
        buffer = state.buffer + weight.to(grad.dtype) * grad
        collected = state.collected + 1
        full = collected >= self.size
        mean = buffer / collected.to(grad.dtype)
        stepped = self.domain.project(state.x - as_dtype(self.lr, grad) * mean)
        return FedBuffState(
            x=torch.where(full, stepped, state.x),
            buffer=torch.where(full, 0.0, buffer),
            collected=torch.where(full, 0.0, collected),
            made=state.made + full.double(),
        )

    def output(self, state: FedBuffState) -> Tensor:
        """The last iterate."""
        return state.x
