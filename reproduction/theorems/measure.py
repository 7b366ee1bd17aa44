r"""Two problems on a ball whose constants are all known, and simulations: one point for every horizon and delay.

After T updates the output of Algorithms 1 and 2 is :math:`x_{T+1}`, so their bounds are taken at T + 1; that of
Algorithms 3 and 4 is the average of :math:`x_1, \dots, x_T`. The delays of one simulation are constant in time, so that
its first T updates are a whole run with horizon T: one simulation for each rule has all horizons, delays and seeds.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad import theory
from lategrad.delays import Constant, Cyclic, DelayModel
from lategrad.learners import OGD, OptimisticOGD
from lategrad.problems import LeastSquares, Quadratic, load, minimum
from lategrad.rules import SGD, AnyRule, Anytime, StronglyConvexOGD
from lategrad.sets import Ball
from lategrad.simulator import simulate
from lategrad.support.files import write_text
from lategrad.support.threads import torch_threads

RADIUS = 1.0
DOMAIN, D = Ball(RADIUS), 2 * RADIUS
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

    quadratic_horizons: tuple[int, ...]  # T, powers of two; the first divides all others
    least_squares_horizons: tuple[int, ...]
    noise_horizons: tuple[int, ...]  # for the noise panel, likewise
    constants_horizon: int  # T for the panel in which L and sigma vary
    sigmas: tuple[float, ...]  # the noise panel's; the first is 0
    scales: tuple[float, ...]  # the values of L and of sigma, all combinations; 1 is among them
    seeds: int
    least_squares_seeds: int


def _powers(first: int, last: int, every: int = 1) -> tuple[int, ...]:
    return tuple(2**k for k in range(first, last + 1, every))


_SIGMAS = (0.0, *(10 ** (k / 2) for k in range(-6, 3)))
_DECADES = (0.01, 0.1, 1.0, 10.0, 100.0)

PLANS = {
    "quick": TheoremPlan(_powers(6, 12), _powers(6, 12), _powers(4, 10, 2), 1024, _SIGMAS, _DECADES, 32, 8),
    "paper": TheoremPlan(_powers(7, 16), _powers(7, 14), _powers(4, 14, 2), 4096, _SIGMAS, _DECADES, 32, 16),
    "full": TheoremPlan(_powers(7, 16), _powers(7, 16), _powers(4, 16, 2), 16384, _SIGMAS, _DECADES, 48, 24),
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
    best: float  # the minimum over the ball


def quadratic(scales: Sequence[tuple[float, float]] = ((1.0, 1.0),)) -> BallProblem:
    r"""Quadratics with these pairs of L and :math:`\sigma`.

    The optimum is inside the ball, so :math:`\|\nabla f(x)\| \le L \|x - x^*\| \le L (r + \|x^*\|) = G`.
    """
    L, sigma = torch.tensor(scales, dtype=torch.float64).unsqueeze(-1).unbind(1)
    problem = Quadratic(DIM, 1.0, 1 / L_OVER_H, sigma, torch.full((DIM,), OPTIMUM_LENGTH / math.sqrt(DIM)))
    problem.curvatures = L * problem.curvatures  # each run has an L and a noise of its own; L/H is the same
    constants = tuple(Constants(L, L / L_OVER_H, L * (RADIUS + OPTIMUM_LENGTH), sigma) for L, sigma in scales)
    return BallProblem("quadratic", problem, constants, best=0.0)


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
    worst: list[float] = (setting.problem.loss(x).squeeze(-1).amax(0) - setting.best).tolist()
    return worst


def rule_for(name: str, constants: Sequence[Constants]) -> AnyRule[Any]:
    r"""The rule as its theorem has it; Algorithm 1's learning rate is :math:`D / \tilde G`."""
    if name == ANYTIME:
        lrs = [[D / theory.gradient_bound(c.G, c.sigma)] for c in constants]
        return Anytime(OGD(torch.tensor(lrs, dtype=torch.float64), DOMAIN))
    return Anytime(OptimisticOGD(D, DOMAIN)) if name == OPTIMISTIC else StronglyConvexOGD(constants[0].H, DOMAIN)


def theorem_for(panel: str, rule: str, delay: int) -> int | None:
    """The number of the theorem on this rule; none for fixed learning rates, which are not the theorems'."""
    if panel == "constants" and rule != OPTIMISTIC:
        return None
    return {ANYTIME: 1, OPTIMISTIC: 2, STRONGLY_CONVEX: 4 if delay else 3}[rule]


