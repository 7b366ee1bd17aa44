"""Decoupled weight decay: an iterate shrinks with the step that its gradient gets, and no norm counts the decay."""

from __future__ import annotations

from torch import Tensor

from lategrad.support.validation import Scalar


def decayed(point: Tensor, step: Scalar, weight_decay: Scalar) -> Tensor:
    """max(0, 1 - step * weight_decay) times the point; without decay, the point itself.

    >>> import torch
    >>> decayed(torch.tensor([2.0, 4.0]), step=0.5, weight_decay=0.5)
    tensor([1.5000, 3.0000])
    """
    if not isinstance(weight_decay, Tensor) and weight_decay == 0:
        return point
    kept = 1 - step * weight_decay
    return (kept.clamp_min(0).to(point.dtype) if isinstance(kept, Tensor) else max(kept, 0.0)) * point
