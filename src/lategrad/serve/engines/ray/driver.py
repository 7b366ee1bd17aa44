"""A Ray cluster as an engine, seen from the driver: it starts the actors and keeps the checkpoints.

Gradients do not pass through the driver. A few times a second it asks the server for its status. Every few seconds it
fetches a checkpoint, which it keeps in memory (its mirror) and writes to the disk when that is due; a server that Ray
has restarted continues from the mirror.

The driver waits for nothing without a time limit. Calls of actors time out; calls that may hang in Ray itself, or in a
process of Ray that is stopped or cut off, go through :func:`~lategrad.support.threads.limited`. Calls of actors with
short arguments are only queued.
"""

import contextlib
import dataclasses
import functools
import math
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.archive import Archive, MemoryArchive
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.engines.engine import LAST_EVALUATIONS, Ended, Report, TrainingError, check_returns
from lategrad.serve.engines.ray.actors import ServerActor, Status, WorkerActor
from lategrad.serve.engines.ray.connect import Calls, NoAnswerError, connected, why_ended
from lategrad.serve.jobs import Location
from lategrad.serve.observe.records import Look, Records, Telemetry
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.support.threads import OutOfTimeError, limited
from lategrad.trace import Trace

_STATUS_INTERVAL = 0.2  # seconds between two questions to the server
_CAPACITY_POLL = 1.0  # seconds between two looks at the cluster's CPUs
_CAPACITY_RETRY = 30.0  # seconds until the next one, where Ray did not answer
_RPC_TIMEOUT = 5.0  # seconds for what takes Ray milliseconds
_WAITING_WARNING = 30.0  # seconds after which to warn that workers wait for CPUs
_MIRROR_INTERVAL = 4.0  # seconds: a lost server costs the updates since
_MIRROR_SHARE = 0.05  # of the time, at most, is spent on it
_START_TIMEOUT = 300.0  # seconds for the first answer: a machine for the server may have to be found


@dataclass
class _WorkerHandle:
    """The driver's end of one worker actor."""

    actor: Any
    end: Any  # the reference to the end of its work
    started: float


