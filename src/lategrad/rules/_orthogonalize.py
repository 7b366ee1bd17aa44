"""The orthogonal factor of a matrix, by Newton-Schulz iteration: the direction of Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lategrad.rules.blocks import Blocks

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_LARGE = 256  # rows and columns from which bfloat16 is faster


def orthogonalise(x: Tensor) -> Tensor:
    r"""About :math:`U V^\top` for :math:`x = U \Sigma V^\top`: all singular values become about 1.

    Five steps of :math:`X \leftarrow a X + (b A + c A^2) X`, :math:`A = X X^\top`, from :math:`x / \|x\|_F`. The
    coefficients, chosen by K. Jordan for speed rather than accuracy, leave the singular values between about 0.7
    and 1.2, except tiny ones. It takes only matrix products, on all matrices of a batch at once. A
    matrix of zeros stays zero. Large float32 matrices on a GPU are multiplied in bfloat16, as in Muon's reference code.

    Args:
        x: matrices ``(..., r, c)``.

    >>> import torch
    >>> x = orthogonalise(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
    >>> bool(((torch.linalg.svdvals(x) > 0.6) & (torch.linalg.svdvals(x) < 1.25)).all())
    True

    Reference: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = _COEFFICIENTS
    dtype, tall = x.dtype, x.shape[-2] > x.shape[-1]
    if x.is_cuda and dtype == torch.float32 and min(x.shape[-2:]) >= _LARGE:
        x = x.bfloat16()
    x = x.mT if tall else x
    size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / size.clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(dtype)


def matrix_steps(blocks: Blocks, parts: Sequence[Tensor]) -> list[Tensor]:
    r"""The tensors of a momentum with every matrix replaced by a step of the size of Adam's.

    On a matrix of r rows and c columns that is :math:`0.2 \sqrt{\max(r, c)}` times the orthogonal factor, whose entries
    have a root mean square of 0.2; all other tensors stay as they are. Matrices of one shape are stacked.

    Args:
        blocks: says which tensors are matrices.
        parts: what ``blocks.split`` gives, each ``(*runs, *shape)``.
    """
    blocks.require_decided()
    steps = list(parts)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, block in enumerate(blocks.parts):
        if block.kind == "matrix":
            by_shape.setdefault(block.matrix_shape, []).append(i)
    for shape, places in by_shape.items():
        runs = steps[places[0]].dim() - len(blocks.parts[places[0]].shape)
        alike = torch.stack([steps[i].flatten(runs).unflatten(-1, shape) for i in places])
        for i, step in zip(places, 0.2 * math.sqrt(max(shape[-2:])) * orthogonalise(alike), strict=True):
            steps[i] = step.reshape(steps[i].shape)
    return steps
