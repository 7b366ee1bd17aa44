"""What a server sends to a worker, and what comes back."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Job(NamedTuple):
    """A worker is to compute the gradient at ``query`` on sample ``sequence`` of its stream."""

    worker: int
    sequence: int
    version: int
    query: Tensor


class JobInfo(NamedTuple):
    """How a worker with a state of its own computed the result of a job."""

    local_steps: int = 0  # 0 for a plain gradient
    parent_job: int = -1  # which left the worker's state; -1 if the worker has just started, or has no state


STATELESS = JobInfo()


class Answer(NamedTuple):
    """What a worker sends back for a job; the message is the gradient, as it travels."""

    message: Tensor
    info: JobInfo


def malformed(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with the shape or dtype of a gradient, if anything."""
    if grad.shape != (dim,):
        return f"shape {tuple(grad.shape)} instead of ({dim},)"
    if grad.dtype != dtype:
        return f"dtype {grad.dtype} instead of {dtype}"
    return None


def unusable(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with a gradient, if anything: its shape, its dtype, or an entry that is not finite."""
    return malformed(grad, dim, dtype) or (None if is_finite(grad) else "not finite")


def is_finite(grad: Tensor) -> bool:
    # A sum is one pass without memory of its own; it can overflow where no entry does, hence the second look.
    return math.isfinite(grad.sum().item()) or bool(torch.isfinite(grad).all())
