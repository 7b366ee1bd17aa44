"""Ringmaster ASGD (Maranjyan, Tyurin & Richtárik 2025): gradients that are too late are thrown away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number


class RingmasterState(NamedTuple):
    """State of :class:`Ringmaster`."""

    x: Tensor
    """The iterate."""
    made: Tensor
    """k, the number of steps made; gradients that were thrown away do not count."""


@dataclass(frozen=True, eq=False)
class Ringmaster:
    r"""Ringmaster ASGD: a step if fewer than R steps were made since the gradient's query, else nothing.

    .. math::

        x \leftarrow \Pi_K(x - \mathrm{lr}\, g), \quad k \leftarrow k + 1 \qquad \text{if } k - k_{\mathrm{query}} < R

    The delay that counts is the number of steps *made* since the query was handed out: a gradient that is
    thrown away is an update of the server, but no step. A query therefore carries the number of steps made,
    and ``delay`` is not used. (With the server's own count a constant delay of R or more would throw away
    everything for ever.)

    In theory R is :math:`\sigma^2/\epsilon`, rounded up and at least 1, for the noise
    :math:`\sigma^2` and the squared gradient norm :math:`\epsilon` wanted, and lr is of order 1/(LR); here
    lr is tuned and the default R = 10 is ours. The projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
        threshold: R >= 1.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.Ringmaster(lr=1.0, threshold=3)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(10):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), ticket)
    >>> rule.query(state)
    tensor([-3.])

    Must know: the steps made when the query was handed out, its ticket, and R; not the delay.

    Guarantee: in its paper, on smooth objectives: the best possible time, also where speeds change, without a
    projection.

    Reference: A. Maranjyan, A. Tyurin and P. Richtárik, Ringmaster ASGD: the first asynchronous SGD with
    optimal time complexity, 2025, the variant that stops no computation.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    threshold: Scalar = 10

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("threshold", self.threshold, low=1)

    def init(self, x0: Tensor) -> RingmasterState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return RingmasterState(x=x, made=per_run(x, 0))

    def query(self, state: RingmasterState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: RingmasterState) -> Tensor:
        """The number of steps made before the query was handed out, shape ``(*runs, 1)``."""
        return state.made

    def update(self, state: RingmasterState, grad: Tensor, delay: Delay, ticket: Tensor) -> RingmasterState:
        """One projected step, or none."""
        in_time = state.made - ticket < self.threshold
        stepped = self.domain.project(state.x - as_dtype(self.lr, grad) * grad)
        return RingmasterState(x=torch.where(in_time, stepped, state.x), made=state.made + in_time.double())

    def output(self, state: RingmasterState) -> Tensor:
        """The last iterate."""
        return state.x
