"""``lg.train`` and ``lg.resume``: a server, its workers, and a supervisor that restarts workers."""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lategrad.problems.problem import Problem, as_problem
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule
from lategrad.rules.scheduled import Share, with_schedule
from lategrad.serve.checkpoints.archive import Archive, lock_folder
from lategrad.serve.checkpoints.checkpoint import Checkpoint, checkpoint_paths
from lategrad.serve.engines.engine import Engine, TrainingError
from lategrad.serve.engines.local import LocalEngine
from lategrad.serve.jobs import Location
from lategrad.serve.observe.monitor import Monitors
from lategrad.serve.observe.records import OnRecord, Watch
from lategrad.serve.settings import Settings, Slow
from lategrad.serve.signals import ControlFile, handle_signals
from lategrad.serve.supervisor import Supervisor
from lategrad.trace import Trace

__all__ = ["Training", "TrainingError", "resume", "train"]

_SUPERVISE_EVERY = 0.2  # seconds between two checks of the workers and the control file
_SHOW_EVERY = 1.0  # seconds between two points of the display and of the logs


def train(
    problem: Problem, rule: AnyRule[Any] | str, *, steps: int, workers: int | str = 4, engine: str = "processes",
    address: str | None = None, seed: int = 0, data_shards: int | None = None, device: torch.device | str = "cpu",
    server_device: torch.device | str = "cpu", num_gpus: float | None = None, slow: Slow = None,
    threads: int | None = None, prefetch: int = 0, compression: str = "none", deadline: float = 300.0,
    max_refusals: int | None = 10, max_delay: int | None = None, schedule: str | Share | None = None,
    clip: float | None = None, max_norm_ratio: float | None = None, stall: float | None = 3600.0,
    record_every: int | None = None, drift: bool = False, compile: bool | None = None, out: str | Path | None = None,
    checkpoint_every: int | None = None, keep: int = 2, monitor: str | None = None, patience: int | None = None,
    on_record: OnRecord | None = None, log: str | None = None, progress: bool | None = None,
    notes: dict[str, Any] | None = None,
) -> Trace:  # fmt: skip
    """Train with asynchronous workers; each computes gradients at the parameters that it received last.

    Ctrl-C or SIGTERM ends the run after a last checkpoint and returns the trace so far (``trace.complete`` is then
    False); :func:`resume` continues from there.

    Args:
        problem: the objective; any :class:`~lategrad.problems.Problem`, such as
            :class:`~lategrad.problems.ModuleProblem` for an ``nn.Module``.
        rule: the server rule, or a text such as ``"steady:lr=1"``. One that uses shapes gets those of the problem.
        steps: server updates in total.
        workers: number of workers; it can be changed during the run (Training.set_workers, or a number written to
            the file OUT/workers). On Ray also a range such as 2:8: as many of them as the cluster has CPUs for.
        engine: how workers run: processes; threads, for notebooks and problems that cannot be pickled; or ray, for
            workers on other machines (pip install 'lategrad[ray]').
        address: address of a running Ray cluster, such as auto or ray://host:10001; by default Ray is started on
            this machine, for this run.
        seed: seed of the workers' sample streams; each worker has its own stream.
        data_shards: split the rows of the data into this number of shards; worker w draws only from shard w modulo
            data_shards. By default every worker draws from all rows, so that no row is missed while one is away.
        device: where gradients are computed: cpu or cuda.
        server_device: where the server keeps its state and computes its updates: cpu or cuda. Vectors are copied if
            it is not the workers' device; on the same GPU they never leave it. Not available on Ray.
        num_gpus: GPUs that each worker reserves on Ray; with 0.25 four workers share one. By default 1 on cuda.
        slow: a distribution such as lognormal:3,1 of the milliseconds by which each gradient is held back on purpose,
            or one for each of some workers, {0: 'constant:100'} (on the command line 0=constant:100).
        threads: torch threads of the server; each worker process has one. By default as many, of the cores that the
            workers leave, as make passes over its vectors faster, measured at the start (trace.config['threads']).
        prefetch: extra jobs queued on each worker, so that it does not wait for the server. Faster where a gradient
            takes less than a few milliseconds, but delays grow by a factor of 1 + prefetch. Not available on Ray.
        compression: how gradients are sent: none; or, for slow networks, bfloat16 or int8, which take half and a
            quarter of float32's bytes. Each worker adds its rounding error to its next one. Queries are not compressed.
        deadline: seconds without a gradient after which a worker is considered hung and is restarted. A slow worker
            is not hung: its late gradients are used.
        max_refusals: consecutive refused gradients (not finite, wrong shape, ...) after which a worker is dropped;
            in Python, None for never.
        max_delay: drop gradients with a delay larger than this; their workers continue from the current query. A
            warning names workers with a tenth of their fair share of the updates or less, and
            trace.config['too_late'] counts the dropped gradients of each worker. By default all gradients are
            applied, which our rules are made for.
        schedule: learning-rate schedule over the server's updates (of the rule's lr, or its learner's): constant,
            linear or cosine, with options such as cosine:warmup=100,floor=0.1 (and total=, if it ends before the last
            update); in Python also a function from t, a tensor, to a factor.
        clip: scale gradients with a larger norm down to this norm; by default none is.
        max_norm_ratio: refuse gradients whose norm is more than this number of times the median of the last hundred,
            such as 100; the first twenty only measure typical norms and are not applied. By default none is refused.
        stall: seconds without an update (at least two deadlines) after which the run ends with an error and a
            checkpoint; in Python, None for never. Time spent waiting for the CPUs of a cluster does not count.
        record_every: updates between two records of loss and accuracy; by default ten records.
        drift: measure the distance between the query of each gradient and the query at its arrival: the metric drift, a
            mean since the last record. The server keeps a copy of the query of every job.
        compile: compile the rule's update; by default for long runs.
        out: folder for checkpoints, the log of updates and the trace; by default everything stays in memory.
        checkpoint_every: updates between two checkpoints; by default one per minute. One is always made at the start
            and at the end, and on Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (which does not end the run).
        keep: number of checkpoints to keep.
        monitor: the recorded value that decides which record is best: loss, test_loss, val_loss, accuracy or the name
            of a metric, preceded by + if larger is better (implied for accuracy). The best output so far is saved in
            OUT/best.safetensors.
        patience: records without an improvement after which the run ends early; needs monitor.
        on_record: called for every record with the telemetry and a copy of the recorded output (after
            telemetry.record updates; more may have been made since). The run ends if it returns 'stop'. Python only.
        log: tensorboard writes scalars and histograms of delays to OUT/tensorboard; wandb creates a Weights & Biases
            run in OUT/wandb, offline unless WANDB_MODE says otherwise (`wandb sync` uploads it). For both, the
            text tensorboard,wandb; on the command line, two values.
        progress: show a progress bar; by default on a terminal, and otherwise a line every 30 seconds.
        notes: JSON values to save with the trace and the checkpoints.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> trace = train(Quadratic(noise=0.1), lg.Anytime(lg.OGD(lr=1.0)), steps=300, workers=3, engine="threads")
    >>> trace.complete, bool(trace.loss[-1] < trace.loss[0] / 10)
    (True, True)
    """
    options = dict(locals())
    del options["problem"], options["rule"]
    settings = Settings(**{**options, "notes": notes or {}})
    with lock_folder(settings.folder):
        if settings.folder is not None and checkpoint_paths(settings.folder):
            raise ValueError(f"{str(settings.folder)!r} holds a run already: resume it, or choose another folder")
        return Training(as_problem(problem), as_rule(rule), settings).run()


