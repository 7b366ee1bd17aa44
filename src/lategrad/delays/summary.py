"""The delays of a run in a few numbers."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lategrad.delays.base import require_integers
from lategrad.support.validation import require

_HISTOGRAM_BINS = 50


class Histogram(NamedTuple):
    """The number of delays in each bin [edges[i], edges[i + 1])."""

    counts: Tensor  #: int64 ``(bins,)``.
    edges: Tensor  #: int64 ``(bins + 1,)``: 0, then equally spaced integers, the last one above every delay.


class DelaySummary(NamedTuple):
    """The result of :func:`summarise`."""

    mean: float
    std: float  #: Of the population: the root of the mean squared deviation.
    median: float
    p95: float
    p99: float
    max: int
    histogram: Histogram


def summarise(delays: Tensor) -> DelaySummary:
    r"""The moments, percentiles (interpolated between neighbours) and histogram of the delays of a run.

    The theory uses the mean :math:`\mu_\tau` and the standard deviation :math:`\sigma_\tau` only.

    >>> summarise(torch.tensor([0, 1, 2, 5]))[:3]
    (2.0, 1.8708286933869707, 1.5)
    >>> summarise(torch.tensor([0, 1, 2, 2])).histogram.counts
    tensor([1, 1, 2])
    """
    require_integers("delays", delays)
    require("delays", tuple(delays.shape), delays.numel() > 0, "at least one delay")
    values = delays.cpu().numpy().ravel()
    require("delays", int(values.min()), int(values.min()) >= 0, ">= 0")
    median, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    largest = int(values.max())
    width = largest // _HISTOGRAM_BINS + 1
    counts = np.bincount(values // width)
    histogram = Histogram(torch.from_numpy(counts), torch.arange(len(counts) + 1) * width)
    return DelaySummary(float(values.mean()), float(values.std()), median, p95, p99, largest, histogram)
