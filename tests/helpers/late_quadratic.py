"""A rule on f(x) = |x - a|^2 / 2 in the unit ball, with late and noisy gradients: what Steady's theorems speak of."""

import math
from typing import NamedTuple

import torch

from lategrad import theory

DIM = 3
NUMBERS = {"L": 1.0, "D": 2.0, "G": 1.6}
"""The smoothness, the diameter of the ball, and the longest gradient in it."""
LARGEST = 0.5 * 1.6**2
"""The largest excess loss in the ball: a bound above it says nothing."""


class Ran(NamedTuple):
    excess: float
    """The excess loss of the output, on the mean over seeds."""
    activities: list[float]
    """``theory.steady_activity`` of each seed."""


def on_a_quadratic(rule, delays, noise, generator, seeds=16):
    """One update for each of the delays; the noise has variance ``noise ** 2``."""
    a = torch.tensor([0.6, 0.0, 0.0], dtype=torch.float64)
    state = rule.init(torch.tensor([-0.8, 0.6, 0.0], dtype=torch.float64).expand(seeds, -1))
    queries, squares = [rule.query(state)], []
    for t, late in enumerate(delays, start=1):
        xi = torch.randn(seeds, DIM, generator=generator, dtype=torch.float64) * noise / math.sqrt(DIM)
        state = rule.update(state, queries[t - 1 - late] - a + xi, torch.tensor(late))
        queries.append(rule.query(state))
        squares.append(state.squares.squeeze(-1))
    excess = 0.5 * (rule.output(state) - a).square().sum(-1).mean().item()
    return Ran(excess, [theory.steady_activity(column) for column in torch.stack(squares).T])
