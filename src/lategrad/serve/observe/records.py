"""Records of a run: loss, accuracy and metrics of the rule's output, what monitors show, and what follows a record."""

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lategrad.problems.problem import Problem, measure, tensor_shapes
from lategrad.support.files import replacing
from lategrad.support.threads import run_in_thread
from lategrad.support.validation import require

if TYPE_CHECKING:
    from lategrad.serve.settings import Settings

_WORTH_A_THREAD = 2e-3  # seconds; longer evaluations run in a thread while updates continue
_MAX_WAITING = 2  # copies of the output: one being evaluated, and the next
_POLL_INTERVAL = 0.2  # seconds; signals are handled in between


class Telemetry(NamedTuple):
    """Rate and delays of the last thousand updates, the last record, and counts."""

    version: int
    steps: int
    seconds: float
    updates_per_second: float
    loss: float
    accuracy: float | None
    delay_mean: float
    delay_p95: float
    delay_max: int
    refused: int
    record: int  # the number of updates before the last record
    test_loss: float | None
    metrics: dict[str, float]  # the problem's own metrics at the last record
    bytes_up: int = 0  # of all vectors received from workers, as they were sent
    bytes_down: int = 0  # of all vectors sent to workers
    memories_lost: int = 0  # how often a restarted worker had lost its local state
    val_loss: float | None = None
    threads: int = 1  # of torch, in the server


OnRecord = Callable[[Telemetry, Tensor], object]
"""Called with the telemetry and a copy of the output; ends the run by returning ``"stop"``."""
Look = Callable[[Telemetry, Tensor], None]  # called for every record, in the thread that drives the engine
BEST_FILE = "best.safetensors"  # in the run's folder: the tensor `output` with the best record so far, and that record


class _Evaluation(NamedTuple):
    version: int
    output: Tensor
    values: Future[dict[str, float]]