class _Unchanged:
    def __repr__(self) -> str:
        return "<unchanged>"


_UNCHANGED: Any = _Unchanged()


def resume(
    out: str | Path, problem: Problem, rule: AnyRule[Any] | str, *, steps: int = _UNCHANGED,
    workers: int | str = _UNCHANGED, engine: str = _UNCHANGED, address: str | None = _UNCHANGED,
    device: torch.device | str = _UNCHANGED, server_device: torch.device | str = _UNCHANGED,
    num_gpus: float | None = _UNCHANGED, slow: Slow = _UNCHANGED, threads: int | None = _UNCHANGED,
    prefetch: int = _UNCHANGED, deadline: float = _UNCHANGED, max_refusals: int | None = _UNCHANGED,
    max_delay: int | None = _UNCHANGED, schedule: str | Share | None = _UNCHANGED, clip: float | None = _UNCHANGED,
    max_norm_ratio: float | None = _UNCHANGED, stall: float | None = _UNCHANGED,
    record_every: int | None = _UNCHANGED, drift: bool = _UNCHANGED, compile: bool | None = _UNCHANGED,
    checkpoint_every: int | None = _UNCHANGED, keep: int = _UNCHANGED, monitor: str | None = _UNCHANGED,
    patience: int | None = _UNCHANGED, on_record: OnRecord | None = _UNCHANGED, log: str | None = _UNCHANGED,
    progress: bool | None = _UNCHANGED, notes: dict[str, Any] = _UNCHANGED,
) -> Trace:  # fmt: skip
    """Continue a run from its newest intact checkpoint, with its state, sample streams and trace.

    The other arguments are those of :func:`train` that may change; what is not given stays as it was. The seed, the
    data shards and the compression stay, because the samples and the rounding of a replay follow from them.

    Args:
        out: the run's folder.
        problem: the same problem; another one is refused.
        rule: the same rule; another one is refused.
    """
    options = dict(locals())
    del options["out"], options["problem"], options["rule"]
    changes = {name: value for name, value in options.items() if value is not _UNCHANGED}
    return resume_from(Path(out), lambda _: (as_problem(problem), as_rule(rule)), changes)


