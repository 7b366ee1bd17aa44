"""The orthogonal factor of a matrix: the direction of Muon."""

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lategrad.rules._owners import at_owners, work_of
from lategrad.rules.blocks import Block, Blocks
from lategrad.support.sharded_vector import ShardedVector

_POLES = ((1.8960818006343127e-05, 0.009218828468513678), (0.0091860596284537, 0.1852775182968315))
_CONSTANT = 0.9619399092429526
"""Zolotarev's rational function of degree 5 for the sign on [0.002, 1]: x (_CONSTANT + sum of b / (x^2 + c)) over the
pairs (c, b) of _POLES is within 0.155 of 1 there, and no function of this degree is nearer."""

_POLYNOMIALS = (
    (8.343354, -24.202766, 17.594972),
    (4.070938, -2.969161, 0.547049),
    (3.677792, -2.696420, 0.516588),
    (2.754406, -2.013904, 0.441005),
    (1.993145, -1.375814, 0.387787),
)
"""Polar Express on [0.002, 1]: each (a, b, c) is the best a x + b x^3 + c x^5 for where the ones before it lead, which
is within 0.035 of 1; all but the last leave 1% of room for rounding."""

_LARGE = 256  # rows and columns from which bfloat16 is faster on a GPU
_SMALL = 128  # rows and columns up to which matrices are handled in batches on a CPU
_SHARED = 512  # rows and columns from which matrices are divided among threads of one core each, which factorise faster
_PADDING = 16  # more rows and columns where there are 256, 512, ...: caches have few places for columns 2^k bytes apart


def orthogonalise(x: Tensor, out: Tensor | None = None) -> Tensor:
    r"""About :math:`U V^\top` for :math:`x = U \Sigma V^\top`: all singular values become about 1.

    With :math:`s^2 = \|x x^\top\|_F`, which is at least the largest singular value squared, those of x above s / 500
    become values between 0.84 and 1.16 on a CPU and between 0.96 and 1.04 elsewhere; smaller ones are multiplied by at
    most 510 / s on a CPU and 690 / s elsewhere. A matrix of zeros stays zero.

    On a CPU, where arithmetic is what costs, by :math:`s^{-1} (a I + \sum_i b_i (x x^\top / s^2 + c_i I)^{-1})\, x`:
    the Gram matrix of the shorter side, two inverses by Cholesky's method, and one product with x. Elsewhere by five
    steps :math:`X \leftarrow a X + (b A + c A^2) X`, :math:`A = X X^\top`, which are nothing but matrix products; large
    float32 matrices on a GPU are multiplied in bfloat16, as in Muon's reference code.

    Args:
        x: matrices ``(..., r, c)``.
        out: where to write the result; x itself is possible.

    >>> import torch
    >>> x = orthogonalise(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
    >>> bool(((torch.linalg.svdvals(x) > 0.8) & (torch.linalg.svdvals(x) < 1.2)).all())
    True

    Reference: N. Amsel et al., The Polar Express, 2025 (arXiv 2505.16932); Y. Nakatsukasa and R. Freund, Computing
    fundamental matrix decompositions accurately via the matrix sign function in two iterations, 2016.
    """
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    result = _rational(wide) if x.device.type == "cpu" else _polynomial(wide)
    result = result if wide is x else result.mT
    return result.to(x.dtype) if out is None else out.copy_(result)


def _largest(x: Tensor) -> Tensor:
    """The largest entry, by which x is divided: the Gram matrix of tiny numbers would vanish, of huge ones overflow."""
    limit = 1e4 * torch.finfo(x.dtype).tiny  # 1 over it, times 690, is finite
    # Not by vector_norm, which is 20 times slower for the largest entry.
    return torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True)).clamp_min(limit)


def _frobenius(gram: Tensor) -> Tensor:
    """The norm, at least 1 if x is not zero."""
    return torch.clamp_min(torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True), 0.5)


def _polynomial(x: Tensor) -> Tensor:
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    half = x.is_cuda and x.dtype == torch.float32 and x.shape[-2] >= _LARGE
    x = torch.div(x, _largest(x), out=torch.empty_like(x, dtype=torch.bfloat16 if half else None))
    for step, (a, b, c) in enumerate(_POLYNOMIALS):
        gram = torch.bmm(x, x.mT)
        if step == 0:
            size = _frobenius(gram)
            x, gram = x.div_(size.sqrt()), gram.div_(size)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.view(shape)


