"""An engine whose server is in this process: workers on this machine, at the other end of a transport."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.archive import Archive, MemoryArchive
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.checkpoints.writer import Writer
from lategrad.serve.desk import FOR_EVER, Desk, ForeignMessageError, Location
from lategrad.serve.engines.engine import (
    LAST_EVALUATIONS,
    MOST_RETURNS,
    Ended,
    Report,
    TrainingError,
    poisoned_for_good,
)
from lategrad.serve.engines.processes import Processes
from lategrad.serve.engines.threads import Threads
from lategrad.serve.engines.transport import Arrived, Failed, Garbled, Lost, Ready, Transport, WorkerHandle
from lategrad.serve.main_guard import require_main_guard
from lategrad.serve.messages import Job
from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.observe.watch import Look
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.support.threads import torch_threads
from lategrad.trace import Trace

_HERE = "this machine"
_PATIENCE = 0.1  # seconds that an evaluation is waited for before it is asked whether the run is to end


class LocalEngine:
    """The server of a run in this process, driven by what its workers send."""

    start_deadline = 120.0

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, archive: Archive | None) -> None:
        self.server = Server(problem, rule, settings)
        self._desk = Desk(self.server)
        self._writer = Writer(archive or MemoryArchive(settings.checkpoint_every))
        self._transport = _transport(problem, settings, self.server, lambda: self._stopping)
        self._threads = settings.threads
        self._handles: dict[int, WorkerHandle] = {}
        self._expelled: set[int] = set()
        self._shown = 0
        self._stopping = False
        self._resources = contextlib.ExitStack()

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self.server.version

    @property
    def records(self) -> Records:
        """The server's."""
        return self.server.records

    def watch(self, look: Look) -> None:
        """Call this for every record."""
        self.records.listener = lambda output: look(self.server.telemetry(), output)

    def request_stop(self) -> None:
        """Wait for no evaluation any more; for the server, in this process, and workers nobody waits for long."""
        self._stopping = True

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Go on from a checkpoint if there is one; if checkpoints are asked for, the first must succeed."""
        self._resources.enter_context(torch_threads(self._threads))
        if checkpoint is not None:
            self.server.restore(checkpoint)
            self._shown = self.server.version
        self.save()
        if self._writer.saved_version < 0:
            raise self._writer.archive.unusable()

    # ---- Workers

    def start(self, member: int, worker: int) -> None:
        """Start a worker."""
        self._handles[member] = self._transport.start(member, worker)

    def location(self, member: int) -> Location | None:
        """As the desk knows."""
        return self._desk.location(member)

    def let_go(self, member: int) -> None:
        """A worker has a job unless its next message is on its way: it is dismissed when that is answered."""
        self._desk.let_go(member)

    def kill(self, member: int) -> bool:
        """End a worker, or, if it is a thread, abandon it: if it ever comes back, its gradient is used."""
        self._desk.let_go(member)
        handle = self._handles[member]
        killed = handle.kill()
        if not killed:
            del self._handles[member]
            self._desk.bury(member, handle.worker, wait=FOR_EVER)
        return killed

    def wait(self, timeout: float) -> list[Ended]:
        """Handle what has come in, an update for each gradient."""
        ended: list[Ended] = []
        for event in self._transport.wait(timeout):
            if isinstance(event, Lost):
                ended += self._bury(event)
            elif isinstance(event, Garbled):
                ended += self._expel(event.handle, event.reason)
            elif event.handle.member not in self._expelled:
                try:
                    self._answer(event)
                except ForeignMessageError as error:
                    ended += self._expel(event.handle, str(error))
            if self.server.done:
                break
            self._let_evaluations_keep_up()
        self.records.collect()
        return ended

    def _let_evaluations_keep_up(self) -> None:
        """Where more are asked for than can be made, updates wait: no record is left out, and memory is bounded."""
        while self.records.are_behind and not self._stopping:
            self.records.collect(_PATIENCE)

    def _answer(self, event: Ready | Arrived | Failed) -> None:
        handle, desk = event.handle, self._desk
        member, worker = handle.member, handle.worker
        jobs: list[Job | None]
        if isinstance(event, Arrived):
            jobs = [desk.deliver(member, worker, event.version, event.sequence, event.grad, event.query,
                                 checked=event.checked, made=event.made)]  # fmt: skip
        elif isinstance(event, Failed):
            jobs = [desk.fail(member, worker, event.sequence, event.reason, event.query)]
        elif desk.has_joined(member):
            raise ForeignMessageError("it says that it has started, and did so before")
        else:
            location = Location(handle.pid, _HERE)
            jobs = [desk.join(member, worker, location, query) for query in event.queries]
        for job in jobs:
            if job is not None:
                handle.send(job)
        if jobs[-1] is None and not desk.has_jobs(member):
            handle.dismiss()
        if self.server.poisoned:
            self._go_back()
        else:
            self._save_if_due()

    def _expel(self, handle: WorkerHandle, reason: str) -> list[Ended]:
        """End a worker that cannot be trusted to say which gradient it has; its jobs are given up."""
        self._expelled.add(handle.member)
        handle.kill()
        return self._forget(handle, reason)

    def _bury(self, event: Lost) -> list[Ended]:
        return self._forget(event.handle, None if self._desk.is_leaving(event.handle.member) else event.reason)

    def _forget(self, handle: WorkerHandle, reason: str | None) -> list[Ended]:
        """A worker has ended, or nothing more is taken from it."""
        member = handle.member
        if self._handles.pop(member, None) is None:
            return []
        activity = self._desk.activities().get(member)
        self._desk.bury(member, handle.worker)
        return [Ended(member, reason, activity is not None and activity.delivered > 0)]

    def room(self) -> float:
        """There is no limit."""
        return math.inf

    # ---- The server

    def report(self, now: float, replaced: dict[str, int]) -> Report:
        """How things are; whatever came after ``now`` is not late."""
        server = self.server
        server.config["replaced"] = dict(replaced)
        return Report(server.version, server.done, self._desk.activities(now), server.all_dropped(),
                      server.last_refusal)  # fmt: skip

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        """What monitors show."""
        fresh = self.server.log.column("delay", self.server.version - self._shown)
        self._shown = self.server.version
        return self.server.telemetry(), fresh

    def _save_if_due(self) -> None:
        """While the workers are at their next gradients: a copy of the state, which is written beside the updates."""
        if self._writer.is_free and self._writer.archive.schedule.is_due(self.server.version):
            self._save()

    def _save(self) -> None:
        """Begin to write a checkpoint; the one before must be written."""
        if not self.server.whole:
            warnings.warn(f"no checkpoint: update {self.server.version + 1} was broken off half-way", stacklevel=2)
        elif self.server.is_sound():
            newest = self._writer.newest
            room = None if newest is None else newest.tensors
            self._writer.write(self.server.checkpoint(self._writer.archive.logged, room))
        else:
            self._go_back()

    def save(self) -> None:
        """Make a checkpoint and wait for it, unless there is nothing new, or a state that is not whole."""
        if self._writer.wait() and self._writer.saved_version != self.server.version:
            self._save()
            self._writer.wait()

    def _go_back(self) -> None:
        """The state is not finite: go on from the last that was, and give up where that has not helped."""
        self._writer.wait()
        newest = self._writer.newest
        if newest is None:
            raise TrainingError("the state is infinite or NaN before the first update: see start() of the problem")
        self.server.go_back(dataclasses.replace(newest, rows=self.server.log.rows()[: newest.version]))
        self._desk.void_all_jobs()
        self._shown = min(self._shown, self.server.version)
        if self.server.returns_in_a_row > MOST_RETURNS:
            raise poisoned_for_good(self.server.version)

    def finish(self, at_once: bool) -> Trace:
        """A last checkpoint, and what happened; the server is always here."""
        self.save()
        while not at_once and self.records.drain(_PATIENCE):
            at_once = self._stopping
        return self.server.trace(LAST_EVALUATIONS if at_once else math.inf)

    def close(self) -> None:
        """End all workers."""
        with self._resources:
            self._transport.close()


def _transport(problem: Problem, settings: Settings, server: Server, is_stopping: Callable[[], bool]) -> Transport:
    """Threads or processes, as the settings say."""
    if settings.engine == "threads":
        return Threads(problem, settings)
    require_main_guard()
    return Processes(problem, settings, server.compression, is_stopping)
