"""Training on a Ray cluster, seen from the driver: it starts the actors, keeps the checkpoints, and looks after both.

The driver is not in the way of any gradient: workers and server talk to each other. A few times a second it asks the
server how it is doing; it fetches new checkpoints, replaces workers that died or hang, starts and lets go workers as
the cluster grows and shrinks, and gives a server that Ray has restarted the newest checkpoint to go on from.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.control import requested_workers, stop_on_signals
from lategrad.serve.engines.ray import Place, ServerActor, Status, WorkerActor
from lategrad.serve.engines.ray_sharded import ShardedServerActor, ShardedWorkerActor
from lategrad.serve.mirror import Files, read_checkpoint, write_checkpoint
from lategrad.serve.monitor import Monitors
from lategrad.serve.settings import Settings
from lategrad.serve.sharding import require_splittable
from lategrad.serve.training import TrainingError
from lategrad.support.validation import require
from lategrad.trace import Trace

_TICK = 0.2  # seconds between two looks at the server
_LOOK_AROUND = 1.0  # seconds between two looks at the cluster's CPUs and the control file
_FRUITLESS = 5  # deaths of workers in a row without an update in between, for each worker, before the run gives up
_LONGEST_BACKOFF = 5.0
_NO_CPU_AFTER = 30.0  # seconds after which it is said that workers wait for CPUs


@contextlib.contextmanager
def connected(address: str | None, cpus: int) -> Iterator[None]:
    """A connection to Ray: the one that is there, or one to a running cluster, or a Ray of this run's own.

    Args:
        address: of a cluster; None for this process's connection, and for a Ray of our own if it has none.
        cpus: what a Ray of our own is to pretend to have, so that there is room for all workers.
    """
    if ray.is_initialized():
        yield
        return
    if address is None:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
    else:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class _Hand:
    """The driver's end of one worker actor."""

    member: int
    worker: int
    actor: Any
    started: float
    place: Place | None = None
    """Known once it has joined."""
    leaving: bool = False