def _rational(x: Tensor) -> Tensor:
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    shape, rows = x.shape, x.shape[-2]
    if rows <= _SMALL or torch.compiler.is_compiling():
        return _weights(x) @ x
    x = x.reshape(-1, *shape[-2:])
    result, threads = torch.empty_like(x), torch.get_num_threads()
    shares = max(1, min(threads, len(x), x.numel() // (2 * rows * rows))) if rows >= _SHARED else 1
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()  # a new thread does not inherit them

    def run(share: int) -> None:
        # One by one, so that Gram matrices stay in the cache, in memory allocated once: fresh memory costs more.
        work = x.new_zeros(4, *[rows + _PADDING * (rows % 256 == 0)] * 2)
        work[0].fill_diagonal_(1)  # where the Gram matrix is padded, it is the identity
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            for one, target in zip(x[share::shares], result[share::shares], strict=True):
                torch.mm(_weights(one, target, work), one, out=target)

    if shares == 1:
        run(0)
    else:  # with at most twice the memory of x to work in
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(shares) as pool:
                list(pool.map(run, range(shares)))
        finally:
            torch.set_num_threads(threads)
    return result.view(shape)


def _weights(x: Tensor, scaled: Tensor | None = None, work: Tensor | None = None) -> Tensor:
    """The matrix by which x is multiplied from the left; ``scaled`` and ``work`` are memory for large matrices."""
    rows, largest = x.shape[-2], _largest(x)
    scaled = torch.div(x, largest, out=scaled)
    if work is None:
        gram, lower, inverse, failed = scaled @ scaled.mT, None, None, None
        weights = torch.zeros_like(gram)
    else:
        gram, weights = _gram(scaled, work[0, :rows, :rows]), work[1, :rows, :rows].zero_()
        lower, inverse, failed = work[2].mT, work[3].mT, torch.empty((), dtype=torch.int32)
    size = _frobenius(gram)
    gram, weights, shift = gram.div_(size), _add_to_diagonal(weights, _CONSTANT), 0.0
    for c, b in _POLES:
        gram, shift = _add_to_diagonal(gram, c - shift), c
        padded = gram if work is None else work[0].mT  # by columns, as its factor and inverse are stored
        factor, info = torch.linalg.cholesky_ex(padded, out=None if lower is None else (lower, failed))
        weights.add_(torch.cholesky_inverse(factor, out=inverse).mT[..., :rows, :rows], alpha=b)
        weights = _add_to_diagonal(weights, torch.where(info > 0, math.nan, 0.0)[..., None])  # x was not finite
    return weights.div_(size.sqrt() * largest)


def _add_to_diagonal(x: Tensor, value: float | Tensor) -> Tensor:
    """In place, except under torch.compile, whose ``diagonal`` warns."""
    if torch.compiler.is_compiling():
        return x + torch.eye(x.shape[-1], dtype=x.dtype) * (value if isinstance(value, float) else value[..., None])
    x.diagonal(dim1=-2, dim2=-1).add_(value)
    return x


def _gram(x: Tensor, out: Tensor) -> Tensor:
    """x x', of whose halves above and below the diagonal only one is computed."""
    if len(x) <= _SMALL:
        return torch.mm(x, x.mT, out=out)
    half = len(x) // 2
    _gram(x[:half], out[:half, :half])
    _gram(x[half:], out[half:, half:])
    out[:half, half:] = torch.mm(x[half:], x[:half].mT, out=out[half:, :half]).mT
    return out


def matrix_step(x: Tensor, of_tokens: bool = False, out: Tensor | None = None) -> Tensor:
    r"""A step of the size of Adam's along matrices ``(..., r, c)``.

    It is :math:`0.2 \sqrt{\max(r, c)}` times the orthogonal factor, whose entries have a root mean square of 0.2. If
    there is a row for each token, those of a few frequent tokens have most of the orthogonal factor, and entries up to
    :math:`\sqrt{r / c}` times as large: such rows are scaled down to a root mean square of 0.2.
    """
    step = orthogonalise(x, out).mul_(0.2 * math.sqrt(max(x.shape[-2:])))
    if of_tokens:
        sizes = torch.linalg.vector_norm(step, dim=-1, keepdim=True)
        step *= (0.2 * math.sqrt(x.shape[-1]) / sizes).clamp_max(1)
    return step


def matrix_batches(blocks: Blocks, limit: int, ranks: int = 1) -> list[list[int]]:
    """The positions of the matrices in batches of at most ``limit`` entries, or of one, for each of some ranks.

    Those of one rank are of one shape and kind. Of several, each can own matrices of about the same work from every
    batch.
    """
    blocks.require_decided()
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, block in enumerate(blocks.parts):
        if block.is_matrix:
            alike.setdefault((block.kind, *block.matrix_shape), []).append(i)
    batches: list[list[int]] = []
    if ranks > 1:
        order = sorted(itertools.chain(*alike.values()), key=lambda i: -work_of(blocks.parts[i]))
        for one_each in [order[start : start + ranks] for start in range(0, len(order), ranks)]:
            if not batches or sum(blocks.parts[i].size for i in batches[-1] + one_each) > limit * ranks:
                batches.append([])
            batches[-1] += one_each
        return batches
    for places in alike.values():
        number = math.ceil(len(places) / max(1, limit // blocks.parts[places[0]].size))
        batches += [places[i * len(places) // number : (i + 1) * len(places) // number] for i in range(number)]
    return batches


def matrix_steps(blocks: Blocks, parts: Sequence[Tensor]) -> list[Tensor]:
    r"""The tensors of a momentum with every matrix replaced by :func:`matrix_step` of it; the others stay as they are.

    Args:
        blocks: says which tensors are matrices; those of one shape and kind are stacked.
        parts: what ``blocks.split`` gives, each ``(*runs, *shape)``.
    """
    if parts and isinstance(parts[0], ShardedVector):
        return at_owners(matrix_steps, blocks, parts)
    steps = list(parts)
    for places in matrix_batches(blocks, blocks.size):
        first: Block = blocks.parts[places[0]]
        runs = steps[places[0]].dim() - len(first.shape)
        alike = [steps[i].flatten(runs).unflatten(-1, first.matrix_shape) for i in places]
        stacked = torch.stack(alike) if len(alike) > 1 else alike[0][None]
        for i, step in zip(places, matrix_step(stacked, first.kind == "tokens"), strict=True):
            steps[i] = step.reshape(steps[i].shape)
    return steps
