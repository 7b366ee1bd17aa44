"""The curve of a study: the number at each delay, what it costs, and whether more updates would pay it back."""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lategrad.support.files import replacing
from lategrad.support.validation import require
from lategrad.tolerance_study.run import OWN, Run, finite_or_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETTER = ("lower", "higher")
_FORMAT = "lategrad-tolerance-1"
_FEWEST_RECORDS = 6  # of a curve over time, for a verdict
_PATIENCE = 10  # thirds of the run that a tax may take at the pace of the last third

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """What one delay does to one optimizer; means over seeds."""

    optimizer: str
    delay: int
    number: float
    spread: float
    """Standard deviation over seeds; not a number with one seed."""
    gap: float
    """How much worse than without delay, each seed against itself; negative where it is better."""
    gap_spread: float
    """Standard deviation over seeds; not a number with one seed."""
    updates: int
    """T: those that were made. The last gradients of a run are still on their way at its end."""
    rounds: float
    """T / (1 + delay): how many updates can build one on another."""
    reached: int | None
    """After how many updates the number that no delay ends with was reached, if it was."""
    slowdown: float | None
    """How many times as many updates the best number that both reached took, where the numbers were given over time;
    at least so many, where no delay had reached it at its first record."""
    verdict: str
    """"free", "unclear", "tax", "floor", "diverged" or "costs" (see :meth:`Tolerance.verdict`)."""


