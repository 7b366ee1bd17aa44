"""The trace of a pipeline, gathered from its stages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.serve.checkpoints.identity import identify
from lategrad.trace import Trace


class StageRecord(NamedTuple):
    """What one stage knows of a run."""

    query: Tensor
    output: Tensor  # vectors of the stage's parameters
    delay: int  # of the stage, after the start
    tensors: int  # parameters of the stage
    delays: list[int]  # of its updates
    losses: list[float]  # of the microbatches, at the last stage
    optimizer: str


def trace_of(stages: Sequence[StageRecord], options: dict[str, Any], problem: Any, seed: int) -> Trace:
    updates = len(stages[0].delays)
    losses = torch.tensor(stages[-1].losses, dtype=torch.float64).view(updates, -1).mean(1)
    config = {"pipeline": {**options, "delays": [stage.delay for stage in stages for _ in range(stage.tensors)]},
              "rule": [stage.optimizer for stage in stages], "seeds": [seed], "steps": updates,
              "torch": torch.__version__,
              **({"problem": "not given"} if problem is None else identify(problem))}  # fmt: skip
    return Trace(steps=torch.arange(1, updates + 1), loss=losses, accuracy=None,
                 delays=torch.tensor(stages[0].delays, dtype=torch.int32),
                 output=torch.cat([stage.output for stage in stages]),
                 query=torch.cat([stage.query for stage in stages]), config=config)  # fmt: skip
