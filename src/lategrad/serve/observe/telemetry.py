"""The numbers that monitors show of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from lategrad.serve.observe.records import Records
from lategrad.serve.observe.update_log import UpdateLog

_RECENT = 1000  # updates over which delays and rate are measured


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
    record: int
    """The number of updates before the last record."""
    test_loss: float | None
    metrics: dict[str, float]
    """The problem's own metrics at the last record."""
    bytes_up: int = 0
    """Bytes of all vectors received from workers, as they were sent."""
    bytes_down: int = 0
    """Bytes of all vectors sent to workers."""
    memories_lost: int = 0
    """How often a restarted worker had lost its local state."""
    val_loss: float | None = None


def measure(log: UpdateLog, records: Records, *, steps: int, seconds: float, refused: int, traffic: Mapping[str, int],
            memories_lost: int) -> Telemetry:  # fmt: skip
    delays, times = log.column("delay", _RECENT).double(), log.column("time", _RECENT)
    elapsed = seconds - float(times[0]) if len(times) else 0.0
    ordered = delays.sort().values
    last = records.last()
    return Telemetry(version=len(log), steps=steps, seconds=seconds,
                     updates_per_second=len(times) / elapsed if elapsed > 0 else 0.0, loss=last.pop("loss"),
                     accuracy=last.pop("accuracy", None), test_loss=last.pop("test_loss", None),
                     val_loss=last.pop("val_loss", None), metrics=last,
                     delay_mean=float(delays.mean()) if len(delays) else 0.0,
                     delay_p95=float(ordered[math.ceil(0.95 * len(ordered)) - 1]) if len(delays) else 0.0,
                     delay_max=int(ordered[-1]) if len(delays) else 0, refused=refused, record=records.steps[-1],
                     bytes_up=traffic["up"], bytes_down=traffic["down"], memories_lost=memories_lost)  # fmt: skip
