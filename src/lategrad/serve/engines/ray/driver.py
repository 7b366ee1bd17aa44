"""A Ray cluster as an engine, seen from the driver: it starts the actors and keeps the checkpoints.

The driver is not in the way of any gradient: workers and server talk to each other. A few times a second it asks the
server how it is doing. Every few seconds it fetches a checkpoint, which it keeps in memory (its mirror) and writes to
the disk when that is due, and from which a server goes on that Ray has restarted.

It waits for nothing for ever. What an actor is asked has a time limit; what may be stuck in Ray itself, or in a process
of Ray that is stopped or cut off (connecting, storing, creating and killing actors, looking at the cluster, reading an
answer), is called through :func:`~lategrad.support.timeouts.limited`. Calls of actors with short arguments are queued,
no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.archive import Archive, MemoryArchive
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.desk import Location
from lategrad.serve.engines.engine import (
    LAST_EVALUATIONS,
    MOST_RETURNS,
    Ended,
    Report,
    TrainingError,
    poisoned_for_good,
)
from lategrad.serve.engines.ray.actors import ServerActor, Status, WorkerActor
from lategrad.serve.engines.ray.connect import connected
from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.observe.watch import Look
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.support.timeouts import OutOfTimeError, limited
from lategrad.trace import Trace

_ASK_EVERY = 0.2  # seconds between two questions to the server
_LOOK_AROUND = 1.0  # seconds between two looks at the cluster's CPUs
_LOOK_AGAIN = 30.0  # seconds until the next one, where Ray did not answer
_A_WORD = 5.0  # seconds for what takes Ray milliseconds
_NO_CPU_AFTER = 30.0  # seconds after which it is said that workers wait for CPUs
_MIRROR_EVERY = 4.0  # seconds: a lost server costs the updates since
_MIRROR_SHARE = 0.05  # of the time, at most, is spent on it
_PATIENCE = 10.0  # seconds that the server has for an answer, and more where vectors are long
_ENTRIES_PER_SECOND = 1e6  # of a vector, on a bad day
_FIRST_ANSWER = 300.0  # seconds for the first: a machine for it may have to be found
_LAST_ANSWER = 5.0  # seconds for the last, when the run is to end, and more where vectors are long
_LAST_ENTRIES_PER_SECOND = 1e7
_GLANCE = 0.2  # seconds after which whoever waits for an answer sees whether the run is to end

Returned = TypeVar("Returned")


@dataclass
class _WorkerHandle:
    """The driver's end of one worker actor."""

    worker: int
    actor: Any
    end: Any
    """The reference to the end of its work."""
    started: float


