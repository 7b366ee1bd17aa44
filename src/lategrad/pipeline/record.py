"""The trace of a pipeline, gathered from its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lategrad.serve.checkpoints.identity import identify
from lategrad.support.torch_private import gather
from lategrad.trace import Trace


class StageRecord(NamedTuple):
    """What one stage knows of a run."""

    query: Tensor
    output: Tensor
    """Vectors of the stage's parameters."""
    delay: int
    """Of the stage, after the start."""
    tensors: int
    """Parameters of the stage."""
    delays: list[int]
    """Of its updates."""
    losses: list[float]
    """Of the microbatches, at the last stage."""
    optimizer: str


def vector(params: Sequence[Tensor]) -> Tensor:
    """A copy of parameters as one vector, on the CPU."""
    return gather([p.detach() for p in params]).cpu().clone()


def gather_trace(record: StageRecord, options: dict[str, Any], problem: Any, seed: int) -> Trace | None:
    """The trace of all stages, on the first rank; the others send what they know."""
    records: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(record, records)
    if records is None:
        return None
    stages = cast(list[StageRecord], records)
    updates = len(record.delays)
    losses = torch.tensor(stages[-1].losses, dtype=torch.float64).view(updates, -1).mean(1)
    config = {
        "pipeline": {**options, "delays": [stage.delay for stage in stages for _ in range(stage.tensors)]},
        "rule": [stage.optimizer for stage in stages],
        "seeds": [seed],
        "steps": updates,
        "torch": torch.__version__,
        **({"problem": "not given"} if problem is None else identify(problem)),
    }
    return Trace(
        steps=torch.arange(1, updates + 1), loss=losses, accuracy=None,
        delays=torch.tensor(record.delays, dtype=torch.int32), output=torch.cat([stage.output for stage in stages]),
        query=torch.cat([stage.query for stage in stages]), config=config,
    )  # fmt: skip
