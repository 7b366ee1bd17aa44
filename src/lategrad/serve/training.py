"""Real asynchronous training: a server, its workers, and someone who looks after both."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

from safetensors import SafetensorError

from lategrad.problems.problem import Problem, as_problem
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule
from lategrad.rules.scheduled import with_schedule
from lategrad.serve.checkpoints.archive import Archive, locked
from lategrad.serve.checkpoints.checkpoint import Checkpoint, checkpoint_paths
from lategrad.serve.engines.engine import Engine, TrainingError
from lategrad.serve.engines.local import LocalEngine
from lategrad.serve.jobs import Location
from lategrad.serve.observe.monitor import Monitors
from lategrad.serve.observe.watch import Watch
from lategrad.serve.settings import KEPT, Settings, documentation, options
from lategrad.serve.signals import ControlFile, listen_to_signals
from lategrad.serve.supervisor import Supervisor
from lategrad.support.validation import did_you_mean, require
from lategrad.trace import Trace

__all__ = ["Training", "TrainingError", "resume", "train"]

_TICK = 0.2  # seconds between two looks at the workers and the control file
_SHOW = 1.0  # seconds between two points of the display and of TensorBoard


def train(problem: Problem, rule: AnyRule[Any] | str, **settings: Any) -> Trace:
    """Train with asynchronous workers: each computes gradients at the query it last got, late as they may be.

    Args:
        problem: the objective; any :class:`~lategrad.problems.Problem`, such as
            :class:`~lategrad.problems.ModuleProblem` for an ``nn.Module``.
        rule: the server rule, or a text such as ``"steady:lr=1"``; one that looks at the shapes of the problem's
            tensors gets them.
        settings: see below.

    Ctrl-C or SIGTERM ends the run early, after a last checkpoint, and returns what there is
    (``trace.complete`` is then False); :func:`resume` goes on from there.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> trace = train(Quadratic(noise=0.1), lg.Anytime(lg.OGD(lr=1.0)), steps=300, workers=3, engine="threads")
    >>> trace.complete, bool(trace.loss[-1] < trace.loss[0] / 10)
    (True, True)
    """
    chosen = _settings(settings)
    with locked(chosen.folder):
        if chosen.folder is not None and checkpoint_paths(chosen.folder):
            raise ValueError(f"{str(chosen.folder)!r} holds a run already: resume it, or choose another folder")
        return Training(as_problem(problem), as_rule(rule), chosen).run()


def _settings(given: dict[str, Any]) -> Settings:
    """The settings of a call; a name that is none, or one that is missing, gets a sentence."""
    names = [option.name for option in options()]
    for name in given:
        if name not in names:
            raise TypeError(f"train has no option {name!r}{did_you_mean(name, names)}; help(lategrad.train) lists them")
    if "steps" not in given:
        raise TypeError("train needs steps=..., the updates to make in all: there is no default")
    return Settings(**given)


def _show_settings() -> None:
    """Give :func:`train` the signature and the documentation of the settings, which are written once."""
    if train.__doc__ is not None:  # it is under python -OO
        train.__doc__ = train.__doc__.replace("        settings: see below.", documentation(" " * 8))
    types = get_type_hints(Settings)
    named = [parameter.replace(annotation=types[parameter.name])
             for parameter in inspect.signature(Settings).parameters.values()]  # fmt: skip
    positional = list(inspect.signature(train).parameters.values())[:2]
    train.__signature__ = inspect.Signature([*positional, *named], return_annotation=Trace)  # type: ignore[attr-defined]


_show_settings()


def resume(out: str | Path, problem: Problem, rule: AnyRule[Any] | str, **changes: Any) -> Trace:
    """Go on with a run from its newest whole checkpoint: state, version, sample streams and trace.

    Args:
        out: the run's folder.
        problem: the same problem; another one is refused.
        rule: the same rule; another one is refused.
        changes: arguments of :func:`train` that shall be others from now on, such as ``steps`` or ``workers``;
            the seed and the shards of the data stay, as the samples follow from them, and the compression, so
            that a replay knows how to round.
    """
    changeable = sorted({option.name for option in options()} - set(KEPT))
    unknown = sorted(set(changes) - set(changeable))
    require("changes", unknown, not unknown, f"among {', '.join(changeable)}")
    return resume_from(Path(out), lambda _: (as_problem(problem), as_rule(rule)), changes)


def resume_from(
    folder: Path, recall: Callable[[dict[str, Any]], tuple[Problem, AnyRule[Any]]], changes: dict[str, Any]
) -> Trace:
    """Go on with a run; ``recall`` gives problem and rule from its settings, so that its checkpoint is read once."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint in {str(folder)!r}: there is no such folder")
    with locked(folder):
        archive = Archive(folder)
        checkpoint = archive.load()
        problem, rule = recall(checkpoint.settings)
        settings = Settings(**{**checkpoint.settings, **changes, "out": folder})
        return Training(problem, rule, settings, checkpoint, archive).run()


