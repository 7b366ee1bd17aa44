"""Rules that throw late gradients away: Rennala SGD (Tyurin & Richtárik 2023), Ringmaster ASGD, and Ringmaster LMO for
Muon."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate
from lategrad.rules._orthogonalize import matrix_steps
from lategrad.rules.blocks import Blocks
from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import AtLeastOne, BelowOne, NonNegative, Scalar


class RennalaState(NamedTuple):
    x: Tensor  # the iterate
    batch_mean: Tensor  # the mean of the gradients collected at x
    arrivals: Tensor  # the number of gradients collected
    updates: Tensor  # updates since x last changed: a gradient with a larger delay was taken at an older x


@dataclass(frozen=True, eq=False)
class Rennala(LastIterate):
    r"""Rennala SGD: wait for B gradients taken at the current x, then step with their mean.

    .. math:: x \leftarrow \Pi_K\Big(x - \frac{\mathrm{lr}}{B} \sum_{i=1}^{B} g_i\Big), \qquad g_i \text{ taken at } x

    Gradients taken at an older x are thrown away; the delay of a gradient tells. In theory B is of order
    :math:`\sigma^2/\epsilon`, at least 1, for the noise :math:`\sigma^2` and the squared gradient norm
    :math:`\epsilon` wanted, and lr of order 1/L.

    Source: checked against the authors' code (vectozavr/ringmaster-lmo, ``RennalaSGD``) and Algorithm 1 of a later
    paper of A. Tyurin, which has "stop, or ignore" for the unfinished gradients. Ours: B = 10 (their code has no
    default and tunes 1 to 16), and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
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

    Guarantee: in its paper, on smooth objectives without a projection: the best time where each worker's speed stays.

    Reference: A. Tyurin and P. Richtárik, Optimal time complexities of parallel stochastic optimization
    methods under a fixed computation model, 2023.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    batch: AtLeastOne[Scalar] = 10

    def init(self, x0: Tensor) -> RennalaState:
        x = first_query(self, x0)
        return RennalaState(x=x, batch_mean=torch.zeros_like(x), arrivals=per_run(x, 0), updates=per_run(x, 0))

    def update(self, state: RennalaState, grad: Tensor, delay: Delay) -> RennalaState:
        at_x = delay <= state.updates
        arrivals = state.arrivals + at_x.double()
        mean = average_in(state.batch_mean, grad, 1 / arrivals.clamp_min(1))
        batch_mean = torch.where(at_x, mean, state.batch_mean)
        full = arrivals >= self.batch
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * batch_mean)
        rest = (torch.where(full, 0.0, value) for value in (batch_mean, arrivals, state.updates + 1))
        return RennalaState(torch.where(full, x, state.x), *rest)


class RingmasterState(NamedTuple):
    x: Tensor  # the iterate
    version: Tensor  # k, the number of times that x has changed; gradients that were thrown away do not count


