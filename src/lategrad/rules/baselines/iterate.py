"""What rules share whose query and output are the iterate itself."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class IterateState(NamedTuple):
    """State of a rule that keeps its iterate and nothing else."""

    x: Tensor  # x_{t+1}, the iterate


class _HasIterate(Protocol):
    @property
    def x(self) -> Tensor: ...


class LastIterate:
    """A rule that takes gradients at its iterate, ``state.x``, and outputs it."""

    def query(self, state: _HasIterate) -> Tensor:
        return state.x

    def output(self, state: _HasIterate) -> Tensor:
        return state.x
