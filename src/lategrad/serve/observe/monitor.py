"""Shows a run while it trains: on the terminal, in files, in TensorBoard and in Weights & Biases."""

import csv
import json
import os
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lategrad.serve.observe.records import Telemetry
from lategrad.support.files import open_plain

if TYPE_CHECKING:
    from lategrad.serve.settings import Settings

_CSV_COLUMNS = ("step", "seconds", "updates_per_second", "record", "loss", "accuracy", "test_loss", "val_loss",
                "delay_mean", "delay_p95", "delay_max", "refused", "workers")  # fmt: skip
"""Of ``log.csv``, the same for all runs; ``log.jsonl`` has the problem's metrics too."""


class Monitor:
    """Shows the telemetry of a run, about once a second and at its end."""

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        """Show the state of the run; ``delays`` are those of the updates since the last call."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is buffered."""


def summary_line(t: Telemetry, workers: int) -> str:
    accuracy = "" if t.accuracy is None else f", accuracy {t.accuracy:.4f}"
    refused = f", {t.refused} refused" if t.refused else ""
    delays = f"delay {t.delay_mean:.1f} mean {t.delay_p95:.0f} p95 {t.delay_max} max"
    return f"{t.updates_per_second:,.0f} updates/s, loss {t.loss:.4g}{accuracy}, {delays}, {workers} workers{refused}"


class Terminal(Monitor):
    """A progress bar on stderr, and :func:`summary_line` below it."""

    def __init__(self, steps: int) -> None:
        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._task = self._bar.add_task("", total=steps)
        self._live = Live(Group(self._bar, "starting workers"), console=Console(stderr=True), transient=True)
        self._live.start()

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        self._bar.update(self._task, completed=telemetry.version)
        self._live.update(Group(self._bar, summary_line(telemetry, workers)))

    def close(self) -> None:
        self._live.stop()


class Lines(Monitor):
    """:func:`summary_line` on stderr every ``every`` seconds, where there is no terminal."""

    def __init__(self, every: float = 30.0) -> None:
        self._every, self._next = every, time.monotonic() + every

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            line = summary_line(telemetry, workers)
            print(f"update {telemetry.version} of {telemetry.steps}: {line}", file=sys.stderr)


class LogFiles(Monitor):
    """The telemetry in ``log.csv`` and ``log.jsonl``, a row about once a second; a resumed run appends to them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._csv, self._lines = folder / "log.csv", folder / "log.jsonl"
        self._last = -1

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        if telemetry.version == self._last:
            return
        self._last = telemetry.version
        numbers = telemetry._asdict()
        row = {"step": numbers.pop("version"), **numbers.pop("metrics"), **numbers, "workers": workers}
        with open_plain(self._lines, "a") as file:
            file.write(json.dumps(row) + "\n")
        with open_plain(self._csv, "a", newline="") as file:
            writer = csv.DictWriter(file, _CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)


def _scalars(t: Telemetry, workers: int) -> dict[str, float]:
    """What TensorBoard and W&B plot over the updates."""
    scalars = {"loss": t.loss, "accuracy": t.accuracy, "test_loss": t.test_loss, "val_loss": t.val_loss, **t.metrics,
               "updates per second": t.updates_per_second, "delay/mean": t.delay_mean, "delay/p95": t.delay_p95,
               "delay/max": t.delay_max, "workers/alive": workers, "workers/refused gradients": t.refused}  # fmt: skip
    return {name: value for name, value in scalars.items() if value is not None}


class TensorBoard(Monitor):
    """Scalars and histograms of delays in a folder that ``tensorboard --logdir`` shows."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = folder / "tensorboard"
        events.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=events).close()  # where that fails, a thread of TensorBoard prints a traceback
        self._writer: Any = SummaryWriter(str(events))

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        for name, value in _scalars(telemetry, workers).items():
            self._writer.add_scalar(name, value, telemetry.version)
        if len(delays):
            self._writer.add_histogram("delay", delays, telemetry.version)

    def close(self) -> None:
        self._writer.close()


class WandB(Monitor):
    """The same as a run of Weights & Biases; a resumed run has the same id, so that ``wandb sync`` joins the parts."""

    def __init__(self, folder: Path) -> None:
        import wandb

        id_file = folder / "wandb-id"
        if not id_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            id_file.write_text(secrets.token_hex(4))
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb checks it
        self._run: Any = wandb.init(project=os.environ.get("WANDB_PROJECT", "lategrad"), name=folder.resolve().name,
                                    id=id_file.read_text(), resume="allow", dir=folder, mode=mode,
                                    settings=wandb.Settings(silent=True, console="off"))  # fmt: skip
        self._histogram = wandb.Histogram
        self._last = -1

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        if telemetry.version == self._last:  # W&B accepts one point for each step
            return
        self._last = telemetry.version
        histogram = {"delays": self._histogram(delays.tolist())} if len(delays) else {}
        self._run.log(_scalars(telemetry, workers) | histogram, step=telemetry.version)

    def close(self) -> None:
        self._run.finish()


LOGS: dict[str, Callable[[Path], Monitor]] = {"tensorboard": TensorBoard, "wandb": WandB}


def logs_of(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


class Monitors(AbstractContextManager["Monitors"]):
    """All monitors of a run, closed together."""

    def __init__(self, settings: "Settings") -> None:
        folder, log, progress = settings.folder, settings.log, settings.progress
        self._all: list[Monitor] = [] if folder is None else [LogFiles(folder)]
        for name in logs_of(log):
            if folder is None:
                raise ValueError(f"log={log!r} needs a folder to write to: give out=...")
            try:
                self._all.append(LOGS[name](folder))
            except ImportError as error:
                raise ValueError(f"log={name!r} needs another package: pip install 'lategrad[{name}]'") from error
        if progress or (progress is None and sys.stderr.isatty()):
            self._all.append(Terminal(settings.steps))
        elif progress is None:
            self._all.append(Lines())

    def show(self, telemetry: Telemetry, workers: int, delays: Tensor) -> None:
        for monitor in list(self._all):
            try:
                monitor.show(telemetry, workers, delays)
            except OSError as error:  # a full disk does not end a run
                self._all.remove(monitor)
                warnings.warn(f"{type(monitor).__name__} is switched off: {error}", stacklevel=2)

    def __exit__(self, *error: object) -> None:
        for monitor in self._all:
            with suppress(OSError):
                monitor.close()
