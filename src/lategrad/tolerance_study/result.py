"""The result of a study: the final value at each delay, its cost, and whether more updates would recover it."""

import json
import math
import os
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lategrad.support.files import write_text
from lategrad.support.validation import require
from lategrad.tolerance_study import show
from lategrad.tolerance_study.run import OWN, Run, finite_or_none
from lategrad.trace import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETTER = ("lower", "higher")
_FORMAT = "lategrad-tolerance-1"
_MIN_RECORDS = 6  # of a curve over time, for a verdict
_RECOVERY = 10  # more thirds of the run in which a recoverable gap closes, at the pace of the last third

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """The effect of one delay on one optimizer; means over seeds, and their standard deviations (NaN with one seed)."""

    optimizer: str
    delay: int
    value: float
    spread: float
    gap: float  #: loss against the same seed without delay; negative for a gain
    gap_spread: float
    gap_to_own: float  #: loss against the training's own optimizer without delay
    updates: int  #: T, the number of updates. The last gradients of a run are still in flight at its end
    rounds: float  #: T / (1 + delay): the length of a chain of updates each of which can depend on the one before
    slowdown: float | None
    """The factor in updates to the best value that both runs reached, if values over time are known; a lower bound,
    if the run without delay had reached it at its first record."""
    verdict: str
    """"free", "unclear", "recoverable", "permanent", "diverged" or "costs" (see :meth:`Tolerance.verdict`)."""
    drift: float | None = None  #: V, the mean distance that the parameters move during the delay of a gradient


