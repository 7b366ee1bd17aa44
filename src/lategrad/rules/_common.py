"""What several rules share: query and output, Adam's moving averages, and the running mean of the delays."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, first_query
from lategrad.sets import OnDomain

_WINDOW = 32  # updates: short relative to a run, long enough to average heavy-tailed delays


class IterateState(NamedTuple):
    """State of a rule that keeps its iterate and nothing else."""

    x: Tensor  # x_{t+1}, the iterate


class OutputsX(OnDomain):
    """A rule whose output is ``state.x``, its iterate or its average."""

    def output(self, state: Any) -> Tensor:
        r"""After T updates, :math:`x_{T+1}`."""
        return cast(Tensor, state.x)


class LastIterate(OutputsX):
    """A rule that takes gradients at its iterate, ``state.x``, and outputs it."""

    def query(self, state: Any) -> Tensor:
        return cast(Tensor, state.x)


class CarriesQuery(LastIterate):
    """A rule whose gradients return with the query that they were taken at."""

    def ticket(self, state: Any) -> Tensor:
        return cast(Tensor, state.x)


class IterateOnly(LastIterate):
    """A rule whose state is its iterate."""

    def init(self, x0: Tensor) -> IterateState:
        return IterateState(x=first_query(self, x0))


class AveragedIterate(LastIterate):
    """A rule that takes gradients at its iterate, ``state.x``, and outputs it or the average of its queries."""

    average: str

    def output(self, state: Any) -> Tensor:
        return cast(Tensor, state.x if self.average == "none" else state.mean)


class Moments(NamedTuple):
    """Moving averages, not yet corrected for their start at zero."""

    first: Tensor  # m_t = beta_1 m_{t-1} + (1 - beta_1) g
    second: Tensor  # v_t = beta_2 v_{t-1} + (1 - beta_2) g^2

    @staticmethod
    def start(x: Tensor) -> "Moments":
        return Moments(first=torch.zeros_like(x), second=torch.zeros_like(x))

    def next(self, grad: Tensor, beta1: float, beta2: float) -> "Moments":
        second = beta2 * self.second + (1 - beta2) * grad * grad
        return Moments(first=beta1 * self.first + (1 - beta1) * grad, second=second)

    def direction(self, t: Tensor, beta1: float, beta2: float, eps: float) -> Tensor:
        """:math:`\\hat m_t / (\\sqrt{\\hat v_t} + \\epsilon)`, both corrected for their start at zero."""
        corrected = self.first / (1 - geometric(beta1, t)).to(self.first.dtype)
        return corrected / root_mean_square(self.second, t, beta2, eps)


def geometric(beta: float, t: Tensor) -> Tensor:
    """:math:`\\beta^t` for t > 0, from functions that every backend has."""
    return (math.log(beta) * t).exp() if beta > 0 else 0 * t


def root_mean_square(second: Tensor, t: Tensor, beta2: float, eps: float) -> Tensor:
    """:math:`\\sqrt{v_t / (1 - \\beta_2^t)} + \\epsilon`."""
    return (second / (1 - geometric(beta2, t)).to(second.dtype)).sqrt() + eps


def next_mean_delay(mean: Tensor, delay: Delay, t: Tensor) -> Tensor:
    r"""The mean of the first delays, then an exponential moving average.

    .. math:: \bar\tau_t = \bar\tau_{t-1} + (\tau_t - \bar\tau_{t-1}) / \min(t, 32)

    >>> next_mean_delay(torch.tensor([2.0]), torch.tensor(5), torch.tensor([3.0]))
    tensor([3.])
    """
    return mean + (delay - mean) / t.clamp_max(_WINDOW)
