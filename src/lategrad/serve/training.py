"""Real asynchronous training on one machine: a server, its workers, and someone who looks after both."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from lategrad.problems.problem import Problem
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoint import checkpoint_paths, locked, newest
from lategrad.serve.control import requested_workers, stop_on_signals
from lategrad.serve.engines.engine import Arrived, Engine, Event, Failed, Member, Ready
from lategrad.serve.engines.processes import Processes
from lategrad.serve.engines.threads import Threads
from lategrad.serve.monitor import Monitors
from lategrad.serve.server import Job, Server
from lategrad.serve.settings import Settings, Slow
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require
from lategrad.trace import Trace

if TYPE_CHECKING:
    from lategrad.serve.cluster import ClusterTraining

_TICK = 0.2  # seconds between two looks at deadlines and the control file
_SHOW = 1.0  # seconds between two points of the display and of TensorBoard
_START_DEADLINE = 120.0  # seconds a worker may take to start
_FRUITLESS = 5  # deaths in a row before any gradient arrived, after which the run gives up
_LONGEST_BACKOFF = 5.0


def train(
    problem: Problem,
    rule: AnyRule[Any] | str,
    *,
    steps: int,
    workers: int | str = 4,
    engine: str = "processes",
    address: str | None = None,
    shards: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    slow: Slow = None,
    threads: int = 1,
    ahead: int = 0,
    deadline: float = 300.0,
    max_refusals: int | None = 10,
    max_delay: int | None = None,
    record_every: int | None = None,
    compile: bool | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    log: str | None = None,
    progress: bool | None = None,
    notes: dict[str, Any] | None = None,
) -> Trace:
    """Train with asynchronous workers: each computes gradients at the query it last got, late as they may be.

    Args:
        problem: the objective; any :class:`~lategrad.problems.Problem`, such as
            :class:`~lategrad.problems.ModuleProblem` for an ``nn.Module``.
        rule: the server rule, or a text such as ``"steady:lr=1"``.
        steps: updates to make in all.
        workers: how many; can be changed while it runs (:class:`Training`, or the file ``out/workers``).
            On Ray also ``"2:8"``: between 2 and 8, as many as the cluster has CPUs for.
        engine: "processes", "threads" for notebooks and problems that cannot be pickled, or "ray" for workers
            on other machines (``pip install 'lategrad[ray]'``).
        address: of a running Ray cluster, such as ``"auto"`` or ``"ray://host:10001"``; None starts a Ray on
            this machine, for this run.
        shards: on Ray, split the parameter vector over so many server actors.
        seed: of the workers' streams of samples; each worker has its own.
        device: where gradients are computed; the server's state is in main memory.
        slow: make workers late on purpose: a specification such as ``"lognormal:3,1"`` of the milliseconds
            by which each gradient is held back, or one for each of some workers, ``{0: "constant:100"}``.
        threads: of torch in the server; each worker process has one.
        ahead: jobs that a worker holds beside the one it is at, so that it need not wait for the server: faster
            where gradients take less than a few milliseconds, at the price of longer delays (each worker counts
            1 + ahead times). Not on Ray.
        deadline: seconds after which a worker that still has not returned its gradient is taken for hung and
            replaced. Slow is not hung: late work is used.
        max_refusals: gradients in a row that must be refused (not finite, wrong shape, ...) for a worker to
            be dropped; None for never.
        max_delay: gradients that are later than so many updates are dropped; their workers go on from the present
            query. A warning names workers whose share of the updates nearly vanishes, ``trace.config["too_late"]``
            says how many were dropped of each. None applies all, which the rules are made for; rules that weigh late
            gradients less are :class:`~lategrad.Steady` and ``lategrad.rivals``.
        record_every: updates between two records of loss and accuracy; by default ten records.
        compile: the rule's update through ``torch.compile``; by default for long runs.
        out: folder for checkpoints, the log of updates and the trace; None keeps everything in memory.
        checkpoint_every: updates between two checkpoints; by default one a minute. One is always made at the
            start and at the end, and on Ctrl-C or SIGTERM.
        keep: checkpoints to keep.
        log: "tensorboard" writes scalars and histograms of delays to ``out/tensorboard``.
        progress: show a progress bar; by default on a terminal.
        notes: what else the trace and the checkpoints should say about the run; JSON values.

    Ctrl-C or SIGTERM ends the run early, after a last checkpoint, and returns what there is
    (``trace.complete`` is then False); :func:`resume` goes on from there.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> trace = train(Quadratic(noise=0.1), lg.Anytime(lg.OGD(lr=1.0)), steps=300, workers=3, engine="threads")
    >>> trace.complete, bool(trace.loss[-1] < trace.loss[0] / 10)
    (True, True)
    """
    settings = Settings(steps, workers, engine, seed, str(device), slow, threads, deadline, max_refusals, record_every,
                        compile, checkpoint_every, keep, log, notes or {}, address, shards, ahead,
                        max_delay)  # fmt: skip
    folder = None if out is None else Path(out)
    with locked(folder):
        if folder is not None and checkpoint_paths(folder):
            raise ValueError(f"{str(folder)!r} holds a run already: resume it, or choose another folder")
        return _make_training(problem, rule, settings, folder, progress).run()


def resume(
    out: str | Path, problem: Problem, rule: AnyRule[Any] | str, *, progress: bool | None = None, **changes: Any
) -> Trace:
    """Go on with a run from its newest whole checkpoint: state, version, sample streams and trace.

    Args:
        out: the run's folder.
        problem: the same problem; another one is refused.
        rule: the same rule; another one is refused.
        progress: show a progress bar; by default on a terminal.
        changes: arguments of :func:`train` that shall be others from now on, such as ``steps`` or ``workers``;
            the seed stays, as the samples follow from it.
    """
    folder = Path(out)
    changeable = sorted({field.name for field in fields(Settings)} - {"seed"})
    unknown = sorted(set(changes) - set(changeable))
    require("changes", unknown, not unknown, f"among {', '.join(changeable)}")
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint in {str(folder)!r}: there is no such folder")
    with locked(folder):
        saved = saved_config(folder)
        settings = Settings(**{**saved["settings"], "compile": saved["compiled"], **changes})
        training = _make_training(problem, rule, settings, folder, progress)
        training.restore()
        return training.run()


def _make_training(
    problem: Problem, rule: AnyRule[Any] | str, settings: Settings, folder: Path | None, progress: bool | None
) -> Training | ClusterTraining:
    rule = as_rule(rule)
    if settings.engine != "ray":
        return Training(problem, rule, settings, folder, progress)
    try:
        from lategrad.serve.cluster import ClusterTraining
    except ImportError as error:
        raise ImportError(f"engine='ray' needs Ray ({error}): pip install 'lategrad[ray]'") from None
    return ClusterTraining(problem, rule, settings, folder, progress)


class TrainingError(RuntimeError):
    """A run that cannot go on; its last checkpoint has been made."""


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration that the newest whole checkpoint of a run was made with."""
    return newest(folder, lambda checkpoint: checkpoint.description["config"])