class Records:
    """One record of the start, then one every ``every`` updates.

    A long evaluation runs in a thread; the thread that drives the server adds it later, in order (:meth:`collect`).

    >>> from lategrad.problems import Quadratic
    >>> records = Records(Quadratic(), every=10)
    >>> records.take(0, Quadratic().start())
    >>> records.steps, records.is_due(9), records.is_due(10)
    ([0], False, True)
    """

    def __init__(self, problem: Problem, every: int) -> None:
        self.every = every
        self.steps: list[int] = []
        self.listener: Callable[[Tensor], None] | None = None  # called with the output after each record
        self.since: Callable[[int, int], Mapping[str, float]] | None = None  # more values, of some updates
        self.problem = problem
        self._series: dict[str, list[float]] = {}
        self._fastest = math.inf  # seconds of an evaluation so far
        self._waiting: deque[_Evaluation] = deque()
        self._last_evaluation: Future[dict[str, float]] | None = None
        self._restores = 0

    def is_due(self, version: int) -> bool:
        return version % self.every == 0

    def take(self, version: int, output: Tensor) -> None:
        """Evaluate the rule's output now, unless this version is recorded already."""
        self.drain()
        if not self._has(version):
            self.add(version, self._evaluate(output), output)

    def note(self, version: int, output: Tensor) -> None:
        """Evaluate the rule's output now, or a copy of it in a thread if that takes long."""
        self.collect()
        if self._has(version):
            return
        if self._waiting or self._fastest > _WORTH_A_THREAD:
            self._begin(version, output.detach().clone())
        else:
            self.take(version, output)

    def _has(self, version: int) -> bool:
        return version in [*self.steps[-1:], *self.waiting()]

    def _evaluate(self, output: Tensor) -> dict[str, float]:
        begin = time.perf_counter()
        numbers = {name: value.item() for name, value in measure(self.problem, output).by_name().items()}
        self._fastest = min(self._fastest, time.perf_counter() - begin)
        return numbers

    def _begin(self, version: int, output: Tensor) -> None:
        """Evaluate in a thread, after the evaluations before it; nothing may write to ``output`` any more."""
        before, restores = self._last_evaluation, self._restores

        def evaluate() -> dict[str, float]:
            if before is not None:
                wait([before])
            return self._evaluate(output) if restores == self._restores else {}

        self._last_evaluation = run_in_thread(evaluate, "lategrad-evaluation")
        self._waiting.append(_Evaluation(version, output, self._last_evaluation))

    @property
    def are_behind(self) -> bool:
        """Whether updates should wait, because records are due faster than they can be evaluated."""
        return len(self._waiting) >= _MAX_WAITING

    def collect(self, timeout: float = 0.0) -> None:
        """Add the evaluations that are done; wait up to ``timeout`` seconds for the first."""
        if self._waiting and timeout > 0:
            wait([self._waiting[0].values], timeout)
        while self._waiting and self._waiting[0].values.done():
            done = self._waiting.popleft()
            self.add(done.version, done.values.result(), done.output)

    def drain(self, timeout: float = math.inf) -> list[int]:
        """Add all evaluations; returns the versions of those that are not done within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self._waiting and time.monotonic() < end:
            self.collect(min(_POLL_INTERVAL, max(0.0, end - time.monotonic())))
        return list(self.waiting())

    def add(self, version: int, values: Mapping[str, float], output: Tensor | None = None) -> None:
        """Add a record; the listener is called with its output, if that is given."""
        if self.since is not None:
            values = {**values, **self.since(self.steps[-1] if self.steps else 0, version)}
        self.steps.append(version)
        for name, value in values.items():
            series = self._series.setdefault(name, [])
            series += [math.nan] * (len(self.steps) - 1 - len(series))  # a metric that is new in a resumed run
            series.append(value)
        if self.listener is not None and output is not None:
            self.listener(output)

    def series(self) -> dict[str, list[float]]:
        """All recorded values by name, each as long as ``steps``."""
        return {name: values + [math.nan] * (len(self.steps) - len(values)) for name, values in self._series.items()}

    def last(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.series().items()}

    def saved(self) -> dict[str, list[Any]]:
        return {"steps": list(self.steps), **self.series()}

    def waiting(self) -> dict[int, Tensor]:
        """The outputs that are still to be evaluated, by their versions; for a checkpoint."""
        return {evaluation.version: evaluation.output for evaluation in self._waiting}

    def restore(self, saved: dict[str, list[Any]], waiting: Mapping[int, Tensor]) -> None:
        """Continue from the records and the waiting outputs of a checkpoint."""
        self._restores += 1  # evaluations that have not begun are skipped
        self._waiting.clear()
        self.steps = list(saved["steps"])
        self._series = {name: list(values) for name, values in saved.items() if name != "steps" and values}
        for version in sorted(waiting):
            self._begin(version, waiting[version])

    def tensors(self) -> dict[str, Any]:
        """The fields of a :class:`~lategrad.Trace`."""
        series = {name: torch.tensor(values, dtype=torch.float64) for name, values in self.series().items()}
        own = {name: series.pop(name, None) for name in ("loss", "accuracy", "test_loss", "val_loss")}
        return {"steps": torch.tensor(self.steps), **own, "metrics": series}


class Watch:
    """Looks at every record as it is taken; ``stop`` ends the run, with a reason."""

    def __init__(self, records: Records, stop: Callable[[str], None], settings: "Settings") -> None:
        self._records, self._stop, monitor = records, stop, settings.monitor
        self._on_record, self._patience, self._folder = settings.on_record, settings.patience, settings.folder
        self._name = None if monitor is None else monitor.lstrip("+-")
        self._larger_is_better = monitor is not None and (monitor.startswith("+") or monitor == "accuracy")

    def check_name(self) -> None:
        """Refuse to monitor a value that the record of the start does not have."""
        if self._name is not None:
            self._best(self._name)

    def _best(self, name: str) -> int:
        """The position of the best record so far, the first of equals."""
        series = self._records.series()
        require("monitor", name, name in series, f"one of the recorded values, {', '.join(series)}")
        choose, worst = (max, -math.inf) if self._larger_is_better else (min, math.inf)
        values = [worst if math.isnan(value) else value for value in series[name]]
        return values.index(choose(values))

    def look(self, telemetry: Telemetry, output: Tensor) -> None:
        """Look at the newest record; the server may have made more updates since."""
        if self._name is not None:
            self._compare(self._name, output)
        if self._on_record is not None:
            answer = self._on_record(telemetry, output.detach().cpu().clone())
            require("the return value of on_record", answer, answer in (None, "stop"), "None or 'stop'")
            if answer == "stop":
                self._stop("stopped by on_record")

    def _compare(self, name: str, output: Tensor) -> None:
        best, newest = self._best(name), len(self._records.steps) - 1
        if best == newest and self._folder is not None:
            record = {"step": self._records.steps[-1], "monitor": name, **self._records.last()}
            try:
                with replacing(self._folder / BEST_FILE) as part:
                    tensors = {"output": output.detach().cpu().contiguous()}
                    shapes = tensor_shapes(self._records.problem)
                    save_file(tensors, part, metadata={"record": json.dumps(record), "tensors": json.dumps(shapes)})
            except (OSError, SafetensorError) as error:  # a full disk does not end a run
                warnings.warn(f"the best output could not be saved, training continues: {error}", stacklevel=2)
        if self._patience is not None and newest - best >= self._patience:
            self._stop(f"stopped early: {name} was best after {self._records.steps[best]} updates")
