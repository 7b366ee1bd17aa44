"""Distributions of delays: constant, periodic or random values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lategrad.delays.base import Distribution
from lategrad.support.seeds import Stream, generator
from lategrad.support.validation import Count, Finite, NonNegative, Positive, require, require_count


@dataclass(frozen=True, eq=False)
class Constant(Distribution):
    r"""The same delay at every update, :math:`\tau_t = \min(\mathrm{delay}, t - 1)`.

    >>> Constant(2).draw(steps=5, seed=0).delays
    tensor([0, 1, 2, 2, 2])
    """

    delay: Count

    @property
    def largest(self) -> int:
        return self.delay

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        return np.full(steps, self.delay)


@dataclass(frozen=True, eq=False)
class Uniform(Distribution):
    r"""Independent delays, uniform on the integers low, ..., high (both included).

    >>> Uniform(2, 3).draw(steps=1000, seed=0).delays[3:].unique()
    tensor([2, 3])
    """

    low: Count
    high: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        require("low", self.low, self.low <= self.high, f"<= high = {self.high!r}")

    @property
    def largest(self) -> int:
        return self.high

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        return generator(seed, Stream.DELAYS).integers(self.low, self.high, steps, endpoint=True)


@dataclass(frozen=True, eq=False)
class Geometric(Distribution):
    r"""Independent geometric delays, :math:`P(\tau = k) = p(1-p)^k` for k = 0, 1, ..., with mean m = 1/p - 1.

    The standard deviation is :math:`\sqrt{m(m+1)}`, a little more than the mean.

    >>> Geometric(0.0).draw(steps=4, seed=0).delays
    tensor([0, 0, 0, 0])
    """

    mean: NonNegative[float]

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        return generator(seed, Stream.DELAYS).geometric(1 / (1 + self.mean), steps) - 1


@dataclass(frozen=True, eq=False)
class LogNormal(Distribution):
    r"""Independent delays :math:`\lfloor e^z \rfloor` with :math:`z \sim N(\mu, \sigma^2)`.

    Up to the floor and the cap, the median is :math:`e^\mu` and the mean :math:`e^{\mu + \sigma^2/2}`:
    ``LogNormal(7, 0.4)`` has median 1097, mean 1188, standard deviation 495 and 99th percentile 2781.

    >>> LogNormal(1.0, 0.0).draw(steps=5, seed=0).delays
    tensor([0, 1, 2, 2, 2])
    """

    mu: Finite[float]
    sigma: NonNegative[float]

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        z = generator(seed, Stream.DELAYS).standard_normal(steps)
        with np.errstate(over="ignore"):  # inf is capped like any other delay
            return np.exp(self.mu + self.sigma * z)


@dataclass(frozen=True, eq=False)
class Pareto(Distribution):
    r"""Independent heavy-tailed delays :math:`\lfloor \mathrm{scale} \cdot U^{-1/\mathrm{shape}} \rfloor`.

    :math:`P(\tau \ge k) = (k / \mathrm{scale})^{-\mathrm{shape}}` for integers k >= scale. Before the cap
    the mean is infinite for shape <= 1 and the variance for shape <= 2.

    >>> Pareto(shape=1.5, scale=3.0).draw(steps=1000, seed=0).delays[3:].min()
    tensor(3)
    """

    shape: Positive[float]
    scale: Positive[float]

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        u = 1 - generator(seed, Stream.DELAYS).random(steps)  # in (0, 1]
        with np.errstate(over="ignore"):
            return self.scale * u ** (-1 / self.shape)


@dataclass(frozen=True, eq=False)
class Cyclic(Distribution):
    r"""A sequence repeated forever: :math:`\tau_t` = sequence[(t - 1) mod its length].

    >>> Cyclic((0, 1, 4)).draw(steps=7, seed=0).delays
    tensor([0, 1, 2, 0, 1, 4, 0])
    """

    sequence: Sequence[int]

    def __post_init__(self) -> None:
        require("sequence", self.sequence, len(self.sequence) > 0, "at least one delay")
        for delay in self.sequence:
            require_count("each delay of sequence", delay)

    @property
    def largest(self) -> int:
        return max(self.sequence)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        return np.resize(self.sequence, steps)
