"""How late gradients are at present: a running mean of the delays, for rules that look ahead."""

from __future__ import annotations

from torch import Tensor

from lategrad.rules.rule import Delay

_WINDOW = 32  # updates: short against a training run, long against the scatter of heavy-tailed delays


def next_mean_delay(mean: Tensor, delay: Delay, t: Tensor) -> Tensor:
    r"""The mean of the first delays, then an exponential one.

    .. math:: \bar\tau_t = \bar\tau_{t-1} + (\tau_t - \bar\tau_{t-1}) / \min(t, 32)

    >>> import torch
    >>> next_mean_delay(torch.tensor([2.0]), torch.tensor(5), torch.tensor([3.0]))
    tensor([3.])
    """
    return mean + (delay - mean) / t.clamp_max(_WINDOW)
