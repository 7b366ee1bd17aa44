"""The orthogonal factor of a matrix, by Newton-Schulz iteration: what Muon steps along."""

from __future__ import annotations

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(x: Tensor) -> Tensor:
    r"""About :math:`U V^\top` for :math:`x = U \Sigma V^\top`: all singular values become about 1.

    Five steps of :math:`X \leftarrow a X + (b A + c A^2) X`, :math:`A = X X^\top`, from :math:`x / \|x\|_F`. The
    coefficients, chosen by K. Jordan for speed and not for accuracy, leave the singular values between about 0.7
    and 1.2, except those that were tiny to begin with. Only matrix products, on all matrices of a batch at once,
    in the dtype of ``x``. A matrix of zeros stays one.

    Args:
        x: matrices ``(..., r, c)``.

    >>> import torch
    >>> x = orthogonalise(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
    >>> bool(((torch.linalg.svdvals(x) > 0.6) & (torch.linalg.svdvals(x) < 1.25)).all())
    True

    Reference: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = _COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / size.clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
