"""An engine whose server is in this process, with workers on this machine at the other end of a transport."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.archive import Archive, MemoryArchive, Writer
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.engines.engine import LAST_EVALUATIONS, Ended, Report, TrainingError, check_returns
from lategrad.serve.engines.processes import Processes
from lategrad.serve.engines.threads import Threads
from lategrad.serve.engines.transport import Disconnected, Failed, Malformed, Ready, Result, Transport, WorkerHandle
from lategrad.serve.jobs import FOREVER, ForeignMessageError, Location
from lategrad.serve.messages import Job
from lategrad.serve.observe.records import Look, Telemetry
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.support.threads import torch_threads
from lategrad.trace import Trace

_HERE = "this machine"
_POLL_INTERVAL = 0.1  # seconds to wait for an evaluation before checking whether the run is to stop


class LocalEngine:
    """The server of a run in this process, driven by what its workers send."""

    start_deadline = 120.0

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, archive: Archive | None) -> None:
        self.server = Server(problem, rule, settings)
        self.records = self.server.records
        self._writer = Writer(archive or MemoryArchive(settings.checkpoint_every))
        if settings.engine == "threads":
            self._transport: Transport = Threads(problem, settings)
        else:
            self._transport = Processes(problem, settings, self.server.compression, lambda: self._stopping)
        self._handles: dict[int, WorkerHandle] = {}
        self._expelled: set[int] = set()
        self._shown = 0
        self._stopping = False
        self._resources = contextlib.ExitStack()

    @property
    def version(self) -> int:
        return self.server.version

    def watch(self, look: Look) -> None:
        self.records.listener = lambda output: look(self.server.telemetry(), output)

    def request_stop(self) -> None:
        self._stopping = True

    def begin(self, checkpoint: Checkpoint | None, check: Callable[[], None]) -> bool:
        self._resources.enter_context(torch_threads(self.server.threads))
        if checkpoint is not None:
            self.server.restore(checkpoint)
            self._shown = self.server.version
        check()
        self.save()
        return self._writer.saved_version >= 0

    def start(self, member: int, worker: int) -> None:
        self._handles[member] = self._transport.start(member, worker)

    def location(self, member: int) -> Location | None:
        return self.server.jobs.location(member)

    def release(self, member: int) -> None:
        """A worker has a job unless its next message is on its way: it is dismissed when that is answered."""
        self.server.jobs.release(member)

    def kill(self, member: int) -> bool:
        """End a worker, or, if it is a thread, abandon it: if it ever returns, its gradient is used."""
        self.server.jobs.release(member)
        if not (killed := self._handles[member].kill()):
            del self._handles[member]
            self.server.jobs.remove(member, wait=FOREVER)
        return killed

    def wait(self, timeout: float) -> list[Ended]:
        ended: list[Ended] = []
        for event in self._transport.wait(timeout):
            member = event.handle.member
            if isinstance(event, Disconnected):
                ended += self._remove(member, None if self.server.jobs.is_leaving(member) else event.reason)
            elif isinstance(event, Malformed):
                ended += self._expel(event.handle, event.reason)
            elif member not in self._expelled:
                try:
                    self._answer(event)
                except ForeignMessageError as error:
                    ended += self._expel(event.handle, str(error))
            if self.server.done:
                break
            while self.records.are_behind and not self._stopping:  # updates wait: no record is left out
                self.records.collect(_POLL_INTERVAL)
        self.records.collect()
        return ended

    def _answer(self, event: Ready | Result | Failed) -> None:
        handle, server = event.handle, self.server
        member = handle.member
        jobs: list[Job | None]
        if isinstance(event, Result):
            jobs = [server.deliver(member, event.version, event.sequence, event.grad, event.query,
                                   checked=event.checked, info=event.info)]  # fmt: skip
        elif isinstance(event, Failed):
            jobs = [server.fail(member, event.sequence, event.reason, event.query)]
        elif server.jobs.has_joined(member):
            raise ForeignMessageError("it reports a second time that it has started")
        else:
            location = Location(handle.pid, _HERE)
            jobs = [server.join(member, handle.worker, location, query) for query in event.queries]
        for job in jobs:
            if job is not None:
                handle.send(job)
        if jobs[-1] is None and not server.jobs.has_jobs(member):
            handle.dismiss()
        if server.poisoned:
            self._go_back()
        elif self._writer.is_free and self._writer.archive.schedule.is_due(server.version):
            self._save()  # while the workers compute: a copy of the state, which a thread writes

    def _expel(self, handle: WorkerHandle, reason: str) -> list[Ended]:
        """End a worker that sends what it should not; its jobs are given up."""
        self._expelled.add(handle.member)
        handle.kill()
        return self._remove(handle.member, reason)

    def _remove(self, member: int, reason: str | None) -> list[Ended]:
        """A worker has ended, or nothing more is accepted from it."""
        if self._handles.pop(member, None) is None:
            return []
        activity = self.server.jobs.activities().get(member)
        self.server.jobs.remove(member)
        return [Ended(member, reason, activity is not None and activity.delivered > 0)]

    def room(self) -> float:
        return math.inf

    def report(self, now: float, replaced: dict[str, int]) -> Report:
        server = self.server
        server.config["replaced"] = dict(replaced)
        return Report(server.version, server.done, server.jobs.activities(now), frozenset(server.dropped),
                      server.last_refusal)  # fmt: skip

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        fresh = self.server.log.column("delay", self.server.version - self._shown)
        self._shown = self.server.version
        return self.server.telemetry(), fresh

    def _save(self) -> None:
        """Start to write a checkpoint; the one before must be written."""
        if not self.server.whole:
            warnings.warn(f"no checkpoint: update {self.server.version + 1} was interrupted", stacklevel=2)
        elif self.server.is_sound():
            newest = self._writer.newest
            room = None if newest is None else newest.tensors
            self._writer.write(self.server.checkpoint(self._writer.archive.logged, room))
        else:
            self._go_back()

    def save(self) -> None:
        """Make a checkpoint and wait for it, unless there is nothing new or the last update was interrupted."""
        if self._writer.wait() and self._writer.saved_version != self.server.version:
            self._save()
            self._writer.wait()

    def _go_back(self) -> None:
        """Continue from the last finite state, and give up where that has not helped."""
        self._writer.wait()
        if (newest := self._writer.newest) is None:
            raise TrainingError("the state is infinite or NaN before the first update: see start() of the problem")
        self.server.go_back(dataclasses.replace(newest, rows=self.server.log.rows()[: newest.version]))
        self._shown = min(self._shown, self.server.version)
        check_returns(self.server.returns_in_a_row, self.server.version)

    def finish(self, at_once: bool) -> Trace:
        self.save()
        while not at_once and self.records.drain(_POLL_INTERVAL):
            at_once = self._stopping
        return self.server.trace(LAST_EVALUATIONS if at_once else math.inf)

    def close(self) -> None:
        with self._resources:
            self._transport.close()
