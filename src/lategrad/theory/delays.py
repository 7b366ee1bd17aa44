"""Statistics of delays that appear in the theorems."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.support.validation import require


class DelayStatistics(NamedTuple):
    r"""The mean and the standard deviation of delays, and :math:`\sum_t (\tau_t + 2)^2 / t` (None if unknown)."""

    mu: float
    sigma: float
    early: float | None = None


def delay_statistics(delays: Tensor | Sequence[int]) -> DelayStatistics:
    r"""The paper's :math:`\mu_\tau` and :math:`\sigma_\tau` (population, not sample) of delays.

    >>> import torch
    >>> delay_statistics(torch.tensor([0, 1, 2, 3]))
    DelayStatistics(mu=1.5, sigma=1.118033988749895, early=20.08...)
    """
    values = torch.as_tensor(delays).double()
    require("delays", delays, values.dim() == 1 and len(values) > 0 and (values >= 0), "a list of numbers >= 0")
    early = ((values + 2) ** 2 / torch.arange(1, len(values) + 1)).sum().item()
    return DelayStatistics(mu=values.mean().item(), sigma=values.std(correction=0).item(), early=early)


def largest_in_flight(delays: Tensor) -> int:
    r"""The largest number of gradients in flight at once: those of updates t with :math:`t - \tau_t \le i < t`.

    For a constant delay it is the delay; for workers that hold one query each, their number less one.

    >>> largest_in_flight(torch.tensor([0, 1, 2, 0, 2, 2]))  # after the first query: updates 2 and 3
    2
    """
    updates = torch.arange(1, len(delays) + 1)
    begins, ends = (torch.bincount(times, minlength=len(delays) + 2) for times in (updates - delays, updates))
    return int((begins - ends).cumsum(0).max())
