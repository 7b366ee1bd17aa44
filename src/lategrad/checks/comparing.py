"""What all checks are made of: random vectors, comparisons that say what differs, and plain transcriptions."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lategrad.support.runs import tensors

Reference = Callable[[list[float], list[list[float]]], Sequence[Sequence[float]]]
"""A plain transcription: from the start and the gradients to the points before each update and after all."""


def assert_true(condition: bool, message: str) -> None:
    """Raise an AssertionError unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def assert_close(got: Any, want: Any, message: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise unless all tensors of the two are of one kind, and equal up to the tolerances."""
    for g, w in zip(tensors(got), tensors(want), strict=True):
        same_kind = g.dtype == w.dtype and g.shape == w.shape
        assert_true(same_kind, f"{message}: {g.dtype} {tuple(g.shape)} against {w.dtype} {tuple(w.shape)}")
        if g.numel() and not torch.allclose(g, w, rtol=rtol, atol=atol, equal_nan=True):
            raise AssertionError(f"{message}: differs by up to {(g - w).abs().max().item():.3g}")


def gradients(steps: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal vectors: the same numbers in every dtype, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *shape, generator=generator, dtype=torch.float64).to(dtype)


def pickled_copy(part: Any, name: str) -> Any:
    """What a worker process would get."""
    try:
        return pickle.loads(pickle.dumps(part))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"{name}: cannot be pickled, as worker processes ask for: {error}; define its class at "
                             f"the top of a module, and keep no functions or locks in it") from None  # fmt: skip


def check_reference(points: list[Tensor], x0: Tensor, grads: Tensor, reference: Reference, message: str) -> None:
    """Raise unless the points are those of the transcription."""
    want = torch.tensor(reference(x0.tolist(), grads.tolist()), dtype=torch.float64)
    assert_close(torch.stack(points), want, message, 1e-10, 1e-10)
