"""A noisy quadratic whose optimum, smoothness, strong convexity and noise are all known."""

import copy

import torch
from torch import Tensor

from lategrad.problems import minibatches
from lategrad.support.validation import Scalar, require, require_count, require_number


class Quadratic:
    r"""A noisy quadratic, :math:`f(x) = \tfrac12 \sum_j a_j (x_j - x^*_j)^2` with Gaussian gradient noise.

    The oracle returns :math:`\nabla f(x) + \sigma z / \sqrt d` with z standard normal, so that the noise has
    variance :math:`\sigma^2` in the paper's sense. The curvatures a run from H to L in equal steps.

    Args:
        dim: d.
        smoothness: L, the largest curvature.
        strong_convexity: H, the smallest.
        noise: :math:`\sigma`; a tensor of shape ``(*runs, 1)`` gives each run its own.
        optimum: :math:`x^*`; by default the vector of length 1 with equal entries.
        dtype: of everything.

    >>> problem = Quadratic(dim=4, smoothness=2.0, strong_convexity=1.0)
    >>> problem.loss(problem.start()).item()
    0.75
    """

    name = "quadratic"

    def __init__(
        self, dim: int = 10, smoothness: float = 1.0, strong_convexity: float = 0.1, noise: Scalar = 1.0,
        optimum: Tensor | None = None, dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        require_count("dim", dim, low=1)
        require_number("smoothness", smoothness, low=0, strict=True)
        require_number("strong_convexity", strong_convexity, low=0)
        require("strong_convexity", strong_convexity, strong_convexity <= smoothness, f"<= smoothness = {smoothness}")
        require_number("noise", noise, low=0)
        optimum = torch.full((dim,), dim**-0.5) if optimum is None else optimum
        require("optimum", optimum, optimum.shape == (dim,), f"a vector of length {dim}")
        self.dim, self.noise = dim, noise
        self.smoothness, self.strong_convexity = smoothness, strong_convexity
        self.optimum = optimum.to(dtype)
        self.curvatures = torch.linspace(strong_convexity, smoothness, dim, dtype=dtype)

    def start(self) -> Tensor:
        """Zero, for every run that has its own noise."""
        runs = self.noise.shape[:-1] if isinstance(self.noise, Tensor) else ()
        return self.optimum.new_zeros(*runs, self.dim)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        return minibatches.noise(seed, first, count, self.dim).to(self.optimum.dtype)

    def labels(self, samples: Tensor) -> None:
        return None

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        runs = x.dim() - sample.dim()
        noise = sample.reshape(*sample.shape[:-1], *[1] * runs, self.dim)
        gradient: Tensor = self.curvatures * (x - self.optimum) + self.noise * self.dim**-0.5 * noise
        return gradient

    def loss(self, x: Tensor) -> Tensor:
        return 0.5 * (self.curvatures * (x - self.optimum).square()).sum(-1, keepdim=True, dtype=torch.float64)

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        offset = x - self.optimum.double()
        return 0.5 * (self.curvatures.double() * offset**2).sum().item(), self.curvatures.double() * offset

    def fingerprint(self) -> str:
        return f"quadratic {self.curvatures.tolist()} {self.optimum.tolist()}"

    def accuracy(self, x: Tensor) -> None:
        return None

    def to(self, device: torch.device | str) -> "Quadratic":
        moved = copy.copy(self)
        vars(moved).update({name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)})
        return moved

    def __repr__(self) -> str:
        return (f"Quadratic(dim={self.dim}, smoothness={self.smoothness}, strong_convexity={self.strong_convexity}, "
                f"noise={self.noise})")  # fmt: skip
