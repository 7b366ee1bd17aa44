"""How stale is it now? A record of the ages of gradients, and a gate for those that are too old; for anybody's loop."""

from __future__ import annotations

import csv
import math
import os
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.support.files import replacing
from lategrad.support.validation import require, require_choice

Vector = Tensor | Iterable[Tensor]
"""A vector in one tensor or in several."""

_BAR = 40  # characters of the longest bar of a histogram
_ROWS = 12  # its rows, at most


class StalenessSummary(NamedTuple):
    """What :meth:`Staleness.summary` says; an age is a number of updates."""

    applied: int
    """Gradients that were applied."""
    dropped: int
    """Gradients that were not."""
    min: int
    mean: float
    median: float
    p95: float
    max: int
    weighted: float
    """The mean age when each gradient counts by its weight."""
    distinct: int
    """How many different ages there were."""
    moved: float | None
    """How far the parameters moved while a gradient was on its way, in usual steps: the mean. It is the age itself
    where all steps go the same way, about its root where they do not."""
    cosine: float | None
    """Between one gradient and the next: the mean. Near 1, stale directions are still good ones."""


class Staleness:
    r"""The ages of the gradients of a run.

    >>> staleness = Staleness()
    >>> for version, at in [(0, 0), (0, 1), (0, 2), (2, 3)]:
    ...     staleness.observe(issued=version, applied=at)
    >>> staleness.summary().mean, staleness.summary().max
    (1.0, 2)
    >>> print(staleness.histogram())
    age  gradients
      0          1  ####################
      1          2  ########################################
      2          1  ####################

    A call without vectors takes a few microseconds and no memory that grows with the run: ages are counted.

    Args:
        window: how many of the last observations :meth:`recent` is about.
    """

    def __init__(self, window: int = 1000) -> None:
        require("window", window, isinstance(window, int) and window >= 1, "an integer >= 1")
        self.counts: Counter[int] = Counter()
        """Gradients applied at each age."""
        self.dropped: Counter[int] = Counter()
        """Gradients dropped at each age."""
        self.by_worker: Counter[object] = Counter()
        """Gradients applied of each worker, where workers were named."""
        self.dropped_by_worker: Counter[object] = Counter()
        self._weights: dict[int, float] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)
        self._steps = _Mean()
        self._moves = _Mean()
        self._cosines = _Mean()
        self._last_point: list[Tensor] | None = None
        self._last_grad: list[Tensor] | None = None

    def observe(
        self,
        issued: int,
        applied: int,
        grad: Vector | None = None,
        weight: float = 1.0,
        *,
        at: Vector | None = None,
        now: Vector | None = None,
        worker: object = None,
        dropped: bool = False,
    ) -> None:
        """Take note of a gradient that is about to be applied, or dropped.

        Args:
            issued: the version of the parameters that it was computed at: how many updates they had behind them.
            applied: the version that it is applied to; the age is the difference.
            grad: the gradient, for the cosine with the one before. A copy is kept.
            weight: with which it is applied.
            at: the parameters that it was computed at, along with ``now``.
            now: the present parameters. A copy is kept, for the length of the usual step.
            worker: who computed it.
            dropped: it is not applied at all.
        """
        age = applied - issued
        if not (issued >= 0 and age >= 0):
            raise ValueError(
                f"issued must be in 0..{applied}, the version that the gradient is applied to, got {issued}"
            )
        if dropped:
            self.dropped[age] += 1
            if worker is not None:
                self.dropped_by_worker[worker] += 1
            return
        self.counts[age] += 1
        self._weights[age] = self._weights.get(age, 0.0) + weight
        self._recent.append((age, weight))
        if worker is not None:
            self.by_worker[worker] += 1
        if grad is not None:
            self._compare(grad)
        if now is not None or at is not None:
            self._measure(at, now)

    @torch.no_grad()
    def _compare(self, grad: Vector) -> None:
        present = _copies(grad)
        if self._last_grad is not None:
            both = math.sqrt(_dot(present, present) * _dot(self._last_grad, self._last_grad))
            if both > 0:
                self._cosines.add(_dot(present, self._last_grad) / both)
        self._last_grad = present

    @torch.no_grad()
    def _measure(self, at: Vector | None, now: Vector | None) -> None:
        if now is None or at is None:
            raise ValueError("at and now must be given together: the parameters of the gradient and the present ones")
        present = _copies(now)
        if self._last_point is not None:
            self._steps.add(_distance(present, self._last_point))
        self._moves.add(_distance(present, _parts(at)))
        self._last_point = present

    def summary(self) -> StalenessSummary:
        """Of the whole run."""
        return self._summarise(self.counts, self._weights)

    def recent(self) -> StalenessSummary:
        """Of the last applied gradients (``window``); what was dropped, moves and cosines are of the whole run."""
        weights: dict[int, float] = {}
        for age, weight in self._recent:
            weights[age] = weights.get(age, 0.0) + weight
        return self._summarise(Counter(age for age, _ in self._recent), weights)

    def _summarise(self, counts: Mapping[int, int], weights: Mapping[int, float]) -> StalenessSummary:
        total, weight = sum(counts.values()), sum(weights.values())
        ages = sorted(counts)
        usual = self._steps.mean
        return StalenessSummary(
            applied=total,
            dropped=sum(self.dropped.values()),
            min=ages[0] if ages else 0,
            mean=sum(age * count for age, count in counts.items()) / total if total else math.nan,
            median=_quantile(ages, counts, total, 0.5),
            p95=_quantile(ages, counts, total, 0.95),
            max=ages[-1] if ages else 0,
            weighted=sum(age * share for age, share in weights.items()) / weight if weight else math.nan,
            distinct=len(ages),
            moved=None if not usual or self._moves.mean is None else self._moves.mean / usual,
            cosine=self._cosines.mean,
        )

    def histogram(self) -> str:
        """The ages as bars of text; several ages in a row where there are many."""
        if not self.counts:
            return "no gradient was applied yet"
        width = max(self.counts) // _ROWS + 1
        rows: Counter[int] = Counter()
        for age, count in self.counts.items():
            rows[age // width] += count
        names = [str(k * width) if width == 1 else f"{k * width}-{k * width + width - 1}" for k in range(max(rows) + 1)]
        wide, most = max(len("age"), *map(len, names)), max(rows.values())
        lines = [f"{'age':>{wide}}  gradients"]
        for k, name in enumerate(names):
            bar = "#" * math.ceil(_BAR * rows[k] / most)
            lines.append(f"{name:>{wide}}  {rows[k]:>9}  {bar}".rstrip())
        return "\n".join(lines)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """A row for each age: how many were applied, with what weight, and how many were dropped."""
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        with replacing(where) as part, part.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("age", "applied", "weight", "dropped"))
            for age in sorted({*self.counts, *self.dropped}):
                rows.writerow((age, self.counts[age], self._weights.get(age, 0.0), self.dropped[age]))
        return where

    def log_to(self, writer: Any, step: int) -> None:
        """The numbers of :meth:`recent` as scalars ``staleness/...`` of a TensorBoard ``SummaryWriter``."""
        for name, value in self.recent()._asdict().items():
            if value is not None and not math.isnan(value):
                writer.add_scalar(f"staleness/{name}", value, step)


