r"""The four theorems, measured: explicit bounds, rates, the √T threshold, noise, and unknown constants.

Two problems whose constants are all known, on a ball of radius 1 (D = 2):

- a noisy quadratic in 8 dimensions, its optimum inside the ball, where everything is exact;
- least squares on the digits, even against odd, one output, features centred. Theorems 1 and 2 get it without
  a penalty: not strongly convex (H = 0), its optimum on the sphere. Theorems 3 and 4 get it with a penalty
  that makes L/H = 2, its optimum inside.

After T updates the output of Algorithms 1 and 2 is :math:`x_{T+1}`, so their bounds are taken at T + 1; that of
Algorithms 3 and 4 is the average of :math:`x_1, \dots, x_T`, and their bounds are taken at T. The delays of one
simulation are constant in time, so that its first T updates are a whole run with horizon T: one simulation for
each rule, with many delays and seeds side by side, has all horizons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad import theory
from lategrad.learners import OGD, OptimisticOGD
from lategrad.problems import LeastSquares, Quadratic, load, minimum
from lategrad.rules import AnyRule, Anytime, StronglyConvexOGD
from lategrad.sets import Ball

RADIUS = 1.0
DOMAIN = Ball(RADIUS)
D = 2 * RADIUS
DIM, OPTIMUM_LENGTH = 8, 0.6
L_OVER_H = 2.0
BATCH = 4
MINIMUM_KNOWN_TO = 1e-8

ANYTIME, OPTIMISTIC, STRONGLY_CONVEX = "anytime-sgd", "optimistic-anytime", "strongly-convex"
RULES = (ANYTIME, OPTIMISTIC, STRONGLY_CONVEX)
SGD_AVERAGE = "sgd-linear"
CONSTANT, ONE_IN_TEN = "constant", "one in ten"

LRS_TO_TUNE = [10 ** (k / 2) for k in range(-6, 3)]  # SGD's, at L = sigma = 1
ROUNDING = 1e-15  # an excess below is zero, for all that float64 can tell


@dataclass(frozen=True)
class TheoremPlan:
    """How much to run."""

    quadratic_horizons: tuple[int, ...]
    """T, powers of two; the first divides all others."""
    least_squares_horizons: tuple[int, ...]
    noise_horizons: tuple[int, ...]
    """For the noise panel, likewise."""
    constants_horizon: int
    """T for the panel in which L and sigma vary."""
    sigmas: tuple[float, ...]
    """The noise panel's; the first is 0."""
    scales: tuple[float, ...]
    """The values of L and of sigma, all combinations; 1 is among them."""
    seeds: int
    least_squares_seeds: int
    compile: bool
    """Whether simulations go through torch.compile, which costs seconds for each."""


def _powers(first: int, last: int, every: int = 1) -> tuple[int, ...]:
    return tuple(2**k for k in range(first, last + 1, every))


_SIGMAS = (0.0, *(10 ** (k / 2) for k in range(-6, 3)))
_DECADES = (0.01, 0.1, 1.0, 10.0, 100.0)

PLANS = {
    "quick": TheoremPlan(_powers(6, 12), _powers(6, 12), _powers(4, 10, 2), 1024, _SIGMAS, _DECADES, 32, 8, False),
    "paper": TheoremPlan(_powers(7, 16), _powers(7, 14), _powers(4, 14, 2), 4096, _SIGMAS, _DECADES, 32, 16, True),
    "full": TheoremPlan(_powers(7, 16), _powers(7, 16), _powers(4, 16, 2), 16384, _SIGMAS, _DECADES, 48, 24, True),
}
"""On two cores: half a minute, minutes, ten minutes."""


class Constants(NamedTuple):
    """What the theorems know of a problem."""

    L: float
    H: float
    G: float
    sigma: float


@dataclass(frozen=True, eq=False)
class BallProblem:
    """A problem on the ball; several constants where the runs have noises of their own."""

    name: str
    problem: Quadratic | LeastSquares
    constants: tuple[Constants, ...]
    best: float
    """The minimum over the ball."""


class Quadratics(Quadratic):
    """The noisy quadratic with an L and a noise for each run, tensors of shape ``(runs, 1)``; L/H is the same."""

    def __init__(self, L: Tensor, sigma: Tensor) -> None:
        super().__init__(DIM, 1.0, 1 / L_OVER_H, sigma, torch.full((DIM,), OPTIMUM_LENGTH / math.sqrt(DIM)))
        self.curvatures = L * self.curvatures


def quadratic(scales: Sequence[tuple[float, float]] = ((1.0, 1.0),)) -> BallProblem:
    r"""Quadratics with these pairs of L and :math:`\sigma`.

    The optimum is inside the ball, so :math:`\|\nabla f(x)\| \le L \|x - x^*\| \le L (r + \|x^*\|) = G`.
    """
    L, sigma = torch.tensor(scales, dtype=torch.float64).unsqueeze(-1).unbind(1)
    constants = tuple(Constants(L, L / L_OVER_H, L * (RADIUS + OPTIMUM_LENGTH), sigma) for L, sigma in scales)
    return BallProblem("quadratic", Quadratics(L, sigma), constants, best=0.0)