class ClusterTraining:
    """A run on Ray with a handle: ``run()`` blocks; ``set_workers`` and ``stop`` may be called from another thread.

    The arguments are those of :class:`~lategrad.serve.training.Training`. ``folder`` is one of the driver's
    machine; without it, the driver keeps the newest checkpoint in a temporary one.
    """

    def __init__(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        settings: Settings,
        folder: Path | None = None,
        progress: bool | None = None,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.progress = sys.stderr.isatty() if progress is None else progress
        self.stopping: str | None = None
        self._problem, self._rule = problem, rule
        self._range = settings.worker_range()
        if settings.shards > 1:
            require_splittable(rule, problem.dim, settings.shards)
        self._files: Files | None = None
        self._hands: dict[Any, _Hand] = {}  # by the reference to the end of its work
        self._members = 0
        self._replaced: Counter[str] = Counter()
        self._fruitless = 0
        self._not_before: dict[int, float] = {}
        self._life: int | None = None
        self._status: Status | None = None
        self._seen = 0
        self._looked_around = 0.0
        self._target = self._range[0]
        self._told_no_cpu = False

    @property
    def workers(self) -> dict[int, Place]:
        """The workers that serve now, by their numbers, with the processes and nodes that they run in."""
        serving = sorted((hand for hand in list(self._hands.values()) if not hand.leaving), key=lambda h: h.worker)
        return {hand.worker: hand.place for hand in serving if hand.place is not None}

    @property
    def server(self) -> Place | None:
        """Where the server runs; None while it is away."""
        return None if self._status is None else self._status.place

    def set_workers(self, count: int) -> None:
        """Go on with so many workers."""
        require("workers", count, isinstance(count, int) and count >= 1, "an integer >= 1")
        self._range = (count, count)

    def stop(self, reason: str = "stopped") -> None:
        """End the run soon, after a last checkpoint."""
        self.stopping = reason

    def restore(self) -> None:
        """Go on from the newest whole checkpoint in the folder."""
        assert self.folder is not None
        self._files = read_checkpoint(self.folder)

    def run(self) -> Trace:
        """Train until all updates are made, or until stopped."""
        settings = self.settings
        with (
            tempfile.TemporaryDirectory(prefix="lategrad-") as temporary,
            Monitors(self.progress, settings.steps, settings.log, self.folder) as monitors,
            connected(settings.address, cpus=self._range[1]),
            stop_on_signals(self),
        ):
            self._store = self.folder or Path(temporary)
            self._shared_problem = ray.put(self._problem)
            self._server = self._start_server()
            try:
                self._begin()
                trace = self._train(monitors)
            finally:
                self._close()
        if self.folder is not None:
            trace.save(self.folder / "trace.safetensors")
        if self.stopping is not None:
            warnings.warn(f"{self.stopping}: the trace ends after {len(trace.delays)} updates", stacklevel=2)
        return trace

    def _start_server(self) -> Any:
        """With no claim to a CPU: if its machine is lost when all others are full, it must find a place at once."""
        actor = ray.remote(
            num_cpus=0, max_restarts=-1, max_task_retries=0, enable_task_events=False, scheduling_strategy=self._home()
        )(ServerActor if self.settings.shards == 1 else ShardedServerActor)
        return actor.remote(secrets.token_hex(8))

    def _home(self) -> Any:
        """The server starts on the driver's machine, the likeliest to stay, and elsewhere if it must."""
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)

    def _train(self, monitors: Monitors) -> Trace:
        while True:
            self._supervise(monitors)
            try:
                trace: Trace
                trace, files = ray.get(self._server.finish.remote(dict(self._replaced)))
            except RayActorError:  # at the very last moment: supervise its return
                continue
            self._keep(files)
            return trace

    # ---- The server

    def _begin(self) -> None:
        """Let the server begin, or go on from the newest checkpoint."""
        begin = self._server.begin.remote(self._shared_problem, self._rule, self.settings, self._files)
        self._seen = ray.get(begin)
        self._keep(ray.get(self._server.files.remote()))

    def _keep(self, files: Files | None) -> None:
        """Store a checkpoint; if the disk would not take it, the run goes on."""
        if files is None:
            return
        try:
            write_checkpoint(self._store, files, self.settings.keep)
        except OSError as error:
            warnings.warn(f"a checkpoint could not be stored, training goes on: {error}", stacklevel=2)
        else:
            self._files = files

    def _supervise(self, monitors: Monitors) -> None:
        asked, ask_at = None, 0.0
        while self.stopping is None:
            now = time.monotonic()
            if asked is None and now >= ask_at:
                asked, ask_at = self._server.status.remote(self._seen), now + _TICK
            self._look_after_workers(now)
            waiting = [*self._hands, *([] if asked is None else [asked])]
            for ready in ray.wait(waiting, num_returns=1, timeout=_TICK)[0]:
                if ready in self._hands:
                    self._bury(self._hands.pop(ready), ready)
                else:
                    asked = None
                    self._take_note(ready, monitors)
            if self._status is not None and self._status.done:
                return

    def _take_note(self, answer: Any, monitors: Monitors) -> None:
        """Of the server's status, or of its absence."""
        try:
            status: Status | None = ray.get(answer)
            if status is None:
                self._begin()
                return
            if self._status is None or status.checkpointed > self._status.checkpointed:
                self._keep(ray.get(self._server.files.remote()))
        except RayActorError as error:
            if self._status is not None:
                warnings.warn(f"the server is lost ({_brief(error)}): Ray restarts it", stacklevel=2)
            self._status = None
            time.sleep(_TICK)
            return
        if self._life not in (None, status.life):
            warnings.warn(f"the server goes on from update {self._seen}", stacklevel=2)
        if status.telemetry.version > self._seen:
            self._fruitless = 0
        self._life, self._status, self._seen = status.life, status, status.telemetry.version
        for message in status.messages:
            warnings.warn(message, stacklevel=2)
        for hand in self._hands.values():
            if hand.member in status.at_work:
                hand.place, _ = status.at_work[hand.member]
        monitors.show(status.telemetry, len(self.workers), status.delays)

    # ---- The workers

    def _look_after_workers(self, now: float) -> None:
        if self._status is None and self._life is not None:
            return  # while the server is away, nothing is known of them
        if now - self._looked_around > _LOOK_AROUND:
            self._looked_around = now
            self._look_around(now)
        at_work = {} if self._status is None else self._status.at_work
        allowed = self.settings.deadline
        for hand in self._hands.values():
            if hand.member in at_work and at_work[hand.member][1] > allowed and not hand.leaving:
                warnings.warn(f"worker {hand.worker} has not answered for {allowed:g} s and is replaced", stacklevel=2)
                self._let_go(hand, by_force=True)
                self._replaced[f"worker {hand.worker}"] += 1
        serving = {hand.worker for hand in self._hands.values() if not hand.leaving}
        dropped = () if self._status is None else self._status.dropped
        usable = [worker for worker in range(self._target) if worker not in dropped]
        if not usable:
            assert self._status is not None
            raise TrainingError(f"all workers were dropped; the last refusal: {self._status.last_refusal}")
        for worker in usable:
            if worker not in serving and now >= self._not_before.get(worker, 0.0):
                self._start_worker(worker, now)
        for hand in self._hands.values():
            if hand.worker >= self._target and not hand.leaving:
                self._let_go(hand, by_force=hand.place is None)

    def _look_around(self, now: float) -> None:
        """How many workers there should be, now."""
        if wanted := requested_workers(self.folder):
            self.set_workers(wanted)
        low, high = self._range
        cpus = int(ray.cluster_resources().get("CPU", 0))
        self._target = min(high, max(low, cpus))
        waiting = [hand for hand in self._hands.values() if hand.place is None and now - hand.started > _NO_CPU_AFTER]
        if waiting and not self._told_no_cpu and ray.available_resources().get("CPU", 0) < 1:
            self._told_no_cpu = True
            warnings.warn(
                f"{len(waiting)} workers wait for a CPU: the cluster has {cpus}, all of them taken", stacklevel=2
            )

    def _start_worker(self, worker: int, now: float) -> None:
        gpus = 1 if self.settings.device.startswith("cuda") else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(**options)(WorkerActor if self.settings.shards == 1 else ShardedWorkerActor)
        member, self._members = self._members, self._members + 1
        actor = remote.remote(self._server, member, worker, self._shared_problem, self.settings)
        self._hands[actor.run.remote()] = _Hand(member, worker, actor, now)

    def _let_go(self, hand: _Hand, by_force: bool) -> None:
        hand.leaving = True
        self._server.let_go.remote(hand.member)
        if by_force:
            ray.kill(hand.actor)

    def _bury(self, hand: _Hand, end: Any) -> None:
        """A worker has come to its end; unless it was let go or is out of work, it will be replaced."""
        self._not_before[hand.worker] = time.monotonic() + 2 * _TICK  # by then the server has told if it was dropped
        try:
            ray.get(end)
            return
        except (RayActorError, RayTaskError) as error:
            reason = _brief(error)
        self._server.bury.remote(hand.member)
        if hand.leaving:
            return
        self._replaced[f"worker {hand.worker}"] += 1
        warnings.warn(f"worker {hand.worker} died ({reason}) and is replaced", stacklevel=2)
        self._fruitless += 1
        backoff = min(_LONGEST_BACKOFF, 0.1 * 2**self._fruitless)
        self._not_before[hand.worker] = time.monotonic() + backoff
        if self._fruitless >= _FRUITLESS * self._target:
            raise TrainingError(f"{self._fruitless} workers in a row died without a gradient, the last with {reason}")

    def _close(self) -> None:
        """End all actors."""
        for hand in self._hands.values():
            ray.kill(hand.actor)
        self._hands.clear()
        with contextlib.suppress(RayError):
            ray.get(self._server.close.remote(), timeout=10)
        ray.kill(self._server)


def _brief(error: RayError) -> str:
    """Why an actor or its work ended, in one line."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    if "creation task" in text or "Error" in text.splitlines()[-1]:
        return text.strip().splitlines()[-1].strip()
    return "its machine is gone" if "node" in text and "died" in text else "its process ended"
