"""Problems for the tests of real training; in a module of their own, so that worker processes can import them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from lategrad.problems import Quadratic


class Misbehaving(Quadratic):
    """A quadratic whose gradients go wrong in a given way, for one worker or for all."""

    def __init__(self, how: str, marker: Path | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.how, self.marker = how, marker

    def _hang_once(self) -> None:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(1000)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        grad = super().gradient(x, sample)
        if self.how == "nan":
            return grad * torch.nan
        if self.how == "inf":
            return grad + torch.inf
        if self.how == "shape":
            return grad[..., :-1]
        if self.how == "dtype":
            return grad.float()
        if self.how == "raise":
            raise OSError("the data is gone")
        self._hang_once()
        return grad


class Marked(Quadratic):
    """Long gradients with equal entries: a torn one would leave unequal entries in the parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim=4)
        self.dim = dim

    def start(self) -> Tensor:
        return torch.zeros(self.dim)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        return torch.full_like(x, float(sample.item() % 7 + 1))

    def loss(self, x: Tensor) -> Tensor:
        return x[..., :1].double()


class Stillborn(Quadratic):
    """Kills every process that moves it to its device, as each worker does first."""

    def to(self, device: torch.device | str) -> Stillborn:
        os._exit(7)
