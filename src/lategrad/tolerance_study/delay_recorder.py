"""A record of the delays of gradients, for any training loop."""

import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lategrad.support.validation import require
from lategrad.trace import write_csv

Vector = Tensor | Iterable[Tensor]  # a vector in one tensor or in several

_BAR = 40  # characters of the longest bar of a histogram
_ROWS = 12  # its rows, at most


class DelayReport(NamedTuple):
    """The result of :meth:`DelayRecorder.summary`: numbers of gradients, and delays in updates."""

    applied: int
    dropped: int
    min: int
    mean: float
    median: float
    p95: float
    max: int
    weighted_mean: float  #: the mean delay with the weight of each gradient
    distinct: int  #: number of different delays
    drift: float | None  #: Mean distance that the parameters moved during the delay of a gradient.
    relative_drift: float | None
    """The same in mean update lengths: the delay itself where all updates go the same way, about its square root where
    they do not."""
    cosine: float | None  #: Mean cosine between one gradient and the next. Near 1, late directions are still good ones.


class DelayRecorder:
    r"""The delays of the gradients of a run.

    >>> recorder = DelayRecorder()
    >>> for version, at in [(0, 0), (0, 1), (0, 2), (2, 3)]:
    ...     recorder.observe(issued=version, applied=at)
    >>> recorder.summary().mean, recorder.summary().max
    (1.0, 2)
    >>> print(recorder.histogram())
    delay  gradients
        0          1  ####################
        1          2  ########################################
        2          1  ####################

    A call without vectors takes a few microseconds, and no memory grows with the run: delays are counted.

    Args:
        window: number of the last observations in :meth:`recent`.
    """

    def __init__(self, window: int = 1000) -> None:
        require("window", window, isinstance(window, int) and window >= 1, "an integer >= 1")
        self.counts: Counter[int] = Counter()  #: applied gradients of each delay
        self.dropped: Counter[int] = Counter()  #: dropped gradients of each delay
        self.by_worker: Counter[object] = Counter()  #: applied gradients of each named worker
        self.dropped_by_worker: Counter[object] = Counter()
        self._weights = defaultdict[int, float](float)
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self._sums, self._numbers = defaultdict[str, float](float), Counter[str]()  # of lengths, distances and cosines
        self._last_point: Tensor | None = None
        self._last_grad: Tensor | None = None

    def observe(self, issued: int, applied: int, grad: Vector | None = None, weight: float = 1.0, *,
                at: Vector | None = None, now: Vector | None = None, worker: object = None,
                dropped: bool = False) -> None:  # fmt: skip
        """Record a gradient that is about to be applied, or dropped.

        Args:
            issued: the version of the parameters that it was computed at: the number of updates before them.
            applied: the version that it is applied to; the delay is the difference.
            grad: the gradient, for its cosine with the one before. A copy is stored.
            weight: with which it is applied.
            at: the parameters that it was computed at; needs ``now``.
            now: the present parameters. A copy is stored, for the mean length of an update.
            worker: the worker that computed it.
            dropped: whether it is dropped.
        """
        delay = applied - issued
        if not (issued >= 0 and delay >= 0):
            raise ValueError(f"issued must be in 0..{applied}, the version that the gradient is applied to, got "
                             f"{issued}")  # fmt: skip
        if worker is not None:
            (self.dropped_by_worker if dropped else self.by_worker)[worker] += 1
        if dropped:
            self.dropped[delay] += 1
            return
        self.counts[delay] += 1
        self._weights[delay] += weight
        self._recent.append((delay, weight))
        if grad is not None:
            last, self._last_grad = self._last_grad, _flat(grad)
            if last is not None and last.any() and self._last_grad.any():
                self._add("cosine", float(cosine_similarity(self._last_grad.double(), last.double(), dim=0)))
        if (now is None) != (at is None):
            raise ValueError("at and now must be given together: the parameters of the gradient and the present ones")
        if now is not None and at is not None:
            point, self._last_point = self._last_point, _flat(now)
            if point is not None:
                self._add("length", float((self._last_point - point).double().norm()))
            self._add("distance", float((self._last_point - _flat(at)).double().norm()))

    def _add(self, name: str, value: float) -> None:
        self._sums[name] += value
        self._numbers[name] += 1

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._numbers[name] if self._numbers[name] else None

    def summary(self) -> DelayReport:
        """The report on the whole run."""
        return self._report(self.counts, self._weights)

    def recent(self) -> DelayReport:
        """The report on the last applied gradients (``window``); drops, drift and cosines are of the whole run."""
        weights = defaultdict[int, float](float)
        for delay, weight in self._recent:
            weights[delay] += weight
        return self._report(Counter(delay for delay, _ in self._recent), weights)

    def _report(self, counts: Mapping[int, int], weights: Mapping[int, float]) -> DelayReport:
        total, weight = sum(counts.values()), sum(weights.values())
        delays = sorted(counts)
        length, distance = self._mean("length"), self._mean("distance")
        return DelayReport(
            applied=total, dropped=sum(self.dropped.values()), distinct=len(delays),
            min=delays[0] if delays else 0, max=delays[-1] if delays else 0,
            mean=sum(delay * count for delay, count in counts.items()) / total if total else math.nan,
            median=_quantile(delays, counts, 0.5 * total), p95=_quantile(delays, counts, 0.95 * total),
            weighted_mean=sum(delay * share for delay, share in weights.items()) / weight if weight else math.nan,
            drift=distance, relative_drift=None if not length or distance is None else distance / length,
            cosine=self._mean("cosine"),
        )  # fmt: skip

    def histogram(self) -> str:
        """The delays as bars of text; a bar covers several delays where there are many."""
        if not self.counts:
            return "no gradient was applied yet"
        width = max(self.counts) // _ROWS + 1
        rows: Counter[int] = Counter()
        for delay, count in self.counts.items():
            rows[delay // width] += count
        names = [str(k * width) if width == 1 else f"{k * width}-{k * width + width - 1}" for k in range(max(rows) + 1)]
        wide, most = max(len("delay"), *map(len, names)), max(rows.values())
        lines = [f"{'delay':>{wide}}  gradients"]
        for k, name in enumerate(names):
            bar = "#" * math.ceil(_BAR * rows[k] / most)
            lines.append(f"{name:>{wide}}  {rows[k]:>9}  {bar}".rstrip())
        return "\n".join(lines)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a row for each delay: the number of applied gradients, their weight, and the number dropped."""
        delays = sorted({*self.counts, *self.dropped})
        return write_csv(path, [{"delay": delay, "applied": self.counts[delay], "weight": self._weights.get(delay, 0.0),
                                 "dropped": self.dropped[delay]} for delay in delays])  # fmt: skip

    def log_to(self, writer: Any, step: int) -> None:
        """Write the numbers of :meth:`recent` as scalars ``delay/...`` to a TensorBoard ``SummaryWriter``."""
        for name, value in self.recent()._asdict().items():
            if value is not None and not math.isnan(value):
                writer.add_scalar(f"delay/{name}", value, step)


def _flat(vector: Vector) -> Tensor:
    return torch.cat([part.detach().flatten() for part in ([vector] if isinstance(vector, Tensor) else vector)])


def _quantile(delays: list[int], counts: Mapping[int, int], rank: float) -> float:
    """The smallest delay that at least ``rank`` gradients do not exceed."""
    totals = accumulate(counts[delay] for delay in delays)
    return next((float(delay) for delay, total in zip(delays, totals, strict=True) if total >= rank), math.nan)