class RayEngine:
    """The server and its workers on a Ray cluster.

    ``archive`` is on the driver's machine; without it, the newest checkpoint is in the driver's memory alone.
    """

    start_deadline = math.inf  # a worker may wait for a CPU as long as it takes

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, archive: Archive | None) -> None:
        self._problem, self._rule = problem, rule
        self._settings = dataclasses.replace(settings, on_record=None)  # which stays here
        self._archive, self._mirror = archive, MemoryArchive(seconds=_MIRROR_EVERY)
        self._patience = _PATIENCE + problem.dim / _ENTRIES_PER_SECOND
        self._last_patience = _LAST_ANSWER + problem.dim / _LAST_ENTRIES_PER_SECOND
        self._stopping, self._owns_connection = False, True
        self._resources = contextlib.ExitStack()
        self._handles: dict[int, _WorkerHandle] = {}
        self._server: Any = None
        self._asked: Any = None
        self._ask_at = 0.0
        self._status: Status | None = None
        self._server_start: int | None = None
        self._version = 0
        self._telemetry: Telemetry | None = None
        self._delays: list[Tensor] = []
        self._cpus, self._looked_around, self._told_no_cpu = 0, -math.inf, False
        self._replaced: dict[str, int] = {}
        self.records = Records(problem, settings.record_every or settings.steps)
        self._look: Look | None = None

    @property
    def version(self) -> int:
        """Updates made so far, when the server was last asked."""
        return self._version

    @property
    def server(self) -> Location | None:
        """Where the server runs; None while it is away."""
        return None if self._status is None else self._status.location

    def watch(self, look: Look) -> None:
        """Call this for every record that the server tells of."""
        self._look = look

    def request_stop(self) -> None:
        """The run is to end: the server has a few seconds more for an answer, and is not waited for to come back."""
        self._stopping = True

    # ---- The server

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Connect, start the server's actor, and let it begin; if the run is to end by then, leave it at that."""
        _, most = self._settings.worker_range()
        if checkpoint is not None:
            self._mirror.save(checkpoint)
        try:
            connection = connected(self._settings.address, most, lambda: self._stopping)
            self._owns_connection = self._resources.enter_context(connection)
            self._shared_problem, self._server = self._limited(self._create_server, _FIRST_ANSWER)
        except OutOfTimeError:
            if not self._stopping:
                raise
        self._wait_for_server()
        if self._archive is not None and self._mirror.is_filled and not self._write():
            raise self._archive.unusable()

    def _limited(
        self, call: Callable[[], Returned], seconds: float, undo: Callable[[Returned], object] | None = None
    ) -> Returned:
        """What a call into Ray returns, if it does so in time, of which there is little when the run is to end."""

        def limit() -> float:
            return min(seconds, self._last_patience) if self._stopping else seconds

        return limited(call, limit, "Ray did not answer", undo=undo)

    def _create_server(self) -> tuple[Any, Any]:
        """The problem where all can read it, and the server's actor."""
        # It claims no CPU: if its machine is lost when all others are full, it must find a place at once.
        actor = ray.remote(
            num_cpus=0, max_restarts=-1, max_task_retries=0, enable_task_events=False,
            scheduling_strategy=self._server_node(),
        )(ServerActor)  # fmt: skip
        return ray.put(self._problem), actor.remote(secrets.token_hex(8))

    def _server_node(self) -> Any:
        """The server starts on the driver's machine, the likeliest to stay, and elsewhere if it must."""
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)

    def _wait_for_server(self) -> None:
        """Until it has begun, and told how it is doing; it may be lost meanwhile, and is begun again then."""
        end = time.monotonic() + _FIRST_ANSWER
        while self._status is None and not self._stopping:
            if time.monotonic() > end:
                raise TrainingError(f"the server could not be started within {_FIRST_ANSWER:g} s")
            self._take_note(self._status_soon())
        if self._status is None:
            self._telemetry = self._stand_in.telemetry()

    def _status_soon(self) -> Any:
        """A reference to the server's next status."""
        return self._server.status.remote(self._version, self._replaced, len(self.records.steps))

    def _begin_server(self) -> None:
        """Let the server begin, from the mirror's checkpoint if there is one; its first is then the mirror's."""
        checkpoint = self._mirror.load() if self._mirror.is_filled else None
        watched = self._look is not None
        what = (self._shared_problem, self._rule, self._settings, checkpoint, watched)
        begun = self._limited(lambda: self._server.begin.remote(*what), self._patience)
        first = self._answer(begun, max(_FIRST_ANSWER, self._patience))
        self._version = first.version
        self.records.restore(first.description["records"], {})
        self._mirror.save(first)

    def _answer(self, reference: Any, patience: float) -> Any:
        """What the server says, waited for so long, or until the run is to end; what it raised is raised here."""
        begin = time.monotonic()
        while not self._ready([reference], _GLANCE):
            if time.monotonic() - begin > (self._last_patience if self._stopping else patience):
                raise _NoAnswerError("it does not answer")
        try:
            return self._read(reference)
        except RayTaskError:
            raise
        except RayError as error:
            raise _NoAnswerError(_brief(error)) from None

    def _ready(self, references: list[Any], timeout: float) -> list[Any]:
        """The first of some answers that are there, waited for so many seconds; they may still be elsewhere."""
        wait = functools.partial(ray.wait, references, num_returns=1, timeout=timeout, fetch_local=False)
        ready: list[Any] = self._limited(wait, self._patience)[0]
        return ready

    def _read(self, reference: Any) -> Any:
        """An answer that is there."""
        return self._limited(lambda: ray.get(reference, timeout=self._patience), self._patience)

    def _fetch(self) -> None:
        """Bring the mirror up to date."""
        begin = time.monotonic()
        fetched = self._answer(self._server.checkpoint.remote(self._mirror.logged), self._patience)
        if fetched is None:
            self._go_back()
        else:
            self._mirror.save(fetched)
        self._mirror.schedule.seconds = max(_MIRROR_EVERY, (time.monotonic() - begin) / _MIRROR_SHARE)

    def _write(self) -> bool:
        """Take the mirror to the disk; whether that is where it is."""
        assert self._archive is not None
        newest = self._mirror.load()
        return self._archive.save(dataclasses.replace(newest, rows=newest.rows[self._archive.logged :]))

    def _go_back(self) -> None:
        """The server's state is not finite: it goes on from the mirror's, which is."""
        newest = self._mirror.load()
        gone_back = self._limited(lambda: self._server.go_back.remote(newest), self._patience)
        in_a_row = self._answer(gone_back, self._patience)
        self._version = newest.version
        self.records.restore(newest.description["records"], {})
        if in_a_row > MOST_RETURNS:
            raise poisoned_for_good(newest.version)

    def _ask(self, now: float) -> None:
        if self._asked is None and now >= self._ask_at:
            self._asked, self._ask_at = self._status_soon(), now + _ASK_EVERY

    def _take_note(self, answer: Any) -> None:
        """Of the server's status, or of its absence."""
        self._asked = None
        try:
            status: Status | None = self._answer(answer, self._patience)
            if status is None:  # it was restarted, and does not know where to go on
                self._begin_server()
                return
            if status.poisoned:
                self._go_back()
                return
            due = self._archive is not None and self._archive.schedule.is_due(status.report.version)
            if due or self._mirror.schedule.is_due(status.report.version):
                self._fetch()
            if due:
                self._write()
        except OutOfTimeError as error:
            self._miss_server(error)
            return
        if self._server_start not in (None, status.server_start):
            warnings.warn(f"the server goes on from update {self._version}", stacklevel=2)
        self._server_start, self._status, self._version = status.server_start, status, status.report.version
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
        time.sleep(_ASK_EVERY)

    def report(self, now: float, replaced: dict[str, int]) -> Report | None:
        """How things were when the server was last asked."""
        self._replaced = replaced
        return None if self._status is None else self._status.report

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        """What monitors show."""
        assert self._telemetry is not None
        fresh = torch.cat([torch.zeros(0, dtype=torch.int32), *self._delays])
        self._delays.clear()
        return self._telemetry, fresh

    def save(self) -> None:
        """Write a checkpoint: a new one, if the server is there to give one."""
        if not self._mirror.is_filled:
            return  # the run was to end before it began
        try:
            if self._status is None:
                raise _NoAnswerError("it is away")
            self._status_soon()  # with which the number of replaced workers is the last
            self._fetch()
        except (OutOfTimeError, RayTaskError) as error:
            newest = f"the newest is that of update {self._mirror.load().version}"
            why = _brief(error) if isinstance(error, RayTaskError) else error
            warnings.warn(f"no checkpoint: the server did not give one ({why}); {newest}", stacklevel=2)
            self._status = None
        if self._archive is not None:
            self._write()

    def finish(self, at_once: bool) -> Trace | None:
        """What happened; None if the server was lost at the very last moment, so that its return must be supervised."""
        trace: Trace | None = None
        begin = time.monotonic()

        def patience() -> float:
            return LAST_EVALUATIONS if at_once or self._stopping else math.inf

        while self._status is not None and self._status.evaluating and time.monotonic() - begin < patience():
            time.sleep(_ASK_EVERY)
            self._take_note(self._status_soon())
        with contextlib.suppress(OutOfTimeError):
            if self._status is not None:
                trace = self._answer(self._server.trace.remote(patience()), self._patience)
        if trace is None:
            self._status = None
            return self._stand_in.trace() if at_once or self._stopping else None
        self._take_note(self._status_soon())  # with the last records
        return trace

    @functools.cached_property
    def _stand_in(self) -> Server:
        """A server here, for the end of a run whose own does not answer: where the mirror was."""
        server = Server(self._problem, self._rule, self._settings)
        if self._mirror.is_filled:
            server.restore(self._mirror.load())
        return server

    # ---- The workers

    def start(self, member: int, worker: int) -> None:
        """Start a worker's actor; Ray looks for a machine that has a CPU for it, and a GPU where it needs one."""
        gpus = 1 if self._settings.device.startswith("cuda") else 0

        def create() -> _WorkerHandle:
            remote = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(WorkerActor)
            actor = remote.remote(self._server, member, worker, self._shared_problem, self._settings)
            return _WorkerHandle(worker, actor, actor.run.remote(), time.monotonic())

        self._handles[member] = self._limited(create, self._patience, undo=lambda late: ray.kill(late.actor))

    def location(self, member: int) -> Location | None:
        """As the server said when it was last asked."""
        status = self._status
        activity = None if status is None else status.report.activities.get(member)
        return None if activity is None else activity.location

    def let_go(self, member: int) -> None:
        """Tell the server, which gives it no more work."""
        self._server.let_go.remote(member)

    def kill(self, member: int) -> bool:
        """End its process; where Ray does not answer, it is asked again when the worker is seen to go on."""
        self._server.let_go.remote(member)
        with contextlib.suppress(OutOfTimeError):
            self._limited(lambda: ray.kill(self._handles[member].actor), _A_WORD)
        return True

    def wait(self, timeout: float) -> list[Ended]:
        """Ask the server, and see who has ended."""
        self._ask(time.monotonic())
        by_end = {handle.end: member for member, handle in self._handles.items()}
        waiting = [*by_end, *([] if self._asked is None else [self._asked])]
        if not waiting:
            time.sleep(timeout)
            return []
        ended = []
        try:
            for ready in self._ready(waiting, timeout):
                if ready in by_end:
                    ended.append(self._bury(by_end[ready]))
                else:
                    self._take_note(ready)
        except OutOfTimeError as error:
            self._miss_server(error)
        return ended

    def _bury(self, member: int) -> Ended:
        handle = self._handles[member]
        try:
            self._read(handle.end)
            reason = None
        except RayError as error:
            reason = _brief(error)
        del self._handles[member]
        self._server.bury.remote(member, handle.worker)
        return Ended(member, reason)

    def room(self) -> float:
        """The cluster's CPUs."""
        now = time.monotonic()
        if now - self._looked_around > _LOOK_AROUND:
            self._looked_around = now
            try:
                self._cpus = int(self._limited(ray.cluster_resources, _A_WORD).get("CPU", 0))
                self._tell_who_waits(now)
            except OutOfTimeError:  # as many as before
                self._looked_around = now + _LOOK_AGAIN
        return self._cpus

    def _tell_who_waits(self, now: float) -> None:
        joined = () if self._status is None else self._status.report.activities
        waiting = sum(member not in joined and now - handle.started > _NO_CPU_AFTER
                      for member, handle in self._handles.items())  # fmt: skip
        if not waiting or self._told_no_cpu:
            return
        if self._limited(ray.available_resources, _A_WORD).get("CPU", 0) < 1:
            self._told_no_cpu = True
            warnings.warn(f"{waiting} workers wait for a CPU: the cluster has {self._cpus}, all of them taken",
                          stacklevel=2)  # fmt: skip

    def close(self) -> None:
        """End all actors, and the Ray that was started for them; with a connection of ours Ray ends them itself."""
        with self._resources:
            if not self._owns_connection:
                self._end_actors()

    def _end_actors(self) -> None:
        actors = [handle.actor for handle in self._handles.values()]
        actors += [] if self._server is None else [self._server]
        self._handles.clear()
        try:
            limited(lambda: [ray.kill(actor) for actor in actors], _A_WORD, "Ray has not ended all actors")
        except OutOfTimeError as error:
            warnings.warn(f"{error}: it will when this process has ended", stacklevel=3)


class _NoAnswerError(OutOfTimeError):
    """The server, or what it said, did not arrive: it may be back soon."""


def _brief(error: RayError) -> str:
    """Why an actor or its work ended, in one line."""
    if isinstance(error, GetTimeoutError):
        return "it does not answer"
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    if "creation task" in text or "Error" in text.splitlines()[-1]:
        return text.strip().splitlines()[-1].strip()
    return "its machine is gone" if "its node has died" in text else "its process ended"
