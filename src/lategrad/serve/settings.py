"""What a run is told, and keeps for the day it is resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lategrad.delays import Law
from lategrad.delays.specs import parse
from lategrad.serve.monitor import LOGS
from lategrad.serve.worker import Slowness
from lategrad.support.validation import require, require_choice, require_device, require_number

ENGINES = ("processes", "threads", "ray")
_MOST_AHEAD = 100

Slow = str | dict[int, str] | None


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`~lategrad.train` that a run is resumed with."""

    steps: int
    workers: int | str = 4
    engine: str = "processes"
    seed: int = 0
    device: str = "cpu"
    slow: Slow = None
    threads: int = 1
    deadline: float = 300.0
    max_refusals: int | None = 10
    record_every: int | None = None
    compile: bool | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    log: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    address: str | None = None
    shards: int = 1
    ahead: int = 0
    max_delay: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("threads", self.threads), ("shards", self.shards)):
            require(name, count, isinstance(count, int) and count >= 1, "an integer >= 1")
        require_choice("engine", self.engine, ENGINES)
        low, high = self.worker_range()
        on_ray = self.engine == "ray"
        require("workers", self.workers, on_ray or low == high, "a number: only engine='ray' takes a range")
        require("address", self.address, on_ray or self.address is None, "None, unless engine='ray'")
        require("shards", self.shards, on_ray or self.shards == 1, "1, unless engine='ray'")
        valid_ahead = isinstance(self.ahead, int) and 0 <= self.ahead <= (0 if on_ray else _MOST_AHEAD)
        require("ahead", self.ahead, valid_ahead, "0 with engine='ray'" if on_ray else f"in 0..{_MOST_AHEAD}")
        valid_delay = self.max_delay is None or (isinstance(self.max_delay, int) and self.max_delay >= 0)
        require("max_delay", self.max_delay, valid_delay, "an integer >= 0, or None")
        require("seed", self.seed, isinstance(self.seed, int) and self.seed >= 0, "an integer >= 0")
        if not on_ray:  # the driver need not have the GPUs of its workers
            require_device("device", self.device)
        require_number("deadline", self.deadline, low=0, strict=True)
        if self.log is not None:
            require_choice("log", self.log, LOGS)
        try:
            json.dumps(self.notes)
        except TypeError as error:
            raise ValueError(f"notes must be plain JSON values: {error}") from None
        self.slowness()

    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers: ``"2:8"`` is (2, 8) and 4 is (4, 4)."""
        parts = str(self.workers).split(":")
        low_high = [int(part) for part in parts if part.isdecimal()]
        is_range = len(low_high) == len(parts) <= 2 and 1 <= low_high[0] <= low_high[-1]
        valid = "an integer >= 1, or a range such as '2:8'"
        require("workers", self.workers, is_range and not isinstance(self.workers, bool), valid)
        return low_high[0], low_high[-1]

    def slowness(self) -> Slowness:
        """The pauses that ``slow`` describes."""
        if self.slow is None or isinstance(self.slow, str):
            return Slowness(None if self.slow is None else _law(self.slow))
        return Slowness(None, tuple((int(worker), _law(spec)) for worker, spec in self.slow.items()))


def _law(spec: str) -> Law:
    model = parse(spec)
    if not isinstance(model, Law):
        raise ValueError(f"slow must be a law of single pauses such as constant:100 or lognormal:3,1, got {spec!r}")
    return model