class Training:
    """A run with a handle: ``run()`` blocks; ``set_workers`` and ``stop`` may be called from another thread.

    Args:
        problem: see :func:`train`.
        rule: see :func:`train`.
        settings: see :func:`train`.
        checkpoint: to go on from.
        archive: that it came from.
    """

    def __init__(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        settings: Settings,
        checkpoint: Checkpoint | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.settings, self._checkpoint = settings, checkpoint
        if settings.data_shards is not None:  # what cannot be shared out is refused here, not by every worker
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
        """Go on with so many workers: more are started, or the last ones leave after their next gradient."""
        self.supervisor.set_workers(count)

    def stop(self, reason: str = "stopped") -> None:
        """End the run after the present update."""
        self.stopping = reason
        self.engine.request_stop()

    def save_soon(self) -> None:
        """Make a checkpoint after the present update; may be called from another thread, or from a signal handler."""
        self._save_soon = True

    def run(self) -> Trace:
        """Train until all updates are made, or until stopped."""
        settings = self.settings
        progress = sys.stderr.isatty() if settings.progress is None else settings.progress
        with (
            Monitors(
                progress, settings.steps, settings.log, settings.folder, lines=settings.progress is None
            ) as monitors,
            listen_to_signals(self),
            closing(self.engine),
        ):
            watch = self._watch()
            self.engine.begin(self._checkpoint)
            self._checkpoint = None  # the server has it
            watch.require_known()
            trace = None
            while trace is None:
                try:
                    self._supervise(monitors)
                except TrainingError:
                    if self.stopping is None:  # otherwise it ends as it was told to
                        raise
                finally:
                    self.engine.save()
                trace = self.engine.finish(at_once=self.stopping is not None)
            self._show(monitors)
        trace.config["stopped"] = self.stopping
        if settings.folder is not None:
            try:
                trace.save(settings.folder / "trace.safetensors")
                trace.to_csv(settings.folder / "records.csv")
            except (OSError, SafetensorError) as error:  # the trace in memory is not to be lost with it
                warnings.warn(f"the trace could not be saved: {error}", stacklevel=2)
        if self.stopping is not None:
            warnings.warn(f"{self.stopping}: the trace ends after {len(trace.delays)} updates", stacklevel=2)
        return trace

    def _watch(self) -> Watch:
        """Look at every record, where that is asked for."""
        chosen = self.settings

        def stop(reason: str) -> None:
            if self.stopping is None and self.engine.version < chosen.steps:
                self.stop(reason)

        watch = Watch(self.engine.records, stop, on_record=chosen.on_record, monitor=chosen.monitor,
                      patience=chosen.patience, folder=chosen.folder)  # fmt: skip
        if chosen.is_watched:
            self.engine.watch(watch.look)
        return watch

    def _supervise(self, monitors: Monitors) -> None:
        next_tick = next_show = 0.0
        done = self._look_after_workers(time.monotonic())
        while not done and self.stopping is None:
            now = time.monotonic()  # before the events: what came while the server was busy is not late
            for ended in self.engine.wait(_TICK):
                self.supervisor.bury(ended, now)
            if now >= next_tick or self.engine.version >= self.settings.steps:
                done = self._look_after_workers(now)
                next_tick = now + _TICK
            if self._save_soon:
                self._save_soon = False
                self.engine.save()
            if now >= next_show and not done and self.stopping is None:  # the end is shown once it is evaluated
                self._show(monitors)
                next_show = now + _SHOW

    def _look_after_workers(self, now: float) -> bool:
        """Whether the run is done; otherwise the workers have been looked after."""
        self.supervisor.require_progress(now)
        report = self.engine.report(now, dict(self.supervisor.replaced))
        if report is None:
            return False  # while the server is away, nothing is known of them
        if not report.done:
            if wanted := self._control_file.requested():
                self.set_workers(wanted)
            self.supervisor.look_after(report, now)
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
