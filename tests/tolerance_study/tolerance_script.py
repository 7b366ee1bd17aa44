"""A user's training for ``lategrad tolerance``: a noisy quadratic, values over time."""

import os
from pathlib import Path

import torch
from torch import nn


def train(wrap):
    """SGD with an lr that is stable up to a delay of about 3."""
    if "COUNT_RUNS_IN" in os.environ:
        with Path(os.environ["COUNT_RUNS_IN"]).open("a") as file:
            file.write(f"{wrap.name} {wrap.delay} {wrap.seed}\n")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(60):
        optimizer.zero_grad()
        x = torch.randn(32, 4)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if step % 4 == 3:
            yield (model(torch.eye(4)) - 1).square().mean().item() + 1


def small_steps(params):
    return torch.optim.SGD(params, lr=0.01)
