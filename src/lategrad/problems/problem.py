r"""The contract of a problem: an objective with a stochastic gradient oracle.

The objective is :math:`f(x) = E_z[f(x; z)]`. A *sample* z is whatever the oracle draws for one gradient: the
rows of a minibatch, or a noise vector. Samples are drawn apart from the gradient, by
``samples(seed, first, count)``, a pure function: the k-th sample of a stream is the same however the stream
is cut, on any device. So the simulator, a worker process and a replay can all agree on them.

A problem may have more: ``test_loss(x)``, the loss on held-out data, which the simulator records; and ``blocks``,
where each tensor of a model lies in the vector, for the rules that look at shapes.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

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
