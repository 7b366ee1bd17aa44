"""Adam in the eigenbasis of the gradients' covariance: SOAP (Vyas et al. 2025), basis rotation (Jung et al. 2026)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import LastIterate, Moments
from lategrad.rules._orthogonalize import matrix_batches
from lategrad.rules.blocks import Block, Blocks
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, PositiveCount, Scalar


class RotatedAdamState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments  # the second of rotated gradients
    factors: tuple[Tensor, ...]  # L and R of all matrices of one shape, then of the next: (*runs, count * side * side)
    bases: tuple[Tensor, ...]  # Q_L and Q_R, likewise
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class RotatedAdam(LastIterate):
    r"""Adam in the eigenvectors of the means of :math:`GG^\top` and :math:`G^\top G`, for every matrix.

    .. math:: \tilde G = Q_L^\top G\, Q_R, \qquad M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad
        V \leftarrow \beta_2 V + (1 - \beta_2)\, \tilde G^2, \\
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\; Q_L
            \frac{Q_L^\top M Q_R / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon}\, Q_R^\top, \\
        L \leftarrow \beta_2 L + (1 - \beta_2)\, GG^\top, \qquad R \leftarrow \beta_2 R + (1 - \beta_2)\, G^\top G,
        \qquad Q_L \leftarrow \mathrm{qr}(L\, Q_L), \quad Q_R \leftarrow \mathrm{qr}(R\, Q_R)
        \quad \text{once in 10 updates}

    where qr is the orthogonal factor. Everything else, embeddings and the layer with a row for each token included,
    takes the update of :class:`AdamW`; so does all without blocks.

    Source: the order of the lines and the bases are those of SOAP's code (nikhilvyas/SOAP, ``soap.py``), the constants
    those of the authors of basis rotation (LOG-postech/basis-rotation, ``README.md``, ``main_with_runtime.py``; that L
    and R forget as V does is from a summary of their paper). SOAP has :math:`\beta` = (0.95, 0.95). Ours: bases begin
    as the identity, where SOAP skips the first update to compute eigenvectors; matrix k of a shape has its turn at
    updates t = k modulo 10, where theirs all have it at once; columns are not sorted by their eigenvalues, as the
    iteration sorts them; no clipping of gradients; the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        beta1, beta2, eps, weight_decay: 0.9, 0.999, 1e-8 and :math:`\lambda` = 0.01, as in :class:`AdamW`.
        period: updates from one renewal of a basis to the next.
        blocks: where the matrices are; hosts fill it in.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.RotatedAdam(lr=0.1, period=1, blocks=lg.rules.Blocks.of_tensors([torch.zeros(3, 4)]))
    >>> state = rule.init(torch.zeros(12))
    >>> for t in range(20):
    ...     state = rule.update(state, torch.arange(12.0), delay=torch.tensor(0))
    >>> left = state.bases[0].view(3, 3)  # the gradient has rank 2: one row and column of the rotated one vanish
    >>> (left.mT @ torch.arange(12.0).view(3, 4)).norm(dim=1).round(decimals=2)
    tensor([22.4100,  1.9600,  0.0000])

    Must know: which entries are matrices.

    Guarantee: none for this form; the authors of basis rotation prove a rate under delay without momentum.

    References: N. Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2025 (arXiv 2409.11321); H. Jung,
    S. Shin and N. Lee, Mitigating staleness in asynchronous pipeline parallelism via basis rotation, 2026 (arXiv
    2602.03515).
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    period: PositiveCount = 10
    blocks: Blocks | None = None

    def init(self, x0: Tensor) -> RotatedAdamState:
        x = first_query(self, x0)
        bases = []
        for blocks, places in self._alike():
            count = len(places) * (blocks[0].count or 1)
            bases += [torch.eye(side, dtype=x.dtype, device=x.device).flatten().repeat(*x.shape[:-1], count)
                      for side in blocks[0].matrix_shape[-2:]]  # fmt: skip
        factors = tuple(map(torch.zeros_like, bases))
        return RotatedAdamState(x=x, moments=Moments.start(x), factors=factors, bases=tuple(bases), t=per_run(x, 0))

    def update(self, state: RotatedAdamState, grad: Tensor, delay: Delay) -> RotatedAdamState:
        t, bases = state.t + 1, state.bases
        first = self.beta1 * state.moments.first + (1 - self.beta1) * grad
        rotated = self._rotate(grad, bases)
        second = self.beta2 * state.moments.second + (1 - self.beta2) * rotated * rotated
        step = Moments(self._rotate(first, bases), second).direction(t, self.beta1, self.beta2, self.eps)
        direction = self._rotate(step, bases, back=True) + self.weight_decay * state.x
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        products = [pair for g in self._matrices(grad) for pair in (g @ g.mT, g.mT @ g)]
        factors = tuple(torch.lerp(new.flatten(-3), old, self.beta2)
                        for old, new in zip(state.factors, products, strict=True))  # fmt: skip
        renewed = [_renew(q, factor, new.shape[-1], t, self.period)
                   for q, factor, new in zip(bases, factors, products, strict=True)]  # fmt: skip
        return RotatedAdamState(x=x, moments=Moments(first, second), factors=factors, bases=tuple(renewed), t=t)

    def _alike(self) -> list[tuple[list[Block], list[int]]]:
        """The matrices of each shape, and their positions among the tensors."""
        if self.blocks is None:
            return []
        blocks = self.blocks.without_tokens()
        return [([blocks.parts[i] for i in places], places) for places in matrix_batches(blocks, blocks.size)]

    def _matrices(self, x: Tensor) -> list[Tensor]:
        """``(*runs, count, rows, columns)`` for each shape."""
        runs, parts = x.dim() - 1, [] if self.blocks is None else self.blocks.split(x)
        return [
            torch.cat([parts[i].reshape(*x.shape[:-1], -1, *blocks[0].matrix_shape[-2:]) for i in places], runs)
            for blocks, places in self._alike()
        ]

    def _rotate(self, x: Tensor, bases: Sequence[Tensor], back: bool = False) -> Tensor:
        """The vector with every matrix in the coordinates of its bases, or ``back`` from there."""
        if self.blocks is None:
            return x
        parts = self.blocks.split(x)
        for (_, places), one, left, right in zip(
            self._alike(), self._matrices(x), bases[::2], bases[1::2], strict=True
        ):
            left, right = _squares(left, one.shape[-2]), _squares(right, one.shape[-1])
            turned = left @ one @ right.mT if back else left.mT @ one @ right
            for i, own in zip(places, turned.chunk(len(places), dim=-3), strict=True):
                parts[i] = own.reshape(parts[i].shape)
        return self.blocks.join(parts)


def _squares(flat: Tensor, side: int) -> Tensor:
    return flat.view(*flat.shape[:-1], -1, side, side)


def _renew(basis: Tensor, factor: Tensor, side: int, t: Tensor, period: int) -> Tensor:
    """A step of orthogonal iteration for the matrices whose turn it is: as many in every update, without a branch."""
    basis, factor = _squares(basis, side), _squares(factor, side)
    count = basis.shape[-3]
    number = t.long() % period + period * torch.arange(math.ceil(count / period), device=t.device)
    at = (number % count)[..., None, None].expand(*number.shape, side, side)  # no matrix twice
    chosen = basis.gather(-3, at)
    renewed: Tensor = torch.linalg.qr(factor.gather(-3, at) @ chosen).Q
    renewed = torch.where((number < count)[..., None, None], renewed, chosen)
    return basis.scatter(-3, at, renewed).flatten(-3)
