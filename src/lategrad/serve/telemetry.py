"""How a run is doing: the few numbers that monitors show."""

from __future__ import annotations

import math
from typing import NamedTuple

from lategrad.serve.records import Records
from lategrad.serve.update_log import UpdateLog

_RECENT = 1000  # updates that the reported delays and rates are taken over


class Telemetry(NamedTuple):
    """Rates and delays of the last thousand updates, the last record, and counts."""

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


def measure(log: UpdateLog, records: Records, *, steps: int, seconds: float, refused: int) -> Telemetry:
    """Of a run that has been going on for so many seconds."""
    delays, times = log.column("delay", _RECENT).double(), log.column("time", _RECENT)
    spent = seconds - float(times[0]) if len(times) else 0.0
    ordered = delays.sort().values
    return Telemetry(
        version=len(log),
        steps=steps,
        seconds=seconds,
        updates_per_second=len(times) / spent if spent > 0 else 0.0,
        loss=records.loss[-1],
        accuracy=records.accuracy[-1] if records.accuracy else None,
        delay_mean=float(delays.mean()) if len(delays) else 0.0,
        delay_p95=float(ordered[math.ceil(0.95 * len(ordered)) - 1]) if len(delays) else 0.0,
        delay_max=int(ordered[-1]) if len(delays) else 0,
        refused=refused,
    )
