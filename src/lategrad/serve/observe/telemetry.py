"""The numbers that monitors show of a run."""

from typing import NamedTuple


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
