"""Helpers of all checks: random vectors, comparisons with messages, and plain transcriptions."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lategrad.support.runs import tensors

Reference = Callable[[list[float], list[list[float]]], Sequence[Sequence[float]]]
"""A plain transcription: from the start and the gradients to the points before each update and after all."""


def assert_true(condition: bool | Tensor, message: str) -> None:
    if not (condition.all() if isinstance(condition, Tensor) else condition):
        raise AssertionError(message)


def assert_close(actual: Any, expected: Any, message: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require that all tensors have the same dtype and shape, and are equal up to the tolerances."""
    for a, e in zip(tensors(actual), tensors(expected), strict=True):
        same_kind = a.dtype == e.dtype and a.shape == e.shape
        assert_true(same_kind, f"{message}: {a.dtype} {tuple(a.shape)} against {e.dtype} {tuple(e.shape)}")
        if a.numel() and not torch.allclose(a, e, rtol=rtol, atol=atol, equal_nan=True):
            raise AssertionError(f"{message}: differs by up to {(a - e).abs().max().item():.3g}")


def gradients(steps: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal vectors: the same numbers in every dtype, but for rounding."""
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pickled_copy(part: Any, name: str) -> Any:
    try:
        return pickle.loads(pickle.dumps(part))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"{name}: cannot be pickled, which worker processes require: {error}; define its class at "
                             f"the top of a module, without functions or locks in its fields") from None  # fmt: skip


def check_reference(points: list[Tensor], x0: Tensor, grads: Tensor, reference: Reference, message: str) -> None:
    expected = torch.tensor(reference(x0.tolist(), grads.tolist()), dtype=torch.float64)
    assert_close(torch.stack(points), expected, message, 1e-10, 1e-10)
