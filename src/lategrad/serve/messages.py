"""What goes to a worker, and what may come back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Job(NamedTuple):
    """What a worker is to do: the gradient at ``query`` on sample ``sequence`` of its stream."""

    worker: int
    sequence: int
    version: int
    query: Tensor


class Made(NamedTuple):
    """How the gradient of a job was made, by a worker that keeps something from job to job."""

    steps: int = 0
    """Steps of its own that the worker took; 0 for a plain gradient."""
    previous: int = -1
    """The job that what the worker kept is from; -1 if it had nothing yet, or keeps nothing."""


PLAIN = Made()
"""By a worker that keeps nothing."""


class Answer(NamedTuple):
    """What a worker sends back for a job."""

    message: Tensor
    """The gradient, as it travels."""
    made: Made


def malformed(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with the form of a gradient, if anything."""
    if grad.shape != (dim,):
        return f"shape {tuple(grad.shape)} instead of ({dim},)"
    if grad.dtype != dtype:
        return f"dtype {grad.dtype} instead of {dtype}"
    return None


def unusable(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with a gradient, if anything: its form, or what is in it."""
    return malformed(grad, dim, dtype) or (None if is_finite(grad) else "not finite")


def is_finite(grad: Tensor) -> bool:
    """Whether all entries are."""
    # A sum is one pass without memory of its own; it can overflow where the entries do not, so ask again then.
    return math.isfinite(grad.sum().item()) or bool(torch.isfinite(grad).all())
