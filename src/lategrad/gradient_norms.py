"""Gradients whose norm is out of the ordinary: shortened to a given norm, or refused where others are far shorter."""

from __future__ import annotations

import torch
from torch import Tensor

from lategrad.sets import norm
from lategrad.support.validation import require, require_number

_WINDOW = 101  # norms that the median is taken over
_WARM_UP = 20  # norms to know before any is refused


def require_norm_options(clip: float | None, max_norm_ratio: float | None) -> None:
    """Require what :func:`clipped` and :class:`NormGate` take, or None."""
    for name, value, low in (("clip", clip, 0), ("max_norm_ratio", max_norm_ratio, 1)):
        if value is not None:
            require(name, value, not isinstance(value, Tensor), "one number, the same for all runs")
            require_number(name, value, low=low, strict=True)


def clipped(grad: Tensor, most: float) -> Tensor:
    """The gradient, shortened to norm ``most`` where it is longer.

    >>> clipped(torch.tensor([3.0, 4.0]), most=1.0)
    tensor([0.6000, 0.8000])
    """
    return grad * (most / norm(grad)).clamp(max=1.0).to(grad.dtype)


class NormGate:
    """Refuses gradients that are many times as long as the median of the last hundred, in each run by itself.

    The first twenty are not applied either: they only tell how long gradients are, and a single bad one among them
    could throw the state far away. A refused norm enters the median as the longest that would have been taken: the
    median follows when the gradients of all workers grow, and a few bad workers cannot move it.

    Args:
        ratio: how many times.
        runs: the run dimensions of the gradients.
        device: where they are.

    >>> gate = NormGate(ratio=10.0)
    >>> all(gate.learns_from(torch.tensor([1.0])) for _ in range(20))
    True
    >>> gate.learns_from(torch.tensor([50.0]))
    False
    >>> gate.objection(torch.tensor([50.0]))
    'its norm 50 is more than 10 times the median of the last 20, 1'
    """

    def __init__(self, ratio: float, runs: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        self.ratio = ratio
        # NaN where no norm is known yet. The buffers keep their addresses, for compiled code and for graphs.
        self._last = torch.full((_WINDOW, *runs, 1), torch.nan, dtype=torch.float64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, device=device)

    def _longest(self) -> Tensor:
        """The longest norm that is taken now, for each run."""
        most = self.ratio * self._last.nanmedian(dim=0).values
        return torch.where((self._seen < _WARM_UP) | (most == 0), torch.inf, most)

    def _note(self, length: Tensor) -> None:
        self._last.index_copy_(0, self._seen % _WINDOW, length.double().unsqueeze(0))
        self._seen += 1

    def admits(self, length: Tensor) -> Tensor:
        """Whether gradients of these norms, of shape ``(*runs, 1)``, are to be applied; they are taken note of."""
        most, learnt = self._longest(), self._seen >= _WARM_UP
        self._note(torch.minimum(length, most))
        return (length <= most) & learnt

    def learns_from(self, length: Tensor) -> bool:
        """Whether the gradient of a single run is among the first, and nobody's fault; it is taken note of then."""
        if self._seen >= _WARM_UP:
            return False
        self._note(length)
        return True

    def objection(self, length: Tensor) -> str | None:
        """Why a later gradient of a single run is not to be applied, if so; it is taken note of."""
        most, known = self._longest(), min(int(self._seen), _WINDOW)
        self._note(torch.minimum(length, most))
        if length <= most:
            return None
        value, median = length.item(), most.item() / self.ratio
        return f"its norm {value:.4g} is more than {self.ratio:g} times the median of the last {known}, {median:.4g}"
