"""An update queue: the gradient of every query arrives once, a number of ticks after the query was handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lategrad.delays.base import Arrivals, Distribution, check_draw
from lategrad.support.validation import require

_NEVER = 2**62


@dataclass(frozen=True, eq=False)
class UpdateQueue:
    r"""At every tick a query is handed out with its own delay d, and its gradient is applied d ticks later.

    The other models look back: update t draws :math:`\tau_t` and takes the gradient at :math:`x_{t-\tau_t}`, so that
    one query may serve several updates and another none. Here each query serves exactly one update. Several gradients
    may arrive in one tick, and none in another: a delay of d ticks is one of about d updates. At the start nothing
    arrives for a while, and many queries are :math:`x_1`.

    Args:
        distribution: of the delays, in ticks, each drawn when its query is handed out.

    >>> from lategrad.delays import Constant, Cyclic
    >>> UpdateQueue(Constant(2)).draw(steps=5, seed=0).delays  # the same as looking back
    tensor([0, 1, 2, 2, 2])
    >>> UpdateQueue(Cyclic((0, 3))).draw(steps=6, seed=0).delays  # queries 1, 3, 2, 5, 4, 7, each of them once
    tensor([0, 0, 1, 1, 2, 1])
    """

    distribution: Distribution
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[None] = None

    def __post_init__(self) -> None:
        is_valid = isinstance(self.distribution, Distribution)
        require("distribution", self.distribution, is_valid, "a distribution of delays, such as LogNormal(7, 0.4)")

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        ticks = 2 * steps
        while True:
            handed_out = np.arange(1, ticks + 1)
            due = handed_out + np.minimum(self.distribution.raw(ticks, seed), _NEVER).astype(np.int64)
            order = np.argsort(due, kind="stable")[:steps]
            if due[order[-1]] <= ticks:  # no query that is handed out later can arrive before
                break
            ticks *= 2
            require("distribution", self.distribution, ticks < _NEVER // 2, "delays that end")
        arrived = due[order]
        updates_before = np.searchsorted(arrived, handed_out[order], side="left")
        return Arrivals(torch.from_numpy(np.arange(steps) - updates_before))
