"""The validated options of a run, as they are saved with its checkpoints."""

import copy
import json
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lategrad.delays import Distribution
from lategrad.delays.specs import parse
from lategrad.gates import require_norm_options
from lategrad.rules.scheduled import Share, complete_schedule
from lategrad.serve.compression import COMPRESSIONS
from lategrad.serve.observe.monitor import LOGS, logs_of
from lategrad.serve.observe.records import OnRecord
from lategrad.serve.worker import Slowness, Streams
from lategrad.support.validation import Positive, Validated, require, require_choice, require_device

ENGINES = ("processes", "threads", "ray")
MAX_WORKERS = 1000  # a larger number is almost certainly a typo
_MAX_PREFETCH = 100
_MAX_THREADS = 1024
_OPTIONAL_COUNTS = {"record_every": 1, "checkpoint_every": 1, "max_refusals": 1, "patience": 1, "data_shards": 1,
                    "threads": 1, "max_delay": 0}  # fmt: skip
_NOT_SAVED = ("out", "progress", "on_record")  # options of a call, not of the run
FUNCTION = "function "  # marks a saved schedule that is a function, of which only the name can be saved
Slow = str | dict[int, str] | None


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """All options of a run, validated; :func:`lategrad.train` documents each of them.

    >>> Settings(steps=100, workers="2:8", engine="ray").worker_range()
    (2, 8)
    """

    steps: int
    workers: int | str = 4
    engine: str = "processes"
    address: str | None = None
    seed: int = 0
    data_shards: int | None = None
    device: str = "cpu"
    server_device: str = "cpu"
    num_gpus: float | None = None
    slow: Slow = None
    threads: int | None = None
    prefetch: int = 0
    compression: str = "none"
    deadline: Positive[float] = 300.0
    max_refusals: int | None = 10
    max_delay: int | None = None
    schedule: str | Share | None = None
    clip: float | None = None
    max_norm_ratio: float | None = None
    stall: Positive[float] | None = 3600.0
    record_every: int | None = None
    drift: bool = False
    compile: bool | None = None
    out: str | Path | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    monitor: str | None = None
    patience: int | None = None
    on_record: OnRecord | None = None
    log: str | None = None
    progress: bool | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device", str(self.device))  # a torch.device is accepted too
        object.__setattr__(self, "server_device", str(self.server_device))
        for name, low in {"steps": 1, "keep": 1, "seed": 0, **_OPTIONAL_COUNTS}.items():
            value, optional = getattr(self, name), name in _OPTIONAL_COUNTS
            is_valid = (type(value) is int and value >= low) or (value is None and optional)
            require(name, value, is_valid, f"an integer >= {low}{', or None' if optional else ''}")
        require("threads", self.threads, (self.threads or 1) <= _MAX_THREADS, f"<= {_MAX_THREADS}")
        kinds = {"address": str, "monitor": str, "log": str, "compile": bool, "progress": bool}
        for name, kind in kinds.items():
            value = getattr(self, name)
            require(name, value, value is None or isinstance(value, kind), f"of type {kind.__name__}, or None")
        require_choice("engine", self.engine, ENGINES)
        require_choice("compression", self.compression, COMPRESSIONS)
        low, high = self.worker_range()
        on_ray = self.engine == "ray"
        require("workers", self.workers, on_ray or low == high, "a number: only engine='ray' takes a range")
        require("address", self.address, on_ray or self.address is None, "None, unless engine='ray'")
        if self.data_shards is not None and self.data_shards > high:
            warnings.warn(f"data_shards={self.data_shards} is more than the {high} workers: no worker draws from "
                          "some of the rows", stacklevel=3)  # fmt: skip
        most, valid = (0, "0 with engine='ray'") if on_ray else (_MAX_PREFETCH, f"in 0..{_MAX_PREFETCH}")
        require("prefetch", self.prefetch, type(self.prefetch) is int and 0 <= self.prefetch <= most, valid)
        require("server_device", self.server_device, not on_ray or self.server_device == "cpu",
                "'cpu' with engine='ray'")  # fmt: skip
        require_device("server_device", self.server_device)
        if not on_ray:  # the driver need not have the GPUs of its workers
            require_device("device", self.device)
        gpus = self.num_gpus
        require("num_gpus", gpus, gpus is None or on_ray, "None, unless engine='ray'")
        whole_or_share = gpus is None or 0 <= gpus < 1 or float(gpus).is_integer()
        require("num_gpus", gpus, whole_or_share and (gpus or 0) >= 0, "a share of one GPU such as 0.25, or an integer")
        require("monitor", self.monitor, self.monitor is not None or self.patience is None,
                "given with patience: the recorded value to improve")  # fmt: skip
        require("on_record", self.on_record, self.on_record is None or callable(self.on_record),
                "a function of telemetry and output")  # fmt: skip
        require("out", self.out, self.out != "", "None or a folder: '.' is the current one")
        require_norm_options(self.clip, self.max_norm_ratio)
        if isinstance(self.schedule, str):
            is_name = not self.schedule.startswith(FUNCTION)
            require("schedule", self.schedule, is_name, "passed again, as the function that it was")
            completed = complete_schedule(self.schedule, self.steps)  # resuming with more steps leaves it as it is
            object.__setattr__(self, "schedule", completed)
        for log in logs_of(self.log):
            require_choice("log", log, tuple(LOGS))
        try:
            json.dumps(self.notes)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"notes must be plain JSON values: {error}") from None
        self.slowness()
        unused = [worker for worker in self.slow if int(worker) >= high] if isinstance(self.slow, dict) else []
        if unused:
            warnings.warn(f"slow names worker {unused[0]}, but {self.workers} workers start, numbered from 0: it has "
                          "no effect unless more workers join", stacklevel=3)  # fmt: skip

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else Path(self.out)

    def worker_range(self) -> tuple[int, int]:
        """The smallest and the largest number of workers: ``"2:8"`` is (2, 8) and 4 is (4, 4)."""
        parts = str(self.workers).split(":")
        low_high = [int(part) for part in parts if part.isdecimal()]
        is_range = len(low_high) == len(parts) <= 2 and 1 <= low_high[0] <= low_high[-1] <= MAX_WORKERS
        valid = f"an integer >= 1 and <= {MAX_WORKERS}, or a range such as '2:8'"
        require("workers", self.workers, is_range and not isinstance(self.workers, bool), valid)
        return low_high[0], low_high[-1]

    @property
    def gpus_per_worker(self) -> float:
        """What a worker asks Ray for: by default a whole GPU, if it computes on one."""
        return float(self.device.startswith("cuda")) if self.num_gpus is None else self.num_gpus

    @property
    def streams(self) -> Streams:
        return Streams(self.seed, self.data_shards)

    def slowness(self) -> Slowness:
        slow = self.slow if isinstance(self.slow, dict) else {} if self.slow is None else {None: self.slow}
        return {None if worker is None else int(worker): _distribution(spec) for worker, spec in slow.items()}

    def saved(self) -> dict[str, Any]:
        saved = {one.name: copy.deepcopy(getattr(self, one.name)) for one in fields(self) if one.name not in _NOT_SAVED}
        if callable(self.schedule):
            saved["schedule"] = f"{FUNCTION}{getattr(self.schedule, '__qualname__', type(self.schedule).__qualname__)}"
        return saved


def _distribution(spec: str) -> Distribution:
    model = parse(spec) if isinstance(spec, str) else None
    if not isinstance(model, Distribution):
        raise ValueError(f"slow must be a distribution such as constant:100 or lognormal:3,1, got {spec!r}")
    return model