class RayEngine:
    """The server and its workers on a Ray cluster; without an archive, checkpoints are in the driver's memory alone."""

    start_deadline = math.inf  # a worker may wait for a CPU as long as it takes

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, archive: Archive | None) -> None:
        self._problem, self._rule = problem, rule
        self._settings = dataclasses.replace(settings, on_record=None)  # which stays here
        self._archive = archive
        self.mirror = MemoryArchive(seconds=_MIRROR_INTERVAL)  # the newest checkpoint, in the driver's memory
        self._calls = Calls(problem.dim, lambda: self._stopping)
        self._stopping, self._owns_connection = False, True
        self._resources = contextlib.ExitStack()
        self._handles: dict[int, _WorkerHandle] = {}
        self._server: Any = None
        self._asked: Any = None
        self._ask_at = 0.0
        self._status: Status | None = None
        self._server_start: int | None = None
        self.version = 0
        self._telemetry: Telemetry | None = None
        self._delays: list[Tensor] = []
        needs = {"CPU": 1.0, "GPU": settings.gpus_per_worker}
        self._needs = {name: need for name, need in needs.items() if need}
        self._cluster: dict[str, float] = {}
        self._room, self._polled_capacity, self._warned_of_waiting = 0, -math.inf, False
        self._replaced: dict[str, int] = {}
        self.records = Records(problem, settings.record_every or settings.steps)
        self._look: Look | None = None

    @property
    def server(self) -> Location | None:
        """Where the server runs; None while it is away."""
        return None if self._status is None else self._status.location

    def watch(self, look: Look) -> None:
        self._look = look

    def request_stop(self) -> None:
        """Give the server a few seconds for an answer, and do not wait for it to come back."""
        self._stopping = True

    def begin(self, checkpoint: Checkpoint | None, check: Callable[[], None]) -> bool:
        """Connect, create the server's actor and start the server, unless the run is asked to stop meanwhile."""
        if checkpoint is not None:
            self.mirror.save(checkpoint)
        try:
            connection = connected(self._settings.address, self._settings.worker_range()[1], lambda: self._stopping)
            self._owns_connection = self._resources.enter_context(connection)
            self._shared_problem, self._server = self._calls.limited(self._create_server, _START_TIMEOUT)
        except OutOfTimeError:
            if not self._stopping:
                raise
        self._wait_for_server()
        if self.records.steps:  # none if the run is asked to stop before it begins
            check()
        return self._archive is None or not self.mirror.is_filled or self._write()

    def _create_server(self) -> tuple[Any, Any]:
        # It claims no CPU: if its machine is lost when all others are full, it must find a place at once.
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, enable_task_events=False,
                           scheduling_strategy=self.server_node())(ServerActor)  # fmt: skip
        return ray.put(self._problem), actor.remote(secrets.token_hex(8))

    def server_node(self) -> Any:
        """Where Ray starts the server: on the driver's machine, the likeliest to stay, and elsewhere if it must."""
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)

    def _wait_for_server(self) -> None:
        """Wait for its first status; it may be lost meanwhile, and is started again then."""
        end = time.monotonic() + _START_TIMEOUT
        while self._status is None and not self._stopping:
            if time.monotonic() > end:
                raise TrainingError(f"the server could not be started within {_START_TIMEOUT:g} s")
            self._process(self._request_status())
        if self._status is None:
            self._telemetry = self._stand_in.telemetry()

    def _request_status(self) -> Any:
        return self._server.status.remote(self.version, self._replaced, len(self.records.steps))

    def _begin_server(self) -> None:
        """Start the server, from the mirror's checkpoint if there is one; its first checkpoint is then the mirror's."""
        checkpoint = self.mirror.load() if self.mirror.is_filled else None
        arguments = (self._shared_problem, self._rule, self._settings, checkpoint, self._look is not None)
        answer = self._calls.limited(lambda: self._server.begin.remote(*arguments))
        first = self._calls.answer(answer, _START_TIMEOUT)
        self.version = first.version
        self.records.restore(first.description["records"], {})
        self.mirror.save(first)

    def _fetch(self) -> None:
        begin = time.monotonic()
        if (fetched := self._calls.answer(self._server.checkpoint.remote(self.mirror.logged))) is None:
            self._go_back()
        else:
            self.mirror.save(fetched)
        self.mirror.schedule.seconds = max(_MIRROR_INTERVAL, (time.monotonic() - begin) / _MIRROR_SHARE)

    def _write(self) -> bool:
        """Write the mirror to the disk; returns whether that succeeded."""
        assert self._archive is not None
        newest = self.mirror.load()
        return self._archive.save(dataclasses.replace(newest, rows=newest.rows[self._archive.logged :]))

    def _go_back(self) -> None:
        """Replace the server's state, which is not finite, by the mirror's."""
        newest = self.mirror.load()
        in_a_row = self._calls.answer(self._calls.limited(lambda: self._server.go_back.remote(newest)))
        self.version = newest.version
        self.records.restore(newest.description["records"], {})
        check_returns(in_a_row, newest.version)

    def _process(self, answer: Any) -> None:
        self._asked = None
        try:
            status: Status | None = self._calls.answer(answer)
            if status is None:  # it was restarted, and has no state yet
                self._begin_server()
                return
            if status.poisoned:
                self._go_back()
                return
            due = self._archive is not None and self._archive.schedule.is_due(status.report.version)
            if due or self.mirror.schedule.is_due(status.report.version):
                self._fetch()
            if due:
                self._write()
        except OutOfTimeError as error:
            self._miss_server(error)
            return
        if self._server_start not in (None, status.server_start):
            warnings.warn(f"the server continues from update {self.version}", stacklevel=2)
        self._server_start, self._status, self.version = status.server_start, status, status.report.version
        self._telemetry = status.telemetry
        self._delays.append(status.delays)
        for message in status.messages:
            warnings.warn(message, stacklevel=2)
        for recorded in status.recorded:
            self.records.add(recorded.step, recorded.values)
            if self._look is not None:
                self._look(recorded.telemetry, recorded.output)

    def _miss_server(self, error: OutOfTimeError) -> None:
        if self._status is not None:
            warnings.warn(f"the server is lost ({error}): Ray restarts it", stacklevel=3)
        self._status = None
        time.sleep(_STATUS_INTERVAL)

    def report(self, now: float, replaced: dict[str, int]) -> Report | None:
        self._replaced = replaced
        return None if self._status is None else self._status.report

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        assert self._telemetry is not None
        fresh = torch.cat([torch.zeros(0, dtype=torch.int32), *self._delays])
        self._delays.clear()
        return self._telemetry, fresh

    def save(self) -> None:
        """Write a checkpoint: a new one, if the server is there to give one."""
        if not self.mirror.is_filled:
            return  # the run was asked to stop before it began
        try:
            if self._status is None:
                raise NoAnswerError("it is away")
            self._request_status()  # which brings the server the last number of replaced workers
            self._fetch()
        except (OutOfTimeError, RayTaskError) as error:
            newest = f"the newest is that of update {self.mirror.load().version}"
            why = why_ended(error) if isinstance(error, RayTaskError) else error
            warnings.warn(f"no checkpoint: the server did not give one ({why}); {newest}", stacklevel=2)
            self._status = None
        if self._archive is not None:
            self._write()

    def finish(self, at_once: bool) -> Trace | None:
        """The trace; None if the server was lost at the very last moment, so that its return must be supervised."""
        trace: Trace | None = None
        begin = time.monotonic()

        def patience() -> float:
            return LAST_EVALUATIONS if at_once or self._stopping else math.inf

        while self._status is not None and self._status.evaluating and time.monotonic() - begin < patience():
            time.sleep(_STATUS_INTERVAL)
            self._process(self._request_status())
        with contextlib.suppress(OutOfTimeError):
            if self._status is not None:
                trace = self._calls.answer(self._server.trace.remote(patience()))
        if trace is None:
            self._status = None
            return self._stand_in.trace() if at_once or self._stopping else None
        self._process(self._request_status())  # with the last records
        return trace

    @functools.cached_property
    def _stand_in(self) -> Server:
        """A server in this process with the mirror's state, for the end of a run whose own does not answer."""
        server = Server(self._problem, self._rule, self._settings)
        if self.mirror.is_filled:
            server.restore(self.mirror.load())
        return server

    def start(self, member: int, worker: int) -> None:
        """Start a worker's actor; Ray looks for a machine that has a CPU for it, and a GPU where it needs one."""
        gpus = self._settings.gpus_per_worker

        def create() -> _WorkerHandle:
            remote = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(WorkerActor)
            actor = remote.remote(self._server, member, worker, self._shared_problem, self._settings)
            return _WorkerHandle(actor, actor.run.remote(), time.monotonic())

        self._handles[member] = self._calls.limited(create, undo=lambda late: ray.kill(late.actor))

    def location(self, member: int) -> Location | None:
        status = self._status
        activity = None if status is None else status.report.activities.get(member)
        return None if activity is None else activity.location

    def release(self, member: int) -> None:
        self._server.release.remote(member)

    def kill(self, member: int) -> bool:
        """Kill its process; where Ray does not answer, it is asked again when the worker turns out to be alive."""
        self.release(member)
        with contextlib.suppress(OutOfTimeError):
            self._calls.limited(lambda: ray.kill(self._handles[member].actor), _RPC_TIMEOUT)
        return True

    def wait(self, timeout: float) -> list[Ended]:
        now = time.monotonic()
        if self._asked is None and now >= self._ask_at:
            self._asked, self._ask_at = self._request_status(), now + _STATUS_INTERVAL
        by_end = {handle.end: member for member, handle in self._handles.items()}
        waiting = [*by_end, *([] if self._asked is None else [self._asked])]
        if not waiting:
            time.sleep(timeout)
            return []
        ended = []
        try:
            for ready in self._calls.ready(waiting, timeout):
                if ready in by_end:
                    ended.append(self._remove(by_end[ready]))
                else:
                    self._process(ready)
        except OutOfTimeError as error:
            self._miss_server(error)
        return ended

    def _remove(self, member: int) -> Ended:
        reason = None
        try:
            self._calls.read(self._handles[member].end)
        except RayError as error:
            reason = why_ended(error)
        del self._handles[member]
        self._server.remove.remote(member)
        return Ended(member, reason)

    def room(self) -> float:
        """The number of workers that the cluster has CPUs, and GPUs, for."""
        now = time.monotonic()
        if now - self._polled_capacity > _CAPACITY_POLL:
            self._polled_capacity = now
            try:
                before = self._capacity
                self._cluster = self._calls.limited(ray.cluster_resources, _RPC_TIMEOUT)
                self._room = max(before, self._capacity)  # of a lost machine, its workers are to be reported first
                self._warn_of_waiting(now)
            except OutOfTimeError:  # as many as before
                self._polled_capacity = now + _CAPACITY_RETRY
        return self._room

    @property
    def _capacity(self) -> int:
        return min(int(self._cluster.get(name, 0) / need) for name, need in self._needs.items())

    def _warn_of_waiting(self, now: float) -> None:
        joined = () if self._status is None else self._status.report.activities
        waiting = sum(member not in joined and now - handle.started > _WAITING_WARNING
                      for member, handle in self._handles.items())  # fmt: skip
        if not waiting or self._warned_of_waiting:
            return
        free = self._calls.limited(ray.available_resources, _RPC_TIMEOUT)
        for name in [name for name, need in self._needs.items() if free.get(name, 0) < need]:
            self._warned_of_waiting = True
            warnings.warn(f"{waiting} workers wait for a {name}: the cluster has {self._cluster.get(name, 0):g}, all "
                          "of them in use", stacklevel=2)  # fmt: skip

    def close(self) -> None:
        """End all actors, and the Ray that was started for them; with a connection of ours Ray ends them itself."""
        with self._resources:
            if self._owns_connection:
                return
            actors = [handle.actor for handle in self._handles.values()]
            actors += [] if self._server is None else [self._server]
            self._handles.clear()
            try:
                limited(lambda: [ray.kill(actor) for actor in actors], _RPC_TIMEOUT, "Ray has not ended all actors")
            except OutOfTimeError as error:
                warnings.warn(f"{error}: it will when this process has ended", stacklevel=2)