def order(T: int, mu: float, L: float, sigma: float) -> float:
    r"""The order of Theorem 2's bound: :math:`L D^2 / T^{3/2} + L D^2 \mu_\tau / T + \sigma D / \sqrt T`."""
    return L * D**2 / math.pow(T, 1.5) + L * D**2 * mu / T + sigma * D / math.sqrt(T)


@dataclass(frozen=True)
class Point:
    """One measured number and all that it depends on; a row of the CSV."""

    panel: str
    problem: str
    rule: str
    theorem: int | None
    T: int  # updates
    delays: str  # "constant", or "one in ten": every tenth gradient has ten times the delay, the others have none
    delay: int
    mean_delay: float
    L: float
    H: float
    G: float
    sigma: float
    seeds: int
    excess: float  # mean over the seeds
    spread: float  # standard deviation over the seeds
    worst: float  # the excess of a point of the set that is as bad as we could find: what any point at all may have
    bound: float | None = None

    @property
    def says_something(self) -> bool:
        """Whether the bound is below the excess loss of an arbitrary point."""
        return self.bound is not None and self.bound < self.worst

    @property
    def error(self) -> float:
        return self.spread / math.sqrt(self.seeds)


class Pattern(NamedTuple):
    """A sequence of delays with mean ``delay``, but for its start."""

    kind: str
    delay: int

    def model(self) -> DelayModel:
        return Constant(self.delay) if self.kind == CONSTANT else Cyclic((0,) * 9 + (10 * self.delay,))


def measure_points(
    panel: str, setting: BallProblem, name: str, rule: AnyRule[Any], patterns: Sequence[Pattern],
    horizons: Sequence[int], *, seeds: int,
) -> list[Point]:  # fmt: skip
    """One simulation; a point for every horizon, delay and noise, up to delays of half the horizon."""
    every = min(horizons)
    trace = simulate(setting.problem, rule, [pattern.model() for pattern in patterns], max(horizons),
                     seed=list(range(seeds)), record_every=every, progress=False)  # fmt: skip
    if not trace.complete:
        raise KeyboardInterrupt
    excess = (trace.loss - setting.best).reshape(-1, seeds, len(patterns), len(setting.constants))
    worst = largest_excess(setting)
    points = []
    for T in horizons:
        for j, pattern in enumerate(patterns):
            if pattern.delay > T // 2 or (pattern.kind == ONE_IN_TEN and pattern.delay != math.isqrt(T)):
                continue
            theorem = theorem_for(panel, name, pattern.delay)
            for i, c in enumerate(setting.constants):
                values = excess[T // every, :, j, i]
                point = Point(panel, setting.name, name, theorem, T, pattern.kind, pattern.delay,
                              _delays(*pattern, T).double().mean().item(), *c, seeds=seeds,
                              excess=values.mean().item(), spread=values.std().item(), worst=worst[i])  # fmt: skip
                points.append(with_bound(point))
    return points


def with_bound(point: Point) -> Point:
    """The point with the right-hand side of its theorem after T updates, if there is a theorem on its rule."""
    if point.theorem is None:
        return point
    T, known = point.T, {"L": point.L, "D": D, "G": point.G, "sigma": point.sigma}
    delays = _delays(point.delays, point.delay, T + 1)
    statistics = theory.delay_statistics(delays if point.theorem <= 2 else delays[:T])
    if point.theorem == 1:
        regret = theory.ogd_regret(T + 1, D, theory.gradient_bound(point.G, point.sigma))
        return replace(point, bound=theory.theorem_1(T + 1, L=point.L, D=D, mu=statistics.mu, regret=regret))
    if point.theorem == 2:
        return replace(point, bound=theory.theorem_2(T + 1, **known, delays=statistics))
    if point.theorem == 3:
        return replace(point, bound=theory.theorem_3(T, **known, H=point.H))
    return replace(point, bound=theory.theorem_4(T, **known, H=point.H, delays=statistics))


@lru_cache(maxsize=256)
def _delays(kind: str, delay: int, steps: int) -> Tensor:
    return Pattern(kind, delay).model().draw(steps, seed=0).delays


def compared(horizons: Iterable[int]) -> list[int]:
    """The horizons whose curves over the delay are laid on top of each other: the longest, T/4 and T/16."""
    return sorted(horizons)[::-2][:3][::-1]


def _patterns(horizons: Sequence[int]) -> list[Pattern]:
    """No delay, the root of every horizon, powers of two up to half the longest; and some with one in ten late."""
    delays = {0, *(math.isqrt(T) for T in horizons), *(2**k for k in range(max(horizons).bit_length() - 1))}
    bursts = [Pattern(ONE_IN_TEN, math.isqrt(T)) for T in compared(horizons)]
    return [*(Pattern(CONSTANT, delay) for delay in sorted(delays)), *bursts]


def run_delays(plan: TheoremPlan, rule: str, on_data: bool) -> list[Point]:
    setting, horizons, seeds = quadratic(), plan.quadratic_horizons, plan.seeds
    if on_data:
        setting = least_squares(strongly_convex=rule == STRONGLY_CONVEX)
        horizons, seeds = plan.least_squares_horizons, plan.least_squares_seeds
    return measure_points("delay", setting, rule, rule_for(rule, setting.constants), _patterns(horizons), horizons,
                          seeds=seeds)  # fmt: skip


def run_noise(plan: TheoremPlan, rule: str) -> list[Point]:
    setting = quadratic([(1.0, sigma) for sigma in plan.sigmas])
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(max(plan.noise_horizons)))]
    return measure_points("noise", setting, rule, rule_for(rule, setting.constants), patterns, plan.noise_horizons,
                          seeds=plan.seeds)  # fmt: skip


