"""Gradients whose norm is out of the ordinary: shortened to a given norm, or refused where others are far shorter."""

from __future__ import annotations

import statistics
from collections import deque

import torch
from torch import Tensor

_WINDOW = 101  # norms that the median is taken over
_WARM_UP = 20  # norms to know before any is refused


def norm(grad: Tensor) -> Tensor:
    """Over the last dimension, in float64: what is huge must not overflow on its way to being noticed."""
    length: Tensor = torch.linalg.vector_norm(grad, dim=-1, keepdim=True, dtype=torch.float64)
    return length


def clipped(grad: Tensor, most: float) -> Tensor:
    """The gradient, shortened to norm ``most`` where it is longer.

    >>> clipped(torch.tensor([3.0, 4.0]), most=1.0)
    tensor([0.6000, 0.8000])
    """
    return grad * (most / norm(grad)).clamp(max=1.0).to(grad.dtype)


class NormGate:
    """Refuses gradients that are many times as long as the median of the last hundred.

    A refused norm enters the median as the longest that would have been taken: the median follows when the gradients of
    all workers grow, and a few bad workers cannot move it.

    >>> gate = NormGate(ratio=10.0)
    >>> [gate.objection(torch.tensor(1.0)) for _ in range(20)] == [None] * 20
    True
    >>> gate.objection(torch.tensor(50.0))
    'its norm 50 is more than 10 times the median of the last 20, 1'
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def objection(self, length: Tensor) -> str | None:
        """Why a gradient of that norm is not to be applied, if so."""
        value = length.item()
        if len(self._last) < _WARM_UP:
            self._last.append(value)
            return None
        median = statistics.median(self._last)
        most = self.ratio * median
        known = len(self._last)
        self._last.append(min(value, most))
        if value <= most or most == 0.0:
            return None
        return f"its norm {value:.4g} is more than {self.ratio:g} times the median of the last {known}, {median:.4g}"
