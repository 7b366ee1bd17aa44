"""Ringmaster with an orthogonalised step (2026): Muon on the gradients that are not too late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules.baselines.muon import in_matrices
from lategrad.rules.blocks import Blocks
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number, require_share


class RingmasterMuonState(NamedTuple):
    """State of :class:`RingmasterMuon`."""

    x: Tensor
    """The iterate."""
    momentum: Tensor
    """M, the moving average of the gradients that were used."""
    made: Tensor
    """k, the number of steps made; gradients that were thrown away do not count."""


@dataclass(frozen=True, eq=False)
class RingmasterMuon:
    r"""A step along the linear minimiser of the momentum if fewer than R steps were made since the query, else nothing.

    .. math::

        M \leftarrow \mu M + (1 - \mu) g, \quad x \leftarrow \Pi_K(x - \mathrm{lr}\, \mathrm{lmo}(M)), \quad
        k \leftarrow k + 1 \qquad \text{if } k - k_{\mathrm{query}} < R

    On a matrix of r rows and c columns lmo is :math:`0.2\sqrt{\max(r, c)}` times its orthogonal factor, as in
    :class:`Muon`; on everything else it is 0.2 times the sign, the minimiser in the largest norm, so that both have
    the size of Adam's steps. As in :class:`Ringmaster` the delay that counts is the number of steps *made* since the
    query was handed out, which the query carries. Written from memory of the paper; R = 10, the factor of the sign and
    :math:`\mu` = 0.95 (Muon's) are ours; there is no weight decay. The projection is ours and outside its theory.

    Args:
        lr: the step.
        domain: K.
        threshold: R >= 1.
        momentum: :math:`\mu`.
        blocks: where the matrices are; hosts fill it in.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.RingmasterMuon(lr=1.0, threshold=3)
    >>> state = rule.init(torch.zeros(1))
    >>> ticket = rule.ticket(state)  # all gradients come from x_1
    >>> for tau in range(10):
    ...     state = rule.update(state, torch.tensor([1.0]), torch.tensor(tau), ticket)
    >>> rule.query(state)
    tensor([-0.6000])

    Must know: the steps made when the query was handed out, its ticket, R, and which entries are matrices.

    Guarantee: in its paper; none that we know of for this form, with a projection.

    Reference: Ringmaster LMO: asynchronous linear minimization oracle momentum method, arXiv 2605.18174, 2026.
    """

    lr: Scalar
    domain: ConvexSet = WholeSpace()
    threshold: Scalar = 10
    momentum: float = 0.95
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("lr", self.lr, low=0)
        require_number("threshold", self.threshold, low=1)
        require_share("momentum", self.momentum)

    def init(self, x0: Tensor) -> RingmasterMuonState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return RingmasterMuonState(x=x, momentum=torch.zeros_like(x), made=per_run(x, 0))

    def query(self, state: RingmasterMuonState) -> Tensor:
        """The iterate."""
        return state.x

    def ticket(self, state: RingmasterMuonState) -> Tensor:
        """The number of steps made before the query was handed out, shape ``(*runs, 1)``."""
        return state.made

    def update(self, state: RingmasterMuonState, grad: Tensor, delay: Delay, ticket: Tensor) -> RingmasterMuonState:
        """One projected step, or none."""
        in_time = state.made - ticket < self.threshold
        momentum = self.momentum * state.momentum + (1 - self.momentum) * grad
        direction = in_matrices(self.blocks, momentum, 0 * momentum, 0.2 * momentum.sign())
        stepped = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        return RingmasterMuonState(
            x=torch.where(in_time, stepped, state.x),
            momentum=torch.where(in_time, momentum, state.momentum),
            made=state.made + in_time.double(),
        )

    def output(self, state: RingmasterMuonState) -> Tensor:
        """The last iterate."""
        return state.x