def run_constants(plan: TheoremPlan, rule: str) -> list[Point]:
    """Algorithm 2, or a rule with a learning rate that was chosen at L = sigma = 1 and left alone, over L and sigma."""
    T = plan.constants_horizon
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(T))]
    setting = quadratic([(L, sigma) for L in plan.scales for sigma in plan.scales])
    measure = partial(measure_points, "constants", setting, rule, horizons=[T], seeds=plan.seeds)
    if rule == SGD_AVERAGE:
        return [p for pattern in patterns for p in measure(rule=tuned_sgd(plan, pattern), patterns=[pattern])]
    return measure(rule=rule_for(rule, quadratic().constants), patterns=patterns)


def tuned_sgd(plan: TheoremPlan, pattern: Pattern) -> SGD:
    """SGD with the learning rate of a grid that is best at L = sigma = 1 with this delay; it outputs its average."""
    lr, T = torch.tensor(LRS_TO_TUNE, dtype=torch.float64).reshape(-1, 1, 1), plan.constants_horizon
    trace = simulate(quadratic().problem, SGD(lr, DOMAIN, average="linear"), pattern.model(), T, record_every=T,
                     seed=list(range(plan.seeds)), progress=False)  # fmt: skip
    return SGD(LRS_TO_TUNE[int(trace.loss[-1].mean(0).argmin())], DOMAIN, average="linear")


PIECES: dict[str, Callable[[TheoremPlan], list[Point]]] = {
    **{f"{rule}-{'least-squares' if on_data else 'quadratic'}": partial(run_delays, rule=rule, on_data=on_data)
       for rule in RULES for on_data in (False, True)},
    **{f"{rule}-noise": partial(run_noise, rule=rule) for rule in RULES},
    **{f"{rule}-constants": partial(run_constants, rule=rule) for rule in (OPTIMISTIC, ANYTIME, SGD_AVERAGE)},
}  # fmt: skip
"""All measurements, one simulation or two each."""


def points_of(piece: str, plan: TheoremPlan, out: Path) -> list[Point]:
    """The points of a piece, from its file if it was made from the same choices; else measured and saved."""
    path, key = path_of(piece, out), json.loads(json.dumps(asdict(plan)))
    if path.exists() and (saved := json.loads(path.read_text()))["made_from"] == key:
        return [with_bound(Point(**point)) for point in saved["points"]]
    with torch_threads(1):  # the tensors are small: a second thread would only cost time
        points = PIECES[piece](plan)
    bare = [asdict(replace(point, bound=None)) for point in points]  # bounds are theory, not measurements
    write_text(path, json.dumps({"made_from": key, "points": bare}))
    return points


def path_of(piece: str, out: Path) -> Path:
    return out / "traces" / f"theorems-{piece}.json"
