"""Decides when workers are started, released, killed or restarted, and when a run is given up; for every engine."""

import itertools
import math
import warnings
from collections import Counter
from dataclasses import dataclass

from lategrad.serve.engines.engine import Ended, Engine, Report, TrainingError
from lategrad.serve.jobs import Location
from lategrad.serve.settings import MAX_WORKERS
from lategrad.support.validation import require

_MAX_EARLY_DEATHS = 5  # per worker, in a row and before any gradient, after which the run is given up
_MAX_BACKOFF = 5.0  # seconds before a worker that died early is restarted
_MIN_BACKOFF = 0.2
_REJOIN_AFTER = 0.5  # seconds before a worker that ended by itself is started again, unless it was dropped


@dataclass
class _Status:
    """One worker that was started; a replacement under the same number has a status of its own."""

    worker: int
    started: float
    location: Location | None = None  # until it has joined
    delivered: int = 0
    leaving: bool = False


class Supervisor:
    """Keeps ``min_workers`` to ``max_workers`` workers running, as many as the engine has room for.

    A worker is hung after ``deadline`` seconds without a gradient, and the run is given up after ``stall`` seconds
    without an update. ``replaced`` counts how often each worker was restarted, also before the run was resumed.
    """

    def __init__(self, engine: Engine, min_workers: int, max_workers: int, deadline: float, replaced: Counter[str],
                 stall: float | None = None) -> None:  # fmt: skip
        self._engine, self._deadline, self.replaced = engine, deadline, replaced
        self._min_workers, self._max_workers = min_workers, max_workers
        self.is_stopping = False  # then no worker is started any more
        self._highest_count = min_workers  # of workers at any time so far
        self._members: dict[int, _Status] = {}
        self._next_member = itertools.count()
        self._early_deaths = 0
        self._early_deaths_of: Counter[int] = Counter()
        self._version_checked = 0
        self._stall = None if stall is None else max(stall, 2 * deadline)
        self._progress_at: float | None = None
        self._progress_version = 0
        self._start_after: dict[int, float] = {}
        self._start_failures: set[int] = set()

    @property
    def workers(self) -> dict[int, Location]:
        members = sorted(self._members.items(), key=lambda item: item[1].worker)
        found = {status.worker: self._location(member, status) for member, status in members if not status.leaving}
        return {worker: location for worker, location in found.items() if location is not None}

    def _location(self, member: int, status: _Status) -> Location | None:
        return status.location or self._engine.location(member)  # also while the server is being restarted

    def set_workers(self, count: int) -> None:
        is_valid = isinstance(count, int) and 1 <= count <= MAX_WORKERS
        require("workers", count, is_valid, f"an integer in 1..{MAX_WORKERS}")
        self._min_workers = self._max_workers = count

    def require_progress(self, now: float) -> None:
        """Give up a run that has made no update for too long."""
        waits_for_room = not self.workers and self._engine.start_deadline == math.inf
        if self._progress_at is None or self._engine.version != self._progress_version or waits_for_room:
            self._progress_at, self._progress_version = now, self._engine.version
        elif self._stall is not None and now - self._progress_at > self._stall:
            restarts = ", ".join(f"{worker} {count} times" for worker, count in sorted(self.replaced.items()))
            raise TrainingError(f"no update for {self._stall:g} s after update {self._progress_version}; restarted so "
                                f"far: {restarts or 'no worker'}")  # fmt: skip

    def check(self, report: Report, now: float) -> None:
        """Start and release workers until there are as many as there should be, and restart hung ones."""
        if report.version != self._version_checked:
            self._early_deaths, self._version_checked = 0, report.version
        for member, activity in report.activities.items():
            if (status := self._members.get(member)) is not None:
                status.location, status.delivered = activity.location, activity.delivered
        self._kill_hung(report, now)
        target = int(min(self._max_workers, max(self._min_workers, self._engine.room())))
        self._highest_count = max(self._highest_count, target)
        # Where there is room for fewer, as when a machine is lost, those that run stay, and then the lowest numbers.
        candidates = (worker for worker in range(self._highest_count) if worker not in report.dropped)
        running = self.workers
        usable = sorted(candidates, key=lambda worker: worker not in running)[:target]
        if not usable:
            diverged = "not finite" in str(report.last_refusal)
            hint = "; if the loss grew before, lower the learning rate or set clip=..." if diverged else ""
            raise TrainingError(f"all workers were dropped; the last refusal: {report.last_refusal}{hint}")
        active = {status.worker for status in self._members.values() if not status.leaving}
        for worker in usable:
            if worker not in active and now >= self._start_after.get(worker, 0.0) and not self.is_stopping:
                self._start(worker, now)
        for member, status in list(self._members.items()):
            if status.worker not in usable and not status.leaving:
                status.leaving = True
                if self._location(member, status) is None:  # it has not joined yet, and there may be no room for it
                    self._kill(member)
                else:
                    self._engine.release(member)  # it leaves when it returns its current gradient

    def _start(self, worker: int, now: float) -> None:
        member = next(self._next_member)
        try:
            self._engine.start(member, worker)
        except OSError as error:  # such as too many open files
            if self.is_stopping:
                return
            self._start_after[worker] = now + _MAX_BACKOFF
            if not self._members:
                raise TrainingError(f"no worker can be started: {error}") from error
            if worker not in self._start_failures:
                self._start_failures.add(worker)
                others = f"{len(self._members)} others continue"
                warnings.warn(f"worker {worker} could not be started ({error}): {others}", stacklevel=2)
        else:
            self._members[member] = _Status(worker, now)

    def _kill(self, member: int) -> None:
        if not self._engine.kill(member):
            del self._members[member]  # the engine will not report its end

    def _kill_hung(self, report: Report, now: float) -> None:
        for member, status in list(self._members.items()):
            if (activity := report.activities.get(member)) is None:
                silent, allowed = now - status.started, max(self._engine.start_deadline, self._deadline)
            else:
                silent, allowed = activity.silent, self._deadline
            if silent <= allowed:
                continue
            if not status.leaving:
                status.leaving = True
                warnings.warn(f"worker {status.worker} did not respond for {allowed:g} s (after update "
                              f"{report.version}) and is restarted", stacklevel=2)  # fmt: skip
                self.replaced[f"worker {status.worker}"] += 1
            self._kill(member)

    def handle_end(self, ended: Ended, now: float) -> None:
        """A member has ended; unless that was intended, it will be restarted."""
        status = self._members.pop(ended.member, None)
        if status is None or status.leaving:
            return
        worker = status.worker
        if ended.reason is None:
            self._start_after[worker] = now + _REJOIN_AFTER
            return
        self.replaced[f"worker {worker}"] += 1
        warnings.warn(f"worker {worker} died after update {self._engine.version} ({ended.reason}) and is restarted",
                      stacklevel=2)  # fmt: skip
        if status.delivered or ended.delivered:
            self._early_deaths_of.pop(worker, None)
            return
        self._early_deaths += 1
        self._early_deaths_of[worker] += 1
        backoff = _MIN_BACKOFF * 2 ** min(self._early_deaths_of[worker] - 1, 10)
        self._start_after[worker] = now + min(_MAX_BACKOFF, backoff)
        if self._early_deaths >= _MAX_EARLY_DEATHS * self._min_workers:
            raise TrainingError(f"{self._early_deaths} workers in a row died before their first gradient, the last "
                                f"with {ended.reason}; see what they wrote to stderr")  # fmt: skip
