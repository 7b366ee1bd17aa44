"""What is done at every record of a run: the user's callback, the best output kept, an early stop."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.support.files import replacing
from lategrad.support.validation import require

OnRecord = Callable[[Telemetry, Tensor], object]
"""Called with how the run is doing and a copy of the output; ends the run by returning ``"stop"``."""

Look = Callable[[Telemetry, Tensor], None]
"""Called for every record, in the thread of whoever drives the engine."""

BEST_FILE = "best.safetensors"
"""In the run's folder: the tensor ``output`` with the best record so far, and which record that was."""


@dataclass(frozen=True)
class Monitored:
    """A number that is recorded, and whether more of it is better."""

    name: str
    more_is_better: bool

    @staticmethod
    def parse(text: str) -> Monitored:
        """``loss``, or ``+accuracy`` where more is better; of accuracy that is known.

        >>> Monitored.parse("test_loss").more_is_better, Monitored.parse("accuracy").more_is_better
        (False, True)
        >>> Monitored.parse("+top 5")
        Monitored(name='top 5', more_is_better=True)
        """
        name = text.lstrip("+-")
        return Monitored(name, text.startswith("+") or (name == "accuracy" and not text.startswith("-")))

    def best(self, records: Records) -> int:
        """The position of the best record so far, the first of equals."""
        series = records.series()
        require("monitor", self.name, self.name in series, f"one of what is recorded, {', '.join(series)}")
        worst = -math.inf if self.more_is_better else math.inf
        values = [worst if math.isnan(value) else value for value in series[self.name]]
        return values.index((max if self.more_is_better else min)(values))


class Watch:
    """Looks at every record as it is taken.

    Args:
        records: of the run.
        stop: ends the run, with a reason.
        on_record: the user's.
        monitor: the number that says which record is best (see :meth:`Monitored.parse`); None for none.
        patience: records without a better one after which the run ends; None for never.
        folder: where the best output is kept; None for nowhere.
    """

    def __init__(
        self,
        records: Records,
        stop: Callable[[str], None],
        *,
        on_record: OnRecord | None,
        monitor: str | None,
        patience: int | None,
        folder: Path | None,
    ) -> None:
        self._records, self._stop = records, stop
        self._on_record, self._patience, self._folder = on_record, patience, folder
        self._monitored = None if monitor is None else Monitored.parse(monitor)

    def require_known(self) -> None:
        """Refuse a name that is not among what was recorded of the start."""
        if self._monitored is not None:
            self._monitored.best(self._records)

    def look(self, telemetry: Telemetry, output: Tensor) -> None:
        """At the record that was just taken; the updates may be further on by now."""
        if self._monitored is not None:
            self._judge(self._monitored, output)
        if self._on_record is not None:
            answer = self._on_record(telemetry, output.detach().cpu().clone())
            require("what on_record returns", answer, answer in (None, "stop"), "None or 'stop'")
            if answer == "stop":
                self._stop("stopped by on_record")

    def _judge(self, monitored: Monitored, output: Tensor) -> None:
        best, newest = monitored.best(self._records), len(self._records.steps) - 1
        if best == newest and self._folder is not None:
            self._keep(monitored, output)
        if self._patience is not None and newest - best >= self._patience:
            self._stop(f"stopped early: {monitored.name} was best after {self._records.steps[best]} updates")

    def _keep(self, monitored: Monitored, output: Tensor) -> None:
        assert self._folder is not None
        which = {"step": self._records.steps[-1], "monitor": monitored.name, **self._records.last()}
        try:
            with replacing(self._folder / BEST_FILE) as part:
                save_file({"output": output.detach().cpu().contiguous()}, part, metadata={"record": json.dumps(which)})
        except OSError as error:  # a full disk is no reason to end a run
            warnings.warn(f"the best output could not be kept, training goes on: {error}", stacklevel=2)
