"""Rennala SGD (Tyurin & Richtárik 2023): minibatches collected from whoever is ready first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number


class RennalaState(NamedTuple):
    """State of :class:`Rennala`."""

    x: Tensor
    """The iterate."""
    batch_mean: Tensor
    """The mean of the gradients collected at x."""
    collected: Tensor
    """How many they are."""
    age: Tensor
    """Updates since x is the iterate: a gradient with a larger delay was taken at an older one."""


@dataclass(frozen=True, eq=False)
class Rennala:
    r"""Rennala SGD: wait for B gradients taken at the current x, then step with their mean.

    .. math:: x \leftarrow \Pi_K\Big(x - \frac{\mathrm{lr}}{B} \sum_{i=1}^{B} g_i\Big), \qquad g_i \text{ taken at } x

    Gradients taken at an older x are thrown away; the delay of a gradient tells. In theory B is
    of order :math:`\sigma^2/\epsilon`, at least 1, for the noise :math:`\sigma^2` and the squared gradient
    norm :math:`\epsilon` wanted, and lr of order 1/L; here lr is tuned and the default B = 10 is ours. The
    projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
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

    Guarantee: in its paper, on smooth objectives: the best possible time where each worker's speed stays, without a
    projection.

    Reference: A. Tyurin and P. Richtárik, Optimal time complexities of parallel stochastic optimization
    methods under a fixed computation model, 2023.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    batch: Scalar = 10

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("batch", self.batch, low=1)

    def init(self, x0: Tensor) -> RennalaState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return RennalaState(x=x, batch_mean=torch.zeros_like(x), collected=per_run(x, 0), age=per_run(x, 0))

    def query(self, state: RennalaState) -> Tensor:
        """The iterate, the same until a batch is full."""
        return state.x

    def update(self, state: RennalaState, grad: Tensor, delay: Delay) -> RennalaState:
        """Collect the gradient if it was taken at x; step and begin anew when the batch is full."""
        at_x = delay <= state.age
        collected = state.collected + at_x.double()
        joined = average_in(state.batch_mean, grad, 1 / collected.clamp_min(1))
        batch_mean = torch.where(at_x, joined, state.batch_mean)
        full = collected >= self.batch
        stepped = self.domain.project(state.x - as_dtype(self.lr, grad) * batch_mean)
        return RennalaState(
            x=torch.where(full, stepped, state.x),
            batch_mean=torch.where(full, 0.0, batch_mean),
            collected=torch.where(full, 0.0, collected),
            age=torch.where(full, 0.0, state.age + 1),
        )

    def output(self, state: RennalaState) -> Tensor:
        """The last iterate."""
        return state.x