@dataclass(frozen=True, eq=False)
class Ringmaster(LastIterate):
    r"""Ringmaster ASGD: an update if x has changed fewer than R times since the gradient's query, else nothing.

    .. math:: x \leftarrow \Pi_K(x - \mathrm{lr}\, g), \quad k \leftarrow k + 1
        \qquad \text{if } k - k_{\mathrm{query}} < R

    A gradient that is thrown away is an update of the server but leaves k as it is, so a query carries k, and ``delay``
    is not used. (With the server's own count a constant delay of R or more would throw away everything for ever.)

    In theory R is :math:`\sigma^2/\epsilon`, rounded up and at least 1, for the noise :math:`\sigma^2` and the squared
    gradient norm :math:`\epsilon` wanted, and lr is of order 1/(LR).

    Source: checked against the authors' code (vectozavr/ringmaster-lmo, ``RingmasterASGD``), which stops a computation
    as soon as its delay is R; this is the variant that lets it finish and throws it away. Ours: R = 10 (their code has
    no default), and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        threshold: R >= 1.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.Ringmaster(lr=1.0, threshold=3)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(10):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), ticket)
    >>> rule.query(state)
    tensor([-3.])

    Must know: k when the query was handed out, its ticket, and R; not the delay.

    Guarantee: in its paper, on smooth objectives without a projection: the best time, also where speeds change.

    Reference: A. Maranjyan, A. Tyurin and P. Richtárik, Ringmaster ASGD: the first asynchronous SGD with
    optimal time complexity, 2025, the variant that stops no computation.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    threshold: AtLeastOne[Scalar] = 10

    def init(self, x0: Tensor) -> RingmasterState:
        x = first_query(self, x0)
        return RingmasterState(x=x, version=per_run(x, 0))

    def ticket(self, state: RingmasterState) -> Tensor:
        return state.version

    def update(self, state: RingmasterState, grad: Tensor, delay: Delay, ticket: Tensor) -> RingmasterState:
        in_time = state.version - ticket < self.threshold
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * grad)
        return RingmasterState(x=torch.where(in_time, x, state.x), version=state.version + in_time.double())


class RingmasterMuonState(NamedTuple):
    x: Tensor  # the iterate
    momentum: Tensor  # M, the moving average of the gradients that were used
    version: Tensor  # k, the number of times that x has changed; gradients that were thrown away do not count


@dataclass(frozen=True, eq=False)
class RingmasterMuon(LastIterate):
    r"""Muon with momentum elsewhere, if x has changed fewer than R times since the gradient's query, else nothing.

    .. math:: M \leftarrow \mu M + (1 - \mu) g, \quad N = \mu M + (1 - \mu) g, \quad
        x \leftarrow \Pi_K(x - \mathrm{lr}\, d(N)), \quad k \leftarrow k + 1 \quad \text{if } k - k_{\mathrm{query}} < R

    On a matrix of r rows and c columns d is :math:`\sqrt{\max(1, r/c)}` times its orthogonal factor, on everything else
    N itself. As in :class:`Ringmaster` a query carries k, and ``delay`` is not used.

    Source: checked against the authors' code (vectozavr/ringmaster-lmo, ``RingmasterMuonASGD``), constants included:
    :math:`\mu` = 0.95, R = 2 (tuned from 1 to 16, with lr from 0.04 to 5). It stops a computation as soon as its delay
    is R, and orthogonalises by Polar Express; ours finishes and is thrown away. The projection is ours.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        threshold: R >= 1.
        momentum: :math:`\mu`.
        blocks: where the matrices are; hosts fill it in.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.RingmasterMuon(lr=1.0, threshold=3)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(10):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), ticket)
    >>> rule.query(state)  # N = 0.0975, 0.1426, 0.1855, then nothing
    tensor([-0.4256])

    Must know: k when the query was handed out, its ticket, R, and which entries are matrices.

    Guarantee: in its paper; with matrices alone, without a projection, also Theorem B of docs/theory-deep.md, W = R.

    Reference: Ringmaster LMO: asynchronous linear minimization oracle momentum method, arXiv 2605.18174, 2026.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    threshold: AtLeastOne[Scalar] = 2
    momentum: BelowOne[float] = 0.95
    blocks: Blocks | None = None

    def init(self, x0: Tensor) -> RingmasterMuonState:
        x = first_query(self, x0)
        return RingmasterMuonState(x=x, momentum=torch.zeros_like(x), version=per_run(x, 0))

    def ticket(self, state: RingmasterMuonState) -> Tensor:
        return state.version

    def _direction(self, nesterov: Tensor) -> Tensor:
        if self.blocks is None:
            return nesterov
        blocks = self.blocks.without_tokens()
        steps = matrix_steps(blocks, blocks.split(nesterov))  # 0.2 sqrt(max(r, c)) orth on matrices
        for i, block in enumerate(blocks.parts):
            if block.is_matrix:
                steps[i] = steps[i] * (5 / block.matrix_shape[-1] ** 0.5)  # sqrt(max(1, r/c)) orth
        return blocks.join(steps)

    def update(self, state: RingmasterMuonState, grad: Tensor, delay: Delay, ticket: Tensor) -> RingmasterMuonState:
        in_time = state.version - ticket < self.threshold
        momentum = self.momentum * state.momentum + (1 - self.momentum) * grad
        nesterov = self.momentum * momentum + (1 - self.momentum) * grad
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * self._direction(nesterov))
        x, momentum = torch.where(in_time, x, state.x), torch.where(in_time, momentum, state.momentum)
        return RingmasterMuonState(x=x, momentum=momentum, version=state.version + in_time.double())