def resume_from(folder: Path, build: Callable[[dict[str, Any]], tuple[Problem, AnyRule[Any]]],
                changes: dict[str, Any]) -> Trace:  # fmt: skip
    """Continue a run; ``build`` makes its problem and rule from its settings, so that the checkpoint is read once."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint in {str(folder)!r}: there is no such folder")
    with lock_folder(folder):
        archive = Archive(folder)
        built: list[tuple[Problem, AnyRule[Any]]] = []
        checkpoint = archive.load(lambda saved: built.append(build(saved)))
        options = {**checkpoint.settings, **changes, "out": folder}
        if options["engine"] != "ray":
            options["address"] = changes.get("address")
        elif "address" not in changes and (address := options["address"]) is not None:  # of the folder's choosing
            raise ValueError(f"address must be given again: only the run's folder names the Ray cluster at {address!r}")
        settings = Settings(**options)
        if settings.progress is not False:
            print(f"resuming at update {checkpoint.version} of {settings.steps}", file=sys.stderr)
        return Training(*built[-1], settings, checkpoint, archive).run()


class Training:
    """A run as :func:`train` makes it, with a handle: ``set_workers`` and ``stop`` may be called from another thread.

    With a checkpoint, and the archive that it came from, the run continues from there.
    """

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, checkpoint: Checkpoint | None = None,
                 archive: Archive | None = None) -> None:  # fmt: skip
        self.settings, self._checkpoint = settings, checkpoint
        if settings.data_shards is not None:  # data that cannot be split is refused here, not by every worker
            settings.streams.draw(problem, settings.data_shards - 1, 0, 1)
        self.stopping: str | None = None
        self._save_soon = False
        self._control_file = ControlFile(settings.folder)
        if settings.folder is not None:
            archive = archive or Archive(settings.folder)
            archive.schedule.every, archive.keep = settings.checkpoint_every, settings.keep
        self.engine = _make_engine(problem, with_schedule(rule, settings.schedule), settings, archive)
        replaced = {} if checkpoint is None else checkpoint.description["config"]["replaced"]
        self.supervisor = Supervisor(self.engine, *settings.worker_range(), settings.deadline, Counter(replaced),
                                     settings.stall)  # fmt: skip

    @property
    def version(self) -> int:
        """Updates made so far; on Ray, as far as the driver knows."""
        return self.engine.version

    @property
    def workers(self) -> dict[int, Location]:
        """The workers that have joined and are not known to have ended, by their numbers, with where they run."""
        return self.supervisor.workers

    def set_workers(self, count: int) -> None:
        """Change the number of workers: more are started, or the last ones leave after their next gradient."""
        self.supervisor.set_workers(count)

    def stop(self, reason: str = "stopped") -> None:
        """End the run after the current update."""
        self.stopping, self.supervisor.is_stopping = reason, True
        self.engine.request_stop()

    def save_soon(self) -> None:
        """Make a checkpoint after the current update; may be called from another thread or a signal handler."""
        self._save_soon = True

    def run(self) -> Trace:
        """Train until all updates are made, or until stopped."""
        with handle_signals(self):
            trace = self._run()
            trace.config["stopped"] = self.stopping
            if (folder := self.settings.folder) is not None:
                try:
                    trace.save(folder / "trace.safetensors")
                    trace.to_csv(folder / "records.csv")
                except (OSError, SafetensorError) as error:  # the trace in memory must not be lost with it
                    warnings.warn(f"the trace could not be saved: {error}", stacklevel=2)
        if self.stopping is not None:
            warnings.warn(f"{self.stopping}: the trace ends after {len(trace.delays)} updates", stacklevel=2)
        return trace

    def _run(self) -> Trace:
        with Monitors(self.settings) as monitors, closing(self.engine):
            watch = Watch(self.engine.records, self._stop_early, self.settings)
            if self.settings.on_record is not None or self.settings.monitor is not None:
                self.engine.watch(watch.look)
            if not self.engine.begin(self._checkpoint, watch.check_name):
                raise OSError(f"no checkpoint can be written to {str(self.settings.folder)!r}: choose another folder")
            self._checkpoint = None  # the server has it
            trace = None
            while trace is None:
                try:
                    self._supervise(monitors)
                except TrainingError:
                    if self.stopping is None:  # otherwise the run is ending anyway
                        raise
                finally:
                    self.engine.save()
                trace = self.engine.finish(at_once=self.stopping is not None)
            self._show(monitors)
            return trace

    def _stop_early(self, reason: str) -> None:
        if self.stopping is None and self.engine.version < self.settings.steps:
            self.stop(reason)

    def _supervise(self, monitors: Monitors) -> None:
        next_check = next_show = 0.0
        done = self._check_workers(time.monotonic())
        while not done and self.stopping is None:
            now = time.monotonic()  # before the events: gradients that came while the server was busy are in time
            for ended in self.engine.wait(_SUPERVISE_EVERY):
                self.supervisor.handle_end(ended, now)
            if now >= next_check or self.engine.version >= self.settings.steps:
                done = self._check_workers(now)
                next_check = now + _SUPERVISE_EVERY
            if self._save_soon:
                self._save_soon = False
                self.engine.save()
            if now >= next_show and not done and self.stopping is None:  # the end is shown once it is evaluated
                self._show(monitors)
                next_show = now + _SHOW_EVERY

    def _check_workers(self, now: float) -> bool:
        """Start, stop and restart workers as needed; returns whether the run is done."""
        self.supervisor.require_progress(now)
        if (report := self.engine.report(now, dict(self.supervisor.replaced))) is None:
            return False  # the server is being restarted, and nothing is known of the workers meanwhile
        if not report.done:
            if count := self._control_file.read():
                self.set_workers(count)
            self.supervisor.check(report, now)
        return report.done

    def _show(self, monitors: Monitors) -> None:
        telemetry, delays = self.engine.telemetry()
        monitors.show(telemetry, len(self.workers), delays)


def _make_engine(problem: Problem, rule: AnyRule[Any], settings: Settings, archive: Archive | None) -> Engine:
    if settings.engine != "ray":
        return LocalEngine(problem, rule, settings, archive)
    try:
        from lategrad.serve.engines.ray.driver import RayEngine
    except ImportError as error:
        raise ImportError(f"engine='ray' needs Ray ({error}): pip install 'lategrad[ray]'") from None
    return RayEngine(problem, rule, settings, archive)
