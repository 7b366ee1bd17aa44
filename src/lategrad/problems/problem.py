r"""The contract of a problem: an objective with a stochastic gradient oracle.

The objective is :math:`f(x) = E_z[f(x; z)]`. A *sample* z is whatever the oracle draws for one gradient: the
rows of a minibatch, or a noise vector. Samples are drawn apart from the gradient, by
``samples(seed, first, count)``, a pure function: the k-th sample of a stream is the same however the stream
is cut, on any device. So the simulator, a worker process and a replay can all agree on them.

A problem may have more: ``test_loss(x)``, the loss on held-out data, which is recorded; ``measure(x)``, all that is
recorded in one call; ``samples_of_shard(seed, first, count, shard, shards)``, samples from a part of the data, for
workers that do not share it; ``blocks``, where each tensor of a model lies in the vector, for the rules that look at
shapes; and ``on_device``, False if a gradient needs more than its device (data that is fetched), so that a GPU cannot
repeat it by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Problem")


@runtime_checkable
class Problem(Protocol):
    """A stochastic objective over vectors of length ``dim``, for many runs at once."""

    @property
    def dim(self) -> int:
        """Length of the parameter vector."""
        ...

    def start(self) -> Tensor:
        """The usual first point, shape ``(dim,)``; its dtype and device are the problem's."""
        ...

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Samples number ``first, ..., first + count - 1`` (from 0) of a stream; on the CPU."""
        ...

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of the rows in samples, ``(count, batch)``; None where there are no classes."""
        ...

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """Stochastic gradients at ``x`` of shape ``(*streams, *runs, dim)``.

        ``sample`` has shape ``(*streams, ...)``: runs that share a stream share the sample.
        """
        ...

    def loss(self, x: Tensor) -> Tensor:
        """The objective f itself (all the training data), float64, shape ``(*runs, 1)``."""
        ...

    def accuracy(self, x: Tensor) -> Tensor | None:
        """Share of the test data classified correctly, float64 ``(*runs, 1)``; None where meaningless."""
        ...

    @property
    def smoothness(self) -> float | None:
        """The paper's L: a Lipschitz constant of the gradient, where it is known."""
        ...

    @property
    def strong_convexity(self) -> float | None:
        """The paper's H where it is known; 0 for a convex objective that is not strongly convex."""
        ...

    def to(self: Self, device: torch.device | str) -> Self:
        """The same problem with its data on a device."""
        ...


class Measures(NamedTuple):
    """What is recorded of a point: float64 tensors of shape ``(*runs, 1)``."""

    loss: Tensor
    accuracy: Tensor | None = None
    test_loss: Tensor | None = None
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """The user's own, by name."""


def measure(problem: Problem, x: Tensor) -> Measures:
    """All that is recorded of a problem at points ``(*runs, dim)``.

    >>> from lategrad.problems import Quadratic
    >>> measure(Quadratic(dim=4, smoothness=2.0, strong_convexity=1.0), torch.zeros(4)).loss.item()
    0.75
    """
    if hasattr(problem, "measure"):
        measured: Measures = problem.measure(x)
        return measured
    test_loss = problem.test_loss(x) if hasattr(problem, "test_loss") else None
    return Measures(problem.loss(x), problem.accuracy(x), test_loss)


_MEMBERS = ("dim", "start", "samples", "gradient", "loss", "accuracy")


def as_problem(problem: Any) -> Problem:
    """The problem itself; what is none gets a sentence that says what to do."""
    remedy = "lategrad.problems.ModuleProblem(module, data) makes a problem of a module"
    if isinstance(problem, type):
        raise ValueError(f"problem must be a problem, got the class {problem.__name__}: call it, "
                         f"{problem.__name__}(...)")  # fmt: skip
    if isinstance(problem, torch.utils.data.DataLoader | torch.utils.data.Dataset | torch.nn.Module):
        raise ValueError(f"problem must be a problem, got a {type(problem).__name__}: {remedy}")
    missing = [member for member in _MEMBERS if not hasattr(problem, member)]
    if missing:
        raise ValueError(f"problem must be a problem, got {type(problem).__name__}, which has no "
                         f"{', '.join(missing)}; {remedy}")  # fmt: skip
    checked: Problem = problem
    return checked