@dataclass
class _Duty:
    """What the supervisor knows of a member."""

    since: float
    """When it was started, or last heard of."""
    jobs: set[int] = field(default_factory=set)
    """The numbers of its present jobs."""
    started: bool = False
    delivered: bool = False
    dismissed: bool = False


class Training:
    """A run with a handle: ``run()`` blocks; ``set_workers`` and ``stop`` may be called from another thread.

    Args:
        problem: see :func:`train`.
        rule: see :func:`train`.
        settings: see :func:`train`.
        folder: where checkpoints go; None for none.
        progress: show a progress bar; by default on a terminal.
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
        self.server = Server(
            problem, rule, steps=settings.steps, record_every=settings.record_every, compile=settings.compile,
            folder=folder, checkpoint_every=settings.checkpoint_every, keep=settings.keep,
            max_refusals=settings.max_refusals, max_delay=settings.max_delay, config={"settings": asdict(settings)},
        )  # fmt: skip
        self._problem = problem
        self._wanted, _ = settings.worker_range()
        self._numbers = self._wanted  # the workers that there ever were
        self.stopping: str | None = None
        self._duties: dict[Member, _Duty] = {}
        self._fruitless = 0
        self._not_before: dict[int, float] = {}
        self._replaced: Counter[str] = Counter()
        self.server.config["replaced"] = self._replaced
        self._shown = 0

    @property
    def workers(self) -> dict[int, int | None]:
        """The workers that serve now, by their numbers, with their process ids (None for threads)."""
        serving = [member for member, duty in list(self._duties.items()) if not duty.dismissed]
        return {member.worker: member.pid for member in sorted(serving, key=lambda member: member.worker)}

    def set_workers(self, count: int) -> None:
        """Go on with so many workers: more are started, or the last ones leave after their next gradient."""
        require("workers", count, isinstance(count, int) and count >= 1, "an integer >= 1")
        self._wanted = count

    def stop(self, reason: str = "stopped") -> None:
        """End the run after the present update."""
        self.stopping = reason

    def restore(self) -> None:
        """Go on from the newest whole checkpoint in the folder."""
        self._replaced.update(self.server.restore().get("replaced", {}))
        self._shown = self.server.version

    def run(self) -> Trace:
        """Train until all updates are made, or until stopped."""
        settings, server = self.settings, self.server
        with (
            Monitors(self.progress, settings.steps, settings.log, self.folder) as monitors,
            stop_on_signals(self),
            torch_threads(settings.threads),
        ):
            self._engine = self._make_engine()
            if self.folder is not None and not server.checkpoint():
                raise OSError(f"no checkpoint can be written to {str(self.folder)!r}: choose another folder")
            try:
                self._supervise(monitors)
            finally:
                try:
                    if self.folder is not None:
                        server.checkpoint()
                finally:
                    self._engine.close()
        trace = server.trace()
        if self.folder is not None:
            try:
                trace.save(self.folder / "trace.safetensors")
            except (OSError, SafetensorError) as error:  # the trace in memory is not to be lost with it
                warnings.warn(f"the trace could not be saved: {error}", stacklevel=2)
        if self.stopping is not None:
            warnings.warn(f"{self.stopping}: the trace ends after {server.version} updates", stacklevel=2)
        return trace

    def _make_engine(self) -> Engine:
        device, slowness = torch.device(self.settings.device), self.settings.slowness()
        parts = (self._problem, self.settings.seed, slowness, device, 1 + self.settings.ahead)
        if self.settings.engine == "threads":
            return Threads(*parts)
        return Processes(*parts, self.server.dim, self.server.dtype)

    def _supervise(self, monitors: Monitors) -> None:
        server, next_tick, next_show = self.server, 0.0, 0.0
        while not server.done and self.stopping is None:
            now = time.monotonic()  # before the events: what came while the server was busy is not late
            for event in self._engine.wait(_TICK if self._duties else 0.0):
                self._handle(event)
                if server.done or self.stopping is not None:
                    break
            if now >= next_tick:
                self._look_after_workers(now)
                next_tick = now + _TICK
            if now >= next_show:
                self._show(monitors)
                next_show = now + _SHOW
        self._show(monitors)

    def _handle(self, event: Event) -> None:
        member, server = event.member, self.server
        duty = self._duties.get(member)
        if isinstance(event, Arrived):
            job = server.exchange(
                member.worker, event.version, event.sequence, event.grad, event.query, checked=event.checked
            )
            self._fruitless = 0
            if duty is not None:
                duty.delivered = True
                duty.jobs.discard(event.sequence)
            self._assign(member, duty, job)
        elif isinstance(event, Ready):
            for query in event.queries:
                self._assign(member, duty, server.issue(member.worker, query))
        elif isinstance(event, Failed):
            server.refuse(member.worker, event.sequence, event.reason)
            if duty is not None:
                duty.jobs.discard(event.sequence)
            self._assign(member, duty, server.issue(member.worker, event.query))
        else:
            self._bury(member, event.reason)

    def _assign(self, member: Member, duty: _Duty | None, job: Job | None) -> None:
        """Send a member its next job, or let it go once it has none left."""
        if duty is not None:
            duty.since, duty.started = time.monotonic(), True
            if job is not None and not duty.dismissed:
                duty.jobs.add(job.sequence)
                member.send(job)
                return
            duty.dismissed = True
        if job is not None:
            self.server.forget(member.worker, job.sequence)
        if duty is None or not duty.jobs:
            member.dismiss()

    def _bury(self, member: Member, reason: str) -> None:
        """A member is dead: its jobs are given up, and unless it was let go, it will be replaced."""
        duty = self._duties.pop(member, None)
        if duty is None:
            return
        for sequence in duty.jobs:
            self.server.forget(member.worker, sequence)
        if duty.dismissed:
            return
        self._replaced[f"worker {member.worker}"] += 1
        at = f"after update {self.server.version}"
        warnings.warn(f"worker {member.worker} died {at} ({reason}) and is replaced", stacklevel=2)
        if not duty.delivered:
            self._fruitless += 1
            backoff = min(_LONGEST_BACKOFF, 0.1 * 2 ** min(self._fruitless, 10))
            self._not_before[member.worker] = time.monotonic() + backoff
        if self._fruitless >= _FRUITLESS * self._wanted:
            raise TrainingError(
                f"{self._fruitless} workers in a row died before their first gradient, the last with {reason}; "
                "what they wrote on stderr says why"
            )

    def _look_after_workers(self, now: float) -> None:
        if wanted := requested_workers(self.folder):
            self.set_workers(wanted)
        self._numbers = max(self._numbers, self._wanted)
        for member, duty in list(self._duties.items()):
            allowed = self.settings.deadline if duty.started else max(_START_DEADLINE, self.settings.deadline)
            if now - duty.since > allowed:
                self._replace_hung(member, duty, allowed)
        serving = {member.worker for member, duty in self._duties.items() if not duty.dismissed}
        usable = [worker for worker in range(self._numbers) if not self.server.dropped(worker)][: self._wanted]
        if not usable:
            raise TrainingError(f"all workers were dropped; the last refusal: {self.server.last_refusal}")
        for worker in usable:
            if worker not in serving and now >= self._not_before.get(worker, 0.0):
                self._duties[self._engine.start(worker)] = _Duty(since=now)
        for member, duty in self._duties.items():
            if member.worker not in usable:
                duty.dismissed = True  # it leaves when it hands back the gradient it is at

    def _replace_hung(self, member: Member, duty: _Duty, allowed: float) -> None:
        if duty.dismissed:
            member.kill()
            return
        duty.dismissed = True
        at = f"at update {self.server.version}"
        warnings.warn(f"worker {member.worker} has not answered for {allowed:g} s {at} and is replaced", stacklevel=2)
        self._replaced[f"worker {member.worker}"] += 1
        if not member.kill():
            del self._duties[member]

    def _show(self, monitors: Monitors) -> None:
        fresh = self.server.log.column("delay", self.server.version - self._shown)
        self._shown = self.server.version
        monitors.show(self.server.telemetry(), len(self.workers), fresh)
