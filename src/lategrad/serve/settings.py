"""Every option of a run, with its documentation: :func:`~lategrad.train` and ``lategrad train`` are made from it."""

from __future__ import annotations

import copy
import json
import textwrap
import warnings
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from lategrad.delays import Distribution
from lategrad.delays.specs import parse
from lategrad.gates import require_norm_options
from lategrad.rules.scheduled import Share, complete_schedule
from lategrad.serve.compression import COMPRESSIONS
from lategrad.serve.observe.monitor import LOGS, logs_of
from lategrad.serve.observe.watch import OnRecord
from lategrad.serve.worker import Slowness, Streams
from lategrad.support.validation import require, require_choice, require_device, require_number

ENGINES = ("processes", "threads", "ray")
_MAX_PREFETCH = 100
MOST_WORKERS = 1000
"""A number beyond is a slip of the pen."""
_NOT_SAVED = ("out", "progress", "on_record")
"""Options of a call, not of the run: a run that is resumed elsewhere has others."""

KEPT = ("seed", "data_shards", "compression", "out")
"""Options that stay as they were when a run is resumed: samples and gradients follow from them, or they say which run
it is."""

FUNCTION = "function "
"""Before the name of a function, in what is saved of a schedule that is one."""

Slow = str | dict[int, str] | None


