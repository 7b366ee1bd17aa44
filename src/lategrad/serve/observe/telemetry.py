"""The numbers that monitors show of a run."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

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
    record: int  # the number of updates before the last record
    test_loss: float | None
    metrics: dict[str, float]  # the problem's own metrics at the last record
    bytes_up: int = 0  # of all vectors received from workers, as they were sent
    bytes_down: int = 0  # of all vectors sent to workers
    memories_lost: int = 0  # how often a restarted worker had lost its local state
    val_loss: float | None = None
    threads: int = 1  # of torch, in the server


def measure(log: UpdateLog, records: Records, *, steps: int, seconds: float, refused: int, traffic: Mapping[str, int],
            memories_lost: int, threads: int) -> Telemetry:  # fmt: skip
    times, last = log.column("time", _RECENT), records.last()
    elapsed = seconds - float(times[0]) if len(times) else 0.0
    delays = log.column("delay", _RECENT).double().sort().values if len(times) else torch.zeros(1)
    return Telemetry(version=len(log), steps=steps, seconds=seconds, delay_mean=float(delays.mean()),
                     delay_p95=float(delays[math.ceil(0.95 * len(delays)) - 1]), delay_max=int(delays[-1]),
                     updates_per_second=len(times) / elapsed if elapsed > 0 else 0.0, loss=last.pop("loss"),
                     accuracy=last.pop("accuracy", None), test_loss=last.pop("test_loss", None), threads=threads,
                     val_loss=last.pop("val_loss", None), metrics=last, record=records.steps[-1], refused=refused,
                     bytes_up=traffic["up"], bytes_down=traffic["down"], memories_lost=memories_lost)  # fmt: skip