@dataclass(frozen=True, eq=False)
class Tolerance:
    """What :func:`lategrad.tolerance` found."""

    runs: tuple[Run, ...]
    better: str = "lower"
    cost: float = 0.05
    """What may be lost, as a share of the number without delay."""
    profile: str | None = None
    name: str = "train"

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Their names; the training's own is "own"."""
        return tuple(dict.fromkeys(run.task.optimizer for run in self.runs))

    @property
    def delays(self) -> tuple[int, ...]:
        """In rising order, from 0."""
        return tuple(sorted({run.task.delay for run in self.runs}))

    def _of(self, optimizer: str, delay: int) -> list[Run]:
        require("optimizer", optimizer, optimizer in self.optimizers, f"one of {', '.join(self.optimizers)}")
        runs = [run for run in self.runs if (run.task.optimizer, run.task.delay) == (optimizer, delay)]
        return sorted(runs, key=lambda run: run.task.seed)

    def numbers(self, optimizer: str, delay: int) -> Array:
        """The final number of each seed."""
        return np.array([run.values[-1] for run in self._of(optimizer, delay)])

    def seeds_are_alike(self) -> bool:
        """Whether no delay has two seeds with different numbers."""
        return all(np.ptp(self.numbers(name, delay)) == 0 for name in self.optimizers for delay in self.delays)

    def curve(self, optimizer: str, delay: int) -> tuple[Array, Array]:
        """Updates, and the number over time, averaged over seeds, up to the shortest of them."""
        runs = self._of(optimizer, delay)
        length = min(len(run.values) for run in runs)
        values = np.array([run.values[:length] for run in runs]).mean(0)
        return np.array(runs[0].updates[:length], dtype=np.float64), values

    def _worse(self, a: Array | float, b: Array | float) -> Any:
        return a - b if self.better == "lower" else b - a

    def point(self, optimizer: str, delay: int) -> Point:
        """What a delay does to an optimizer."""
        numbers, without = self.numbers(optimizer, delay), self.numbers(optimizer, 0)
        gaps = self._worse(numbers, without)
        updates = int(np.mean([run.updates[-1] for run in self._of(optimizer, delay)]))
        reached, slowdown = self._over_time(optimizer, delay)
        return Point(
            optimizer=optimizer,
            delay=delay,
            number=float(numbers.mean()),
            spread=_deviation(numbers),
            gap=float(gaps.mean()),
            gap_spread=_deviation(gaps),
            updates=updates,
            rounds=updates / (1 + delay),
            reached=reached,
            slowdown=slowdown,
            verdict=self.verdict(optimizer, delay),
        )

    def points(self) -> list[Point]:
        return [self.point(name, delay) for name in self.optimizers for delay in self.delays]

    def _over_time(self, optimizer: str, delay: int) -> tuple[int | None, float | None]:
        """When the number of no delay was reached, and how many times as long the best common number took."""
        (at, values), (at_0, values_0) = self.curve(optimizer, delay), self.curve(optimizer, 0)
        if min(len(values), len(values_0)) < _FEWEST_RECORDS or not np.isfinite([*values, *values_0]).all():
            return None, None
        late, base = self._worse(_smooth(values), 0.0), self._worse(_smooth(values_0), 0.0)
        level = max(late.min(), base.min())
        here, there = _first_passage(at, late, level), _first_passage(at_0, base, level)
        when = _first_passage(at, late, base[-1])
        slowdown = None if here is None or not there else here / there
        return None if when is None else round(when), slowdown

    def verdict(self, optimizer: str, delay: int) -> str:
        """What kind of price a delay has.

        - "free": the gap is within ``cost`` of the number without delay.
        - "unclear": it is not, but within two standard errors of the seeds; more seeds would tell.
        - "diverged": the number is not finite.
        - "tax": it costs, but the number is still improving, fast enough that more updates would pay the gap back:
          at the pace of the last third, within ten more such thirds.
        - "floor": it costs, and the curve has stopped, or is too slow for that.
        - "costs": it costs, and without numbers over time (at least six) no more can be said.
        """
        numbers, without = self.numbers(optimizer, delay), self.numbers(optimizer, 0)
        if not np.isfinite(numbers).all():
            return "diverged"
        gaps = self._worse(numbers, without)
        noise = 2 * _deviation(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        if gaps.mean() <= self.cost * abs(without.mean()):
            return "free"
        if gaps.mean() <= noise:
            return "unclear"
        _, values = self.curve(optimizer, delay)
        if len(values) < _FEWEST_RECORDS or not np.isfinite(values).all():
            return "costs"
        smooth = _smooth(self._worse(values, 0.0))
        ripple = float(np.abs(values - _smooth(values)).mean()) / math.sqrt(_window(len(values)))
        improved = float(smooth[-1 - len(smooth) // 3] - smooth[-1])
        return "tax" if improved > ripple and gaps.mean() <= _PATIENCE * improved else "floor"

    def largest(self, cost: float | None = None, optimizer: str = OWN) -> int:
        """The largest delay such that it, and every shorter one that was run, costs at most ``cost``.

        Args:
            cost: as a share of the number without delay; by default that of the study.
            optimizer: which one's.
        """
        allowed = (self.cost if cost is None else cost) * abs(self.numbers(optimizer, 0).mean())
        largest = 0
        for delay in self.delays:
            gap = self._worse(self.numbers(optimizer, delay), self.numbers(optimizer, 0)).mean()
            if not gap <= allowed:
                break
            largest = delay
        return largest

    # ---- To look at

    def table(self) -> str:
        """All points as a Markdown table, and a line for each optimizer that says what it can stand."""
        from lategrad.tolerance_study.show import table

        return table(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """The number against the delay, and over updates where there are such numbers; saved if there is a path."""
        from lategrad.tolerance_study.show import plot

        return plot(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """One page with the picture and the table; needs no other file."""
        from lategrad.tolerance_study.show import page

        return _write(path, page(self))

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        points = [asdict(point) for point in self.points()]
        with replacing(where) as part, part.open("w", newline="") as file:
            rows = csv.DictWriter(file, points[0].keys())
            rows.writeheader()
            rows.writerows(points)
        return where

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Everything, runs included; :meth:`load` reads it."""
        points = [{name: finite_or_none(value) for name, value in asdict(point).items()} for point in self.points()]
        runs = [run.as_json() for run in self.runs]
        return _write(path, json.dumps({"format": _FORMAT, **asdict(self), "runs": runs, "points": points}, indent=1))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tolerance:
        """Read what :meth:`to_json` wrote."""
        saved = json.loads(Path(path).read_text())
        valid = isinstance(saved, dict) and saved.get("format") == _FORMAT
        require("path", os.fspath(path), valid, f"a file of the format {_FORMAT!r}")
        return Tolerance(
            tuple(map(Run.from_json, saved["runs"])), saved["better"], saved["cost"], saved["profile"], saved["name"]
        )


def _write(path: str | os.PathLike[str], text: str) -> Path:
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    with replacing(where) as part:
        part.write_text(text)
    return where


def _deviation(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 and np.isfinite(values).all() else math.nan


def _window(length: int) -> int:
    return max(1, length // 10)


def _smooth(values: Array) -> Array:
    """The mean over the last tenth of the records up to each."""
    window = _window(len(values))
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _first_passage(at: Array, values: Array, level: float) -> float | None:
    """When a falling curve first comes down to a level, between records on a straight line."""
    below = np.nonzero(values <= level)[0]
    if not len(below):
        return None
    i = int(below[0])
    if i == 0 or values[i - 1] == values[i]:
        return float(at[i])
    share = (values[i - 1] - level) / (values[i - 1] - values[i])
    return float(at[i - 1] + share * (at[i] - at[i - 1]))