class _Mean:
    """A running mean."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


def _parts(vector: Vector) -> list[Tensor]:
    return [vector] if isinstance(vector, Tensor) else list(vector)


def _copies(vector: Vector) -> list[Tensor]:
    return [part.detach().clone() for part in _parts(vector)]


def _dot(a: list[Tensor], b: list[Tensor]) -> float:
    return float(sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)))


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)))


def _quantile(ages: list[int], counts: Mapping[int, int], total: int, share: float) -> float:
    """The smallest age that so large a share of the gradients does not exceed."""
    seen = 0
    for age in ages:
        seen += counts[age]
        if seen >= share * total:
            return float(age)
    return math.nan


_LOOK = 20  # gradients of each worker, on average, between two looks at the shares
_VANISHED = 0.1  # of the fair share
POLICIES = ("drop", "wait", "weigh")


class Admission(NamedTuple):
    """What a gate says of a gradient."""

    action: str
    """"apply", with the weight; "drop"; or "wait": keep it and ask again after the next one that is applied."""
    weight: float = 1.0


class StalenessGate:
    """Lets gradients up to an age through, and says what becomes of the others; counts both for each worker.

    - ``"drop"``: they are not applied; the worker goes on from the present parameters.
    - ``"weigh"``: they are applied with the weight (1 + max_age) / (1 + age).
    - ``"wait"``: none gets older than ``max_age``, because a gradient has to wait while applying it would make one
      that is still out too old (stale synchronous parallel). Tell :meth:`admit` how old the others are by now.

    Slow workers must not vanish unseen: a warning says so when less than a tenth of a worker's fair share of the
    updates (all, divided by the workers) is its own.

    Args:
        max_age: the largest age, in updates, that goes through as it is.
        policy: what becomes of older ones.
        workers: those that there are; by default those that have been seen.

    >>> gate = StalenessGate(max_age=4)
    >>> gate.admit(3), gate.admit(9)
    (Admission(action='apply', weight=1.0), Admission(action='drop', weight=0.0))
    >>> StalenessGate(max_age=4, policy="weigh").admit(9)
    Admission(action='apply', weight=0.5)
    >>> StalenessGate(max_age=4, policy="wait").admit(0, out=[4]).action
    'wait'
    """

    def __init__(self, max_age: int, policy: str = "drop", workers: Iterable[object] = ()) -> None:
        is_int = isinstance(max_age, int) and not isinstance(max_age, bool)
        require("max_age", max_age, is_int and max_age >= 0, "an integer >= 0")
        require_choice("policy", policy, POLICIES)
        self.max_age, self.policy = max_age, policy
        self.applied: Counter[object] = Counter(dict.fromkeys(workers, 0))
        """Gradients that went through, of each worker."""
        self.dropped: Counter[object] = Counter()
        """Gradients that did not, of each worker."""
        self._seen = 0
        self._warned: set[object] = set()

    def admit(self, age: int, worker: object = None, *, out: Iterable[int] = ()) -> Admission:
        """What to do with a gradient.

        Args:
            age: of the gradient: the present version less that of the parameters it was computed at.
            worker: who computed it.
            out: the ages, by now, of all other gradients that are not yet applied; only "wait" asks for them.
        """
        if age < 0:
            raise ValueError(f"age must be >= 0, got {age}: the gradient is from the future")
        if self.policy == "wait" and self._must_wait(age, sorted(out, reverse=True)):
            return Admission("wait", 0.0)
        self._seen += 1
        admitted = age <= self.max_age or self.policy == "weigh"
        (self.applied if admitted else self.dropped)[worker] += 1
        if worker not in self.applied:
            self.applied[worker] = 0
        if self._seen % (_LOOK * max(1, len(self.applied))) == 0:
            self._look_for_the_vanished()
        if not admitted:
            return Admission("drop", 0.0)
        return Admission("apply", min(1.0, (1 + self.max_age) / (1 + age)))

    def _must_wait(self, age: int, others: list[int]) -> bool:
        """Whether, one update from now, the others could no longer all be in time, the oldest first, one an update."""
        in_time = age <= self.max_age and all(a + k <= self.max_age for k, a in enumerate(others, start=1))
        if not in_time and (not others or age >= others[0]):  # nothing older to wait for
            raise ValueError(f"max_age must be >= {len(others)} with policy='wait' and so many other gradients out, "
                             f"which every call must be given; got {self.max_age}, for one of age {age}")  # fmt: skip
        return not in_time

    def share(self, worker: object) -> float:
        """The worker's part of the updates as a multiple of its fair one; 1 where nothing was applied yet."""
        total = sum(self.applied.values())
        return self.applied[worker] * len(self.applied) / total if total else 1.0

    def _look_for_the_vanished(self) -> None:
        for worker in self.applied:
            if self.share(worker) < _VANISHED and worker not in self._warned:
                self._warned.add(worker)
                dropped = self.dropped[worker]
                reason = (
                    f"{dropped} dropped as older than {self.max_age}: a larger max_age, or policy='weigh', uses them"
                )
                warnings.warn(
                    f"worker {worker} nearly vanishes: {self.applied[worker]} of {sum(self.applied.values())} updates "
                    f"are its own, {self.share(worker):.1%} of its fair share, so that what only it has seen is hardly "
                    f"learned ({reason if dropped else 'none was dropped: it is slow'})",
                    stacklevel=3,
                )

    def summary(self) -> dict[str, dict[str, float]]:
        """For each worker: applied, dropped, and its share of the updates as a multiple of its fair one."""
        return {
            str(worker): {"applied": self.applied[worker], "dropped": self.dropped[worker], "share": self.share(worker)}
            for worker in self.applied
        }
