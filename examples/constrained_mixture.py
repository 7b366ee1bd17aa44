"""A mixture of experts whose weights are a probability vector: one parameter group on a simplex.

The weights of five experts are learned, with late gradients, from data of three of them. The weights are an ordinary
parameter; the constraint set of their group keeps them non-negative with sum 1 at every update, without a softmax. The
bias is in another group with another constraint set.

    python examples/constrained_mixture.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad.optim import AnytimeSGD, Delayed

FEATURES = 6


class Mixture(nn.Module):
    """A weighted sum of fixed linear experts."""

    def __init__(self, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("experts", torch.randn(experts, FEATURES, generator=generator))
        self.weights = nn.Parameter(torch.full((experts,), 1 / experts))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The prediction for each row."""
        return (x @ self.experts.T) @ self.weights + self.bias


def train(delay: int = 8, steps: int = 3000, seed: int = 0) -> tuple[Mixture, Tensor]:
    """Learn the weights from noisy data, with a delay of ``delay`` updates."""
    generator = torch.Generator().manual_seed(seed)
    model = Mixture(experts=5, generator=generator)
    truth = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0])
    groups = [
        {"params": [model.weights], "domain": lg.Simplex()},
        {"params": [model.bias], "domain": lg.Box(-2.0, 2.0)},
    ]
    optimizer = Delayed(AnytimeSGD(groups, lr=0.1), delay)
    for _ in range(steps):
        x = torch.randn(16, FEATURES, generator=generator)
        y = (x @ model.experts.T) @ truth + 1.0 + 0.1 * torch.randn(16, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model, truth


def main(arguments: list[str] | None = None) -> Mixture:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args(arguments)
    model, truth = train(options.delay, options.steps)
    print("weights behind the data:   ", [round(value, 3) for value in truth.tolist()])
    print("weights learned:           ", [round(value, 3) for value in model.weights.tolist()])
    print(f"their sum: {model.weights.sum().item():.6f}, bias (1): {model.bias.item():.3f}")
    return model


if __name__ == "__main__":
    main()