def _option(help: str, default: Any = MISSING, *, command_line: Any = None) -> Any:
    """A field with its documentation; ``command_line`` is its type there, where that is another."""
    metadata = {"help": help, "command_line": command_line}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is told; saved with its checkpoints, for the day it is resumed.

    >>> Settings(steps=100, workers="2:8", engine="ray").worker_range()
    (2, 8)
    """

    steps: int = _option("updates to make in all.")
    workers: int | str = _option(
        "how many; can be changed while it runs (Training.set_workers, or a number in the file OUT/workers). "
        "On Ray also 2:8: between 2 and 8, as many as the cluster has CPUs for.", 4, command_line=str,
    )  # fmt: skip
    engine: str = _option(
        "how workers run: processes; threads, for notebooks and problems that cannot be pickled; or ray, for workers "
        "on other machines (pip install 'lategrad[ray]').", "processes",
    )  # fmt: skip
    address: str | None = _option(
        "of a running Ray cluster, such as auto or ray://host:10001; by default a Ray is started on this machine, "
        "for this run.", None,
    )  # fmt: skip
    seed: int = _option("of the workers' streams of samples; each worker has its own.", 0)
    data_shards: int | None = _option(
        "cut the rows of the data into so many parts; worker w draws from part w modulo so many alone. By default each "
        "worker draws from all rows, so that none are missed while a worker is away.", None,
    )  # fmt: skip
    device: str = _option("where gradients are computed: cpu or cuda.", "cpu")
    server_device: str = _option(
        "where the server keeps its state and makes its updates: cpu or cuda. Vectors are copied where it is not the "
        "workers' own. Not on Ray.", "cpu",
    )  # fmt: skip
    slow: Slow = _option(
        "make workers late on purpose: the law, such as lognormal:3,1, of the milliseconds by which each gradient is "
        "held back, or one for each of some workers, {0: 'constant:100'} (on the command line 0=constant:100).",
        None, command_line=list[str],
    )  # fmt: skip
    threads: int = _option("of torch in the server; each worker process has one.", 1)
    prefetch: int = _option(
        "jobs that a worker holds beside the one it is at, so that it need not wait for the server: faster where "
        "gradients take less than a few milliseconds, at the price of longer delays (each worker counts 1 + prefetch "
        "times). Not on Ray.", 0,
    )  # fmt: skip
    compression: str = _option(
        "how gradients travel: none, as they are; or, for slow networks, bfloat16 or int8, half and a quarter of "
        "float32, where what rounding leaves out stays with the worker and goes with its next gradient. Queries travel "
        "as they are.", "none",
    )  # fmt: skip
    deadline: float = _option(
        "seconds after which a worker that still has not returned its gradient is taken for hung and replaced. "
        "Slow is not hung: late work is used.", 300.0,
    )  # fmt: skip
    max_refusals: int | None = _option(
        "gradients in a row that must be refused (not finite, wrong shape, ...) for a worker to be dropped; None for "
        "never.", 10,
    )  # fmt: skip
    max_delay: int | None = _option(
        "gradients that are later than so many updates are dropped; their workers go on from the present query. A "
        "warning names workers with a tenth of their fair share or less, trace.config['too_late'] says how many were "
        "dropped of each. By default all are applied, which our rules are made for.", None,
    )  # fmt: skip
    schedule: str | Share | None = _option(
        "how the rule's step (its lr, or its learner's) goes over the server's updates: constant, linear or cosine, "
        "and options such as cosine:warmup=100,floor=0.1 (and total=, where it ends before the last update); in Python "
        "also a function from t, a tensor, to the share of the step.", None, command_line=str,
    )  # fmt: skip
    clip: float | None = _option(
        "gradients that are longer than this are shortened to this norm; by default none is.", None,
    )  # fmt: skip
    max_norm_ratio: float | None = _option(
        "gradients whose norm is more than so many times the median of the last hundred are refused, such as 100; the "
        "first twenty only tell how long gradients are, and are not applied. By default none is refused.", None,
    )  # fmt: skip
    stall: float | None = _option(
        "seconds without an update (and never less than two deadlines) after which the run ends with the reason and a "
        "checkpoint, instead of replacing workers for ever; None for never. Waiting for the CPUs of a cluster does not "
        "count.", 3600.0,
    )  # fmt: skip
    record_every: int | None = _option("updates between two records of loss and accuracy; by default ten records.",
                                       None)  # fmt: skip
    compile: bool | None = _option("the rule's update as compiled code; by default for long runs.", None)
    out: str | Path | None = _option(
        "folder for checkpoints, the log of updates and the trace; by default everything is kept in memory.", None,
        command_line=Path,
    )  # fmt: skip
    checkpoint_every: int | None = _option(
        "updates between two checkpoints; by default one a minute. One is always made at the start and at the end, "
        "and on Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 (which does not end the run).", None,
    )  # fmt: skip
    keep: int = _option("checkpoints to keep.", 2)
    monitor: str | None = _option(
        "what says which record is best: loss, test_loss, accuracy or a metric's name, with + before it where more is "
        "better (of accuracy that is known). The best output so far is kept in OUT/best.safetensors.", None,
    )  # fmt: skip
    patience: int | None = _option("records without a better one after which the run ends early; needs monitor.",
                                   None)  # fmt: skip
    on_record: OnRecord | None = _option(
        "called for every record with the telemetry and a copy of the output that was recorded (after telemetry.record "
        "updates; more may have been made since); the run ends if it returns 'stop'. In Python only.", None,
    )  # fmt: skip
    log: str | None = _option(
        "tensorboard writes scalars and histograms of delays to OUT/tensorboard; wandb makes a run of Weights & Biases "
        "in OUT/wandb, offline unless WANDB_MODE says otherwise (`wandb sync` uploads it); tensorboard,wandb for both.",
        None,
    )  # fmt: skip
    progress: bool | None = _option(
        "show a progress bar; by default on a terminal, and a line every half a minute where there is none.", None,
    )  # fmt: skip
    notes: dict[str, Any] = _option("what else the trace and the checkpoints should say about the run; JSON values.",
                                    {})  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", str(self.device))  # a torch.device is welcome
        object.__setattr__(self, "server_device", str(self.server_device))
        for name in ("steps", "keep", "threads"):
            value = getattr(self, name)
            require(name, value, _is_count(value), "an integer >= 1")
        for name in ("record_every", "checkpoint_every", "max_refusals", "patience", "data_shards"):
            value = getattr(self, name)
            require(name, value, value is None or _is_count(value), "an integer >= 1, or None")
        require_choice("engine", self.engine, ENGINES)
        require_choice("compression", self.compression, COMPRESSIONS)
        low, high = self.worker_range()
        on_ray = self.engine == "ray"
        require("workers", self.workers, on_ray or low == high, "a number: only engine='ray' takes a range")
        require("address", self.address, on_ray or self.address is None, "None, unless engine='ray'")
        if self.data_shards is not None and self.data_shards > high:
            more = f"data_shards={self.data_shards} is more than the {high} workers"
            warnings.warn(f"{more}: some rows are drawn by nobody", stacklevel=3)
        valid_prefetch = isinstance(self.prefetch, int) and 0 <= self.prefetch <= (0 if on_ray else _MAX_PREFETCH)
        require(
            "prefetch", self.prefetch, valid_prefetch, "0 with engine='ray'" if on_ray else f"in 0..{_MAX_PREFETCH}"
        )
        valid_delay = self.max_delay is None or (isinstance(self.max_delay, int) and self.max_delay >= 0)
        require("max_delay", self.max_delay, valid_delay, "an integer >= 0, or None")
        require("seed", self.seed, isinstance(self.seed, int) and self.seed >= 0, "an integer >= 0")
        require("server_device", self.server_device, not on_ray or self.server_device == "cpu",
                "'cpu' with engine='ray'")  # fmt: skip
        require_device("server_device", self.server_device)
        if not on_ray:  # the driver need not have the GPUs of its workers
            require_device("device", self.device)
        require("monitor", self.monitor, self.monitor is not None or self.patience is None,
                "given with patience: what is to get better")  # fmt: skip
        called = self.on_record is None or callable(self.on_record)
        require("on_record", self.on_record, called, "a function of telemetry and output")
        require_number("deadline", self.deadline, low=0, strict=True)
        require_norm_options(self.clip, self.max_norm_ratio)
        if self.stall is not None:
            require_number("stall", self.stall, low=0, strict=True)
        if isinstance(self.schedule, str):  # a run that goes on longer keeps its schedule
            known = not self.schedule.startswith(FUNCTION)
            require("schedule", self.schedule, known, "given again, as the function that it was")
            object.__setattr__(self, "schedule", complete_schedule(self.schedule, self.steps))
        for log in logs_of(self.log):
            require_choice("log", log, tuple(LOGS))
        try:
            json.dumps(self.notes)
        except TypeError as error:
            raise ValueError(f"notes must be plain JSON values: {error}") from None
        self.slowness()
        unused = [worker for worker in self.slow if int(worker) >= high] if isinstance(self.slow, dict) else []
        if unused:
            warnings.warn(f"slow for worker {unused[0]} is of no use unless workers join: {self.workers} start, "
                          "numbered from 0", stacklevel=3)  # fmt: skip

    @property
    def folder(self) -> Path | None:
        """``out`` as a path."""
        return None if self.out is None else Path(self.out)

    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers: ``"2:8"`` is (2, 8) and 4 is (4, 4)."""
        parts = str(self.workers).split(":")
        low_high = [int(part) for part in parts if part.isdecimal()]
        is_range = len(low_high) == len(parts) <= 2 and 1 <= low_high[0] <= low_high[-1] <= MOST_WORKERS
        valid = f"an integer >= 1 and <= {MOST_WORKERS}, or a range such as '2:8'"
        require("workers", self.workers, is_range and not isinstance(self.workers, bool), valid)
        return low_high[0], low_high[-1]

    @property
    def is_watched(self) -> bool:
        """Whether something is done at every record."""
        return (self.on_record, self.monitor) != (None, None)

    @property
    def streams(self) -> Streams:
        """What samples each worker draws."""
        return Streams(self.seed, self.data_shards)

    def slowness(self) -> Slowness:
        """The pauses that ``slow`` describes."""
        if self.slow is None or isinstance(self.slow, str):
            return Slowness(None if self.slow is None else _law(self.slow))
        return Slowness(None, tuple((int(worker), _law(spec)) for worker, spec in self.slow.items()))

    def saved(self) -> dict[str, Any]:
        """What a checkpoint and a trace say of them."""
        saved = {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self) if one.name not in _NOT_SAVED}
        if callable(self.schedule):
            saved["schedule"] = f"{FUNCTION}{getattr(self.schedule, '__qualname__', type(self.schedule).__qualname__)}"
        return saved


def options() -> list[Field[Any]]:
    """All options, in the order in which they are documented."""
    return list(fields(Settings))


def documentation(indent: str) -> str:
    """The ``Args`` of a docstring, one paragraph for each option."""
    paragraphs = (textwrap.fill(f"{option.name}: {option.metadata['help']}", 110, initial_indent=indent,
                                subsequent_indent=indent + "    ") for option in options())  # fmt: skip
    return "\n".join(paragraphs)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _law(spec: str) -> Distribution:
    model = parse(spec)
    if not isinstance(model, Distribution):
        raise ValueError(f"slow must be a law of single pauses such as constant:100 or lognormal:3,1, got {spec!r}")
    return model
