"""Handles every record of a run: calls the user's callback, saves the best output, stops early."""

import json
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lategrad.problems.problem import tensor_shapes
from lategrad.serve.observe.records import Records, Telemetry
from lategrad.support.files import replacing
from lategrad.support.validation import require

if TYPE_CHECKING:
    from lategrad.serve.settings import Settings

OnRecord = Callable[[Telemetry, Tensor], object]
"""Called with the telemetry and a copy of the output; ends the run by returning ``"stop"``."""
Look = Callable[[Telemetry, Tensor], None]  # called for every record, in the thread that drives the engine
BEST_FILE = "best.safetensors"  # in the run's folder: the tensor `output` with the best record so far, and that record


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