@dataclass(frozen=True, eq=False)
class Tolerance:
    """The result of :func:`lategrad.tolerance`."""

    runs: tuple[Run, ...]
    better: str = "lower"
    cost: float = 0.05  #: the accepted loss, as a share of the value without delay
    profile: str | None = None
    name: str = "train"

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers; the training's own is "own"."""
        return tuple(dict.fromkeys(run.task.optimizer for run in self.runs))

    @property
    def delays(self) -> tuple[int, ...]:
        """The delays in increasing order, from 0."""
        return tuple(sorted({run.task.delay for run in self.runs}))

    def _of(self, optimizer: str, delay: int) -> list[Run]:
        require("optimizer", optimizer, optimizer in self.optimizers, f"one of {', '.join(self.optimizers)}")
        runs = [run for run in self.runs if (run.task.optimizer, run.task.delay) == (optimizer, delay)]
        return sorted(runs, key=lambda run: run.task.seed)

    def values(self, optimizer: str, delay: int) -> Array:
        """The final value of each seed."""
        return np.array([run.values[-1] for run in self._of(optimizer, delay)])

    def seeds_agree(self) -> bool:
        """Whether all seeds have the same value at every delay."""
        return all(np.ptp(self.values(name, delay)) == 0 for name in self.optimizers for delay in self.delays)

    def curve(self, optimizer: str, delay: int) -> tuple[Array, Array]:
        """Updates, and the value over time: the mean over seeds, up to the shortest run."""
        runs = self._of(optimizer, delay)
        length = min(len(run.values) for run in runs)
        values = np.array([run.values[:length] for run in runs]).mean(0)
        return np.array(runs[0].updates[:length], dtype=np.float64), values

    def _worse(self, a: Array | float, b: Array | float) -> Any:
        return a - b if self.better == "lower" else b - a

    def point(self, optimizer: str, delay: int) -> Point:
        """The effect of a delay on an optimizer."""
        values = self.values(optimizer, delay)
        gaps = self._worse(values, self.values(optimizer, 0))
        updates = int(np.mean([run.updates[-1] for run in self._of(optimizer, delay)]))
        drift = [run.drift for run in self._of(optimizer, delay) if run.drift is not None] or [math.nan]
        return Point(optimizer=optimizer, delay=delay, value=float(values.mean()), spread=_deviation(values),
                     gap=float(gaps.mean()), gap_spread=_deviation(gaps),
                     gap_to_own=float(self._worse(values, self.values(OWN, 0)).mean()), updates=updates,
                     rounds=updates / (1 + delay), slowdown=self._slowdown(optimizer, delay),
                     verdict=self.verdict(optimizer, delay), drift=finite_or_none(float(np.mean(drift))))  # fmt: skip

    def points(self) -> list[Point]:
        """All points, by optimizer and delay."""
        return [self.point(name, delay) for name in self.optimizers for delay in self.delays]

    def _slowdown(self, optimizer: str, delay: int) -> float | None:
        (at, values), (at_0, values_0) = self.curve(optimizer, delay), self.curve(optimizer, 0)
        if min(len(values), len(values_0)) < _MIN_RECORDS or not np.isfinite([*values, *values_0]).all():
            return None
        delayed, base = self._worse(_smooth(values), 0.0), self._worse(_smooth(values_0), 0.0)
        level = max(delayed.min(), base.min())
        time, time_0 = _first_passage(at, delayed, level), _first_passage(at_0, base, level)
        return None if time is None or not time_0 else time / time_0

    def verdict(self, optimizer: str, delay: int) -> str:
        """The kind of cost that a delay has: a name of ``lategrad.tolerance_study.show.MEANING``."""
        values, base = self.values(optimizer, delay), self.values(optimizer, 0)
        if not np.isfinite(values).all():
            return "diverged"
        gaps = self._worse(values, base)
        noise = 2 * _deviation(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        if gaps.mean() <= self.cost * abs(base.mean()):
            return "free"
        if gaps.mean() <= noise:
            return "unclear"
        _, curve = self.curve(optimizer, delay)
        if len(curve) < _MIN_RECORDS or not np.isfinite(curve).all():
            return "costs"
        smooth = _smooth(self._worse(curve, 0.0))
        ripple = float(np.abs(curve - _smooth(curve)).mean()) / math.sqrt(_window(len(curve)))
        progress = float(smooth[-1 - len(smooth) // 3] - smooth[-1])
        return "recoverable" if progress > ripple and gaps.mean() <= _RECOVERY * progress else "permanent"

    def largest(self, cost: float | None = None, optimizer: str = OWN) -> int:
        """The largest delay such that it, and every shorter one that was run, costs at most ``cost``.

        Args:
            cost: as a share of the value without delay; by default that of the study.
            optimizer: its name.
        """
        base = self.values(optimizer, 0)
        allowed = (self.cost if cost is None else cost) * abs(base.mean())
        gaps = {delay: self._worse(self.values(optimizer, delay), base).mean() for delay in self.delays}
        return max(takewhile(lambda delay: gaps[delay] <= allowed, self.delays), default=0)

    def table(self) -> str:
        """All points as a Markdown table, and for each optimizer the delay that it tolerates."""
        return show.table(self)

    __str__ = table

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """The value against the delay, and over updates if values over time are known; saved if a path is given."""
        return show.plot(self, path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page with the picture and the table."""
        return write_text(path, show.page(self))

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write a row for each point."""
        return write_csv(path, map(asdict, self.points()))

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write everything, runs included; :meth:`load` reads it."""
        points = [{name: finite_or_none(value) for name, value in asdict(point).items()} for point in self.points()]
        runs = [run.as_json() for run in self.runs]
        contents = {"format": _FORMAT, **asdict(self), "runs": runs, "points": points}
        return write_text(path, json.dumps(contents, indent=1))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tolerance":
        """Read what :meth:`to_json` wrote."""
        saved = json.loads(Path(path).read_text())
        valid = isinstance(saved, dict) and saved.get("format") == _FORMAT
        require("path", os.fspath(path), valid, f"a file of the format {_FORMAT!r}")
        runs = tuple(map(Run.from_json, saved["runs"]))
        return Tolerance(runs, saved["better"], saved["cost"], saved["profile"], saved["name"])


def _deviation(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 and np.isfinite(values).all() else math.nan


def _window(length: int) -> int:
    return max(1, length // 10)


def _smooth(values: Array) -> Array:
    """For each record the mean over it and those before, a tenth of all at most."""
    window = _window(len(values))
    return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])


def _first_passage(at: Array, values: Array, level: float) -> float | None:
    """When a falling curve first reaches a level, with linear interpolation between records."""
    below = np.nonzero(values <= level)[0]
    if not len(below):
        return None
    i = int(below[0])
    if i == 0 or values[i - 1] == values[i]:
        return float(at[i])
    share = (values[i - 1] - level) / (values[i - 1] - values[i])
    return float(at[i - 1] + share * (at[i] - at[i - 1]))
