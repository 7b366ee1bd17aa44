"""The one place where a worker's fate is decided: who is started, let go, killed, replaced, and when a run gives up.

It knows engines only by their protocol, and is told by it what the workers do. It is the same for threads, processes
and Ray.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from dataclasses import dataclass

from lategrad.serve.engines.engine import Ended, Engine, Report, TrainingError
from lategrad.serve.jobs import Location
from lategrad.serve.settings import MOST_WORKERS
from lategrad.support.validation import require

_FRUITLESS = 5  # deaths in a row before any gradient arrived, for each worker, after which the run gives up
_LONGEST_BACKOFF = 5.0
_SHORTEST_BACKOFF = 0.2
_OUT_OF_WORK = 0.5  # seconds after which a worker that ended by itself is started again, unless it was dropped


@dataclass
class _Member:
    """One worker that was started; a replacement under the same number is another member."""

    worker: int
    started: float
    location: Location | None = None
    """Known once it has joined."""
    delivered: int = 0
    leaving: bool = False


class Supervisor:
    """Looks after the workers of a run.

    Args:
        engine: which starts and ends them.
        fewest: workers that there must be.
        most: workers that there may be, if the engine has room for them.
        deadline: seconds without a gradient after which a worker is taken for hung.
        replaced: how often workers were replaced before the run was resumed.
        stall: seconds without an update after which the run gives up; None for never.
    """

    def __init__(
        self,
        engine: Engine,
        fewest: int,
        most: int,
        deadline: float,
        replaced: Counter[str],
        stall: float | None = None,
    ) -> None:
        self._engine, self._deadline = engine, deadline
        self._fewest, self._most = fewest, most
        self.replaced = replaced
        self._numbers = fewest  # the workers that there ever were
        self._members: dict[int, _Member] = {}
        self._next_member = itertools.count()
        self._deaths_in_a_row: Counter[int] = Counter()
        self._fruitless = 0
        self._seen = 0
        self._stall = None if stall is None else max(stall, 2 * deadline)
        self._progress_at: float | None = None
        self._version_then = 0
        self._not_before: dict[int, float] = {}
        self._could_not_start: set[int] = set()

    @property
    def workers(self) -> dict[int, Location]:
        """The workers that have joined and are not known to have ended, by their numbers, with where they run."""
        members = sorted(self._members.items(), key=lambda item: item[1].worker)
        found = {member.worker: self._location(number, member) for number, member in members if not member.leaving}
        return {worker: location for worker, location in found.items() if location is not None}

    def _location(self, number: int, member: _Member) -> Location | None:
        """A member has one from the moment it joins, and keeps it while the server is away."""
        return member.location or self._engine.location(number)

    def set_workers(self, count: int) -> None:
        """Go on with so many workers: more are started, or the last ones leave after their next gradient."""
        require("workers", count, isinstance(count, int) and 1 <= count <= MOST_WORKERS,
                f"an integer in 1..{MOST_WORKERS}")  # fmt: skip
        self._fewest = self._most = count

    def require_progress(self, now: float) -> None:
        """Give up a run that has made no update for too long."""
        waits_for_room = not self.workers and self._engine.start_deadline == math.inf
        if self._progress_at is None or self._engine.version != self._version_then or waits_for_room:
            self._progress_at, self._version_then = now, self._engine.version
        elif self._stall is not None and now - self._progress_at > self._stall:
            dead = ", ".join(f"{worker} {count} times" for worker, count in sorted(self.replaced.items()))
            raise TrainingError(f"no update was made for {self._stall:g} s, after update {self._version_then}; "
                                f"replaced so far: {dead or 'nobody'}")  # fmt: skip

    def look_after(self, report: Report, now: float) -> None:
        """See that there are as many workers as there should be, and none that hangs."""
        if report.version != self._seen:
            self._fruitless, self._seen = 0, report.version
        for number, activity in report.activities.items():
            if number in self._members:
                self._members[number].location = activity.location
                self._members[number].delivered = activity.delivered
        self._end_hung(report, now)
        wanted = int(min(self._most, max(self._fewest, self._engine.room())))
        self._numbers = max(self._numbers, wanted)
        usable = [worker for worker in range(self._numbers) if worker not in report.dropped][:wanted]
        if not usable:
            diverged = "not finite" in str(report.last_refusal)
            hint = "; if the loss grew before, the steps are too long: a smaller lr, or clip=..." if diverged else ""
            raise TrainingError(f"all workers were dropped; the last refusal: {report.last_refusal}{hint}")
        serving = {member.worker for member in self._members.values() if not member.leaving}
        for worker in usable:
            if worker not in serving and now >= self._not_before.get(worker, 0.0):
                self._start(worker, now)
        for number, member in list(self._members.items()):
            if member.worker not in usable and not member.leaving:
                self._let_go(number, member)

    def _start(self, worker: int, now: float) -> None:
        number = next(self._next_member)
        try:
            self._engine.start(number, worker)
        except OSError as error:  # such as too many open files
            self._not_before[worker] = now + _LONGEST_BACKOFF
            if not self._members:
                raise TrainingError(f"no worker can be started: {error}") from error
            if worker not in self._could_not_start:
                self._could_not_start.add(worker)
                others = f"{len(self._members)} others go on"
                warnings.warn(f"worker {worker} could not be started ({error}): {others}", stacklevel=2)
            return
        self._members[number] = _Member(worker, now)

    def _let_go(self, number: int, member: _Member) -> None:
        member.leaving = True
        if self._location(number, member) is None:  # it has not come yet, and there may be no room for it
            self._kill(number)
        else:
            self._engine.release(number)  # it leaves when it hands back what it is at

    def _kill(self, number: int) -> None:
        if not self._engine.kill(number):
            del self._members[number]  # nobody will tell of its end

    def _end_hung(self, report: Report, now: float) -> None:
        for number, member in list(self._members.items()):
            activity = report.activities.get(number)
            if activity is None:
                silent, allowed = now - member.started, max(self._engine.start_deadline, self._deadline)
            else:
                silent, allowed = activity.silent, self._deadline
            if silent <= allowed:
                continue
            if not member.leaving:
                member.leaving = True
                at = f"at update {report.version}"
                warnings.warn(f"worker {member.worker} has not answered for {allowed:g} s {at} and is replaced",
                              stacklevel=2)  # fmt: skip
                self.replaced[f"worker {member.worker}"] += 1
            self._kill(number)

    def bury(self, ended: Ended, now: float) -> None:
        """A member has come to its end; unless that was meant, it will be replaced."""
        member = self._members.pop(ended.member, None)
        if member is None or member.leaving:
            return
        if ended.reason is None:
            self._not_before[member.worker] = now + _OUT_OF_WORK
            return
        self.replaced[f"worker {member.worker}"] += 1
        after = f"after update {self._engine.version}"
        warnings.warn(f"worker {member.worker} died {after} ({ended.reason}) and is replaced", stacklevel=2)
        if member.delivered or ended.delivered:
            self._deaths_in_a_row.pop(member.worker, None)
            return
        self._fruitless += 1
        self._deaths_in_a_row[member.worker] += 1
        backoff = _SHORTEST_BACKOFF * 2 ** min(self._deaths_in_a_row[member.worker] - 1, 10)
        self._not_before[member.worker] = now + min(_LONGEST_BACKOFF, backoff)
        if self._fruitless >= _FRUITLESS * self._fewest:
            raise TrainingError(
                f"{self._fruitless} workers in a row died before their first gradient, the last with {ended.reason}; "
                "what they wrote on stderr says why"
            )
