"""Modules, metrics and data of users, in a module of their own, so that worker processes can import them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lategrad.problems import load


class Rows(nn.Module):
    """A recurrent network that reads the eight rows of a digit one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.scores = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.recurrent(x.view(-1, 8, 8))[0][:, -1])


class Scaled(nn.Module):
    """Elementwise, so that it runs in bfloat16 on any processor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((10, 64), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


class Branching(nn.Linear):
    """Looks at its own output, which ``torch.func`` cannot do for many runs at once."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores if scores.sum() > 0 else 2 * scores


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


def top_two(output: Tensor, target: Tensor) -> Tensor:
    return (output.topk(2, dim=-1).indices == target.unsqueeze(-1)).any(-1).double().mean()


class Pairs(Dataset):
    """Digits as a torch data set."""

    def __init__(self, train: bool = True, as_dicts: bool = False) -> None:
        digits = load("digits")
        self.x, self.y = (digits.x_train, digits.y_train) if train else (digits.x_test, digits.y_test)
        self.as_dicts = as_dicts

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int):
        x, y = self.x[number], int(self.y[number])
        return {"image": x, "label": y} if self.as_dicts else (x, y)


def loader(seed: int) -> DataLoader:
    """Shuffled batches that depend on the seed alone."""
    return DataLoader(Pairs(), batch_size=32, shuffle=True, drop_last=True,
                      generator=torch.Generator().manual_seed(seed))  # fmt: skip


class Named(nn.Linear):
    """Takes its inputs by name."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image)