def least_squares(strongly_convex: bool) -> BallProblem:
    r"""Digits, even against odd, with bounds on the gradient and on the noise that hold all over the ball.

    The gradient of row i is :math:`(\langle x, z_i \rangle - y_i) z_i`. With the triangle inequality,

    .. math::

        G = \|\nabla f(0)\| + L r, \qquad
        \sigma = \frac{1}{\sqrt B} \left( \sqrt{\tfrac1n \textstyle\sum_i \|z_i\|^2 y_i^2}
        + r \sqrt{\lambda_{\max}\big(\tfrac1n \textstyle\sum_i \|z_i\|^2 z_i z_i^\top\big)} \right).
    """
    digits = load("digits", "centre")
    odd, test_odd = ((2 * (y % 2) - 1).float() for y in (digits.y_train, digits.y_test))
    data = digits._replace(y_train=odd, y_test=test_odd, classes=None)
    without = LeastSquares(data, batch=BATCH, dtype=torch.float64)
    l2 = without.smoothness / (L_OVER_H - 1) if strongly_convex else 0.0  # (L + l2) / l2 = L_OVER_H
    problem = LeastSquares(data, batch=BATCH, l2=l2, dtype=torch.float64)
    L = problem.smoothness
    G = problem.value_and_gradient(problem.start())[1].norm().item() + L * RADIUS
    assert isinstance(problem.train, Tensor)  # the data sets of the experiments are dense
    rows, weights = problem.train, problem.train.square().sum(-1, keepdim=True)
    at_zero = (weights * problem.targets.square()).mean().sqrt().item()
    growth = torch.linalg.eigvalsh((weights * rows).mT @ rows / len(rows))[-1].sqrt().item()
    sigma = (at_zero + RADIUS * growth) / math.sqrt(BATCH)
    H = problem.strong_convexity if strongly_convex else 0.0
    best = minimum(problem, DOMAIN, tolerance=MINIMUM_KNOWN_TO, cache=False).value
    return BallProblem("least squares", problem, (Constants(L, H, G, sigma),), best)


def largest_excess(setting: BallProblem) -> list[float]:
    r"""For each of the constants, the excess loss of a point of the ball that is as bad as we could find.

    A convex f grows along :math:`x \leftarrow r \nabla f(x) / \|\nabla f(x)\|`, whatever the start; we take the worst
    of many starts. Every value is attained, so that it is never more than the largest one.
    """
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(64, len(setting.constants), setting.problem.dim, generator=generator, dtype=torch.float64)
    x = RADIUS * torch.nn.functional.normalize(starts, dim=-1)
    for _ in range(100):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(setting.problem.loss(x).sum(), x)
        x = RADIUS * torch.nn.functional.normalize(gradient, dim=-1)
    worst = setting.problem.loss(x).squeeze(-1).amax(0) - setting.best
    return [float(value) for value in worst]


def theorem_lr(constants: Sequence[Constants]) -> Tensor:
    r"""Algorithm 1's :math:`\mathrm{lr} = D / \tilde G`, ``(constants, 1)``."""
    return torch.tensor([[D / theory.gradient_bound(c.G, c.sigma)] for c in constants], dtype=torch.float64)


def rule_for(name: str, constants: Sequence[Constants]) -> AnyRule[Any]:
    """A rule with the hyper-parameters of its theorem."""
    if name == ANYTIME:
        return Anytime(OGD(theorem_lr(constants), DOMAIN))
    return Anytime(OptimisticOGD(D, DOMAIN)) if name == OPTIMISTIC else StronglyConvexOGD(constants[0].H, DOMAIN)


def theorem_for(panel: str, rule: str, delay: int) -> int | None:
    """The number of the theorem on this rule; none for fixed learning rates, which are not the theorems'."""
    if panel == "constants" and rule != OPTIMISTIC:
        return None
    return {ANYTIME: 1, OPTIMISTIC: 2, STRONGLY_CONVEX: 4 if delay else 3}[rule]


def bound(theorem: int, T: int, c: Constants, delays: Tensor) -> float:
    """The right-hand side of a theorem after T updates, where ``delays`` are those of T + 1 updates."""
    if theorem in (1, 2):
        statistics = theory.delay_statistics(delays[: T + 1])
        if theorem == 1:
            regret = theory.ogd_regret(T + 1, D, theory.gradient_bound(c.G, c.sigma))
            return theory.theorem_1(T + 1, L=c.L, D=D, mu=statistics.mu, regret=regret)
        return theory.theorem_2(T + 1, L=c.L, D=D, G=c.G, sigma=c.sigma, delays=statistics)
    if theorem == 3:
        return theory.theorem_3(T, L=c.L, H=c.H, D=D, G=c.G, sigma=c.sigma)
    statistics = theory.delay_statistics(delays[:T])
    return theory.theorem_4(T, L=c.L, H=c.H, D=D, G=c.G, sigma=c.sigma, delays=statistics)


def order(T: int, mu: float, L: float, sigma: float) -> float:
    r"""The order of Theorem 2's bound: :math:`L D^2 / T^{3/2} + L D^2 \mu_\tau / T + \sigma D / \sqrt T`."""
    return L * D**2 / math.pow(T, 1.5) + L * D**2 * mu / T + sigma * D / math.sqrt(T)
