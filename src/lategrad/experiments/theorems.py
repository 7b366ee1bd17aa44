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

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from lategrad import theory
from lategrad.delays import Constant, Cyclic, DelayModel
from lategrad.experiments.results import Section, Verdict
from lategrad.experiments.style import COLOURS, TITLES
from lategrad.learners import OGD, OptimisticOGD
from lategrad.problems import LeastSquares, Quadratic, load, minimum
from lategrad.rules import SGD, AnyRule, Anytime, StronglyConvexOGD
from lategrad.sets import Ball
from lategrad.simulate import simulate
from lategrad.validation import require_choice

RADIUS = 1.0
DOMAIN = Ball(RADIUS)
D = 2 * RADIUS
DIM, OPTIMUM_LENGTH = 8, 0.6
L_OVER_H = 2.0
BATCH = 4

ANYTIME, OPTIMISTIC, STRONGLY_CONVEX = "anytime-sgd", "optimistic-anytime", "strongly-convex"
RULES = (ANYTIME, OPTIMISTIC, STRONGLY_CONVEX)
SGD_AVERAGE = "sgd-linear"
CONSTANT, ONE_IN_TEN = "constant", "one in ten"

STEPS_TO_TUNE = [10 ** (k / 2) for k in range(-6, 3)]  # SGD's, at L = sigma = 1
ROUNDING = 1e-15  # an excess below is zero, for all that float64 can tell

# The criteria. The theorems promise orders; the factors are ours, chosen after small pilot runs.
FITTED = 4  # horizons that a slope is fitted over, the longest ones
SLOPE_TOLERANCE = 0.1
PROMISED = {1: -0.5, 2: -0.5, 3: -1.0, 4: -1.0}
WITHOUT_NOISE = {2: -1.5, 3: -2.0}
NO_DEGRADATION = 4.0
BEYOND = 2.0
SAME = 1.5
NOISE_CONSTANT = 2.0
INDEPENDENT = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Config:
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

    @classmethod
    def of(cls, scale: str) -> Config:
        """The configuration of a scale: on two cores, half a minute ("quick"), minutes ("paper"), ten ("full")."""
        require_choice("scale", scale, tuple(SCALES))
        return SCALES[scale]


def _powers(first: int, last: int, every: int = 1) -> tuple[int, ...]:
    return tuple(2**k for k in range(first, last + 1, every))


_SIGMAS = (0.0, *(10 ** (k / 2) for k in range(-6, 3)))
_DECADES = (0.01, 0.1, 1.0, 10.0, 100.0)

SCALES = {
    "quick": Config(_powers(6, 12), _powers(6, 12), _powers(4, 10, 2), 1024, _SIGMAS, _DECADES, 32, 8, False),
    "paper": Config(_powers(7, 16), _powers(7, 14), _powers(4, 14, 2), 4096, _SIGMAS, _DECADES, 32, 16, True),
    "full": Config(_powers(7, 16), _powers(7, 16), _powers(4, 16, 2), 16384, _SIGMAS, _DECADES, 48, 24, True),
}


# ---- problems and their constants


class Constants(NamedTuple):
    """What the theorems know of a problem."""

    L: float
    H: float
    G: float
    sigma: float


@dataclass(frozen=True, eq=False)
class Setting:
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


def quadratic(scales: Sequence[tuple[float, float]] = ((1.0, 1.0),)) -> Setting:
    r"""Quadratics with these pairs of L and :math:`\sigma`.

    The optimum is inside the ball, so :math:`\|\nabla f(x)\| \le L \|x - x^*\| \le L (r + \|x^*\|) = G`.
    """
    L, sigma = torch.tensor(scales, dtype=torch.float64).unsqueeze(-1).unbind(1)
    constants = tuple(Constants(L, L / L_OVER_H, L * (RADIUS + OPTIMUM_LENGTH), sigma) for L, sigma in scales)
    return Setting("quadratic", Quadratics(L, sigma), constants, best=0.0)


def least_squares(strongly_convex: bool) -> Setting:
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
    rows, weights = problem.train, problem.train.square().sum(-1, keepdim=True)
    at_zero = (weights * problem.targets.square()).mean().sqrt().item()
    growth = torch.linalg.eigvalsh((weights * rows).mT @ rows / len(rows))[-1].sqrt().item()
    sigma = (at_zero + RADIUS * growth) / math.sqrt(BATCH)
    H = problem.strong_convexity if strongly_convex else 0.0
    best = minimum(problem, DOMAIN, tolerance=1e-9, cache=False).value
    return Setting("least squares", problem, (Constants(L, H, G, sigma),), best)


def theorem_step(constants: Sequence[Constants]) -> Tensor:
    r"""Algorithm 1's :math:`\mathrm{lr} = D / \tilde G`, ``(constants, 1)``."""
    return torch.tensor([[D / theory.gradient_bound(c.G, c.sigma)] for c in constants], dtype=torch.float64)


def rule_for(name: str, constants: Sequence[Constants]) -> AnyRule[Any]:
    """A rule with the hyper-parameters of its theorem."""
    if name == ANYTIME:
        return Anytime(OGD(theorem_step(constants), DOMAIN))
    return Anytime(OptimisticOGD(D, DOMAIN)) if name == OPTIMISTIC else StronglyConvexOGD(constants[0].H, DOMAIN)


def theorem_for(panel: str, rule: str, delay: int) -> int | None:
    """The number of the theorem on this rule; none for fixed steps, which are not the theorems'."""
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


# ---- measuring


@dataclass(frozen=True)
class Point:
    """One measured number and all that it depends on; a row of the CSV."""

    panel: str
    problem: str
    rule: str
    theorem: int | None
    T: int
    """Updates."""
    delays: str
    """"constant", or "one in ten": every tenth gradient is ten times as late, the others are not."""
    delay: int
    mean_delay: float
    L: float
    H: float
    G: float
    sigma: float
    seeds: int
    excess: float
    """Mean over the seeds."""
    spread: float
    """Standard deviation over the seeds."""
    bound: float | None

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.spread / math.sqrt(self.seeds)


class Pattern(NamedTuple):
    """A sequence of delays with mean ``delay``, but for its start."""

    kind: str
    delay: int

    def model(self) -> DelayModel:
        """What the simulator takes."""
        return Constant(self.delay) if self.kind == CONSTANT else Cyclic((0,) * 9 + (10 * self.delay,))


class Run(NamedTuple):
    """How a simulation is run."""

    seeds: int
    device: str
    compile: bool


def measure(
    panel: str,
    setting: Setting,
    name: str,
    rule: AnyRule[Any],
    patterns: Sequence[Pattern],
    horizons: Sequence[int],
    run: Run,
) -> list[Point]:
    """One simulation; a point for every horizon, delay and noise, up to delays of half the horizon."""
    gc.collect()  # the last simulation, gigabytes of delays with its history, is a cycle of references
    steps, every = max(horizons), min(horizons)
    trace = simulate(
        setting.problem, rule, [pattern.model() for pattern in patterns], steps,
        seed=list(range(run.seeds)), record_every=every, device=run.device, compile=run.compile, progress=False,
    )  # fmt: skip
    if not trace.complete:
        raise KeyboardInterrupt
    excess = (trace.loss - setting.best).reshape(-1, run.seeds, len(patterns), len(setting.constants))
    sequences = [pattern.model().draw(steps + 1, seed=0).delays for pattern in patterns]
    points = []
    for T in horizons:
        for j, pattern in enumerate(patterns):
            if pattern.delay > T // 2 or (pattern.kind == ONE_IN_TEN and pattern.delay != math.isqrt(T)):
                continue
            theorem = theorem_for(panel, name, pattern.delay)
            for i, c in enumerate(setting.constants):
                values = excess[T // every, :, j, i]
                points.append(
                    Point(panel, setting.name, name, theorem, T, pattern.kind, pattern.delay,
                          mean_delay=sequences[j][:T].double().mean().item(), L=c.L, H=c.H, G=c.G, sigma=c.sigma,
                          seeds=run.seeds, excess=values.mean().item(), spread=values.std(correction=1).item(),
                          bound=None if theorem is None else bound(theorem, T, c, sequences[j]))
                )  # fmt: skip
    return points


def compared(horizons: Sequence[int]) -> tuple[int, ...]:
    """The horizons whose curves over the delay are laid on top of each other: the longest, T/4 and T/16."""
    return tuple(horizons[::-2][:3][::-1])


def _patterns(horizons: Sequence[int]) -> list[Pattern]:
    """No delay, the root of every horizon, powers of two up to half the longest; and some with one in ten late."""
    delays = {0, *(math.isqrt(T) for T in horizons), *(2**k for k in range(max(horizons).bit_length() - 1))}
    bursts = [Pattern(ONE_IN_TEN, math.isqrt(T)) for T in compared(horizons)]
    return [*(Pattern(CONSTANT, delay) for delay in sorted(delays)), *bursts]


def run_delays(config: Config, device: str, report: Report) -> list[Point]:
    """Every rule over all horizons and delays, on both problems."""
    points = []
    for rule in RULES:
        for setting in (quadratic(), least_squares(strongly_convex=rule == STRONGLY_CONVEX)):
            on_data = isinstance(setting.problem, LeastSquares)
            horizons = config.least_squares_horizons if on_data else config.quadratic_horizons
            seeds = config.least_squares_seeds if on_data else config.seeds
            report(f"theorems: {rule} on the {setting.name}, T up to {max(horizons)}")
            points += measure("delay", setting, rule, rule_for(rule, setting.constants), _patterns(horizons), horizons,
                              Run(seeds, device, config.compile))  # fmt: skip
    return points


def run_noise(config: Config, device: str, report: Report) -> list[Point]:
    """Every rule over the noise, at no delay and at the root of the longest horizon."""
    setting = quadratic([(1.0, sigma) for sigma in config.sigmas])
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(max(config.noise_horizons)))]
    points = []
    for rule in RULES:
        report(f"theorems: {rule} over the noise")
        points += measure("noise", setting, rule, rule_for(rule, setting.constants), patterns, config.noise_horizons,
                          Run(config.seeds, device, config.compile))  # fmt: skip
    return points


def run_constants(config: Config, device: str, report: Report) -> list[Point]:
    """Algorithm 2, and steps chosen at L = sigma = 1 and left alone, over L and sigma."""
    T, run = config.constants_horizon, Run(config.seeds, device, config.compile)
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, math.isqrt(T))]
    setting = quadratic([(L, sigma) for L in config.scales for sigma in config.scales])
    report("theorems: L and sigma over decades")
    chosen = Anytime(OGD(theorem_step(quadratic().constants).item(), DOMAIN))
    return [
        *measure("constants", setting, OPTIMISTIC, Anytime(OptimisticOGD(D, DOMAIN)), patterns, [T], run),
        *measure("constants", setting, ANYTIME, chosen, patterns, [T], run),
        *(
            point
            for pattern in patterns
            for point in measure("constants", setting, SGD_AVERAGE, tuned_sgd(pattern, T, run), [pattern], [T], run)
        ),
    ]


def tuned_sgd(pattern: Pattern, T: int, run: Run) -> SGD:
    """SGD with the step of a grid that is best at L = sigma = 1 with this delay; it outputs its average."""
    lr = torch.tensor(STEPS_TO_TUNE, dtype=torch.float64).reshape(-1, 1, 1)
    trace = simulate(quadratic().problem, SGD(lr, DOMAIN, average="linear"), pattern.model(), T, record_every=T,
                     seed=list(range(run.seeds)), device=run.device, compile=run.compile, progress=False)  # fmt: skip
    best = int(trace.loss[-1].mean(0).flatten().argmin())
    return SGD(STEPS_TO_TUNE[best], DOMAIN, average="linear")


def run(config: Config, device: str = "cpu", progress: Report | None = None) -> list[Point]:
    """All measurements."""
    report: Report = progress or (lambda message: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: a second thread would only be waited for
    try:
        return [point for panel in (run_delays, run_noise, run_constants) for point in panel(config, device, report)]
    finally:
        torch.set_num_threads(threads)


# ---- reading the numbers


def select(points: Iterable[Point], **values: Any) -> list[Point]:
    """The points with these values, in their order."""
    return [point for point in points if all(getattr(point, key) == value for key, value in values.items())]


def distinct(points: Iterable[Point], name: str) -> list[Any]:
    """The values of a column, in the order of appearance."""
    return list(dict.fromkeys(getattr(point, name) for point in points))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a line fitted to log y over log x.

    >>> round(exponent([1, 10, 100], [5, 0.5, 0.05]), 9)
    -1.0
    """
    return float(np.polyfit(np.log(x), np.log(np.maximum(y, ROUNDING)), 1)[0])


def longest(points: Iterable[Point]) -> list[Point]:
    """Those of the longest horizons, over which slopes are fitted."""
    return sorted(points, key=lambda point: point.T)[-FITTED:]


def slope(points: Iterable[Point]) -> float:
    """The exponent of T in the excess over the longest horizons."""
    last = longest(points)
    return exponent([point.T for point in last], [point.excess for point in last])


def at_root(points: Iterable[Point], kind: str = CONSTANT) -> list[Point]:
    """Those whose delay is the root of their horizon."""
    return [point for point in points if point.delays == kind and point.delay == math.isqrt(point.T)]


def curve(points: Iterable[Point]) -> list[tuple[Point, float]]:
    """The points of one horizon with a constant delay > 0, and their excess relative to that without delay."""
    first, *late = sorted(select(points, delays=CONSTANT), key=lambda point: point.delay)
    return [(point, point.excess / first.excess) for point in late]


def doubling_delay(points: Iterable[Point]) -> float:
    """The mean delay at which the excess is first twice that without delay; the largest one if it never is."""
    before, below = 0.0, 1.0
    for point, ratio in curve(points):
        if ratio >= 2:
            return before + (point.mean_delay - before) * (2 - below) / (ratio - below)
        before, below = point.mean_delay, ratio
    return before


def doubling_exponent(points: Iterable[Point]) -> float:
    """The exponent of T in the doubling delay."""
    points = list(points)
    horizons = compared(sorted(distinct(points, "T")))
    return exponent(horizons, [doubling_delay(select(points, T=T)) for T in horizons])


def collapse(points: Iterable[Point]) -> float:
    """How far apart curves of different horizons are at √T/4, √T/2 and √T: the largest ratio of two heights."""
    heights: dict[float, list[float]] = {}
    points = list(points)
    for T in compared(sorted(distinct(points, "T"))):
        for point, ratio in curve(select(points, T=T)):
            heights.setdefault(point.delay / math.sqrt(T), []).append(ratio)
    return max(max(heights[share]) / min(heights[share]) for share in (0.25, 0.5, 1.0))


def settled(point: Point) -> bool:
    """Whether the horizon is past (24 L/H)², where Algorithm 4's first, long steps are forgotten."""
    return point.T >= (24 * point.L / point.H) ** 2


def normalised(points: Iterable[Point]) -> dict[tuple[float, float], float]:
    """The excess divided by the order of Theorem 2's bound, by L and sigma."""
    return {(p.L, p.sigma): p.excess / order(p.T, p.mean_delay, p.L, p.sigma) for p in points}


def worsening(points: Iterable[Point]) -> float:
    """The largest normalised excess over that at L = sigma = 1, where the fixed steps were chosen."""
    values = normalised(points)
    return max(values.values()) / values[1.0, 1.0]


def noise_term(point: Point) -> float:
    """What the theorem says that noise adds, without its constant."""
    if point.rule == STRONGLY_CONVEX:
        return point.sigma**2 / (point.H * point.T)
    return point.sigma * D / math.sqrt(point.T)


def fall_without_noise(points: Iterable[Point]) -> float:
    """The exponent of T in the excess until it is lost in rounding; minus infinity if it is from the start."""
    silent = sorted(select(points, sigma=0.0), key=lambda point: point.T)
    seen = [point for point in silent if point.excess > ROUNDING]
    seen += silent[len(seen) : len(seen) + 1]
    return exponent([p.T for p in seen], [p.excess for p in seen]) if len(seen) > 1 else -math.inf


def takeover(points: Iterable[Point]) -> float:
    """The smallest noise measured at which the excess is twice that without noise, or more."""
    silent, *noisy = sorted(points, key=lambda point: point.sigma)
    return next((point.sigma for point in noisy if point.excess >= 2 * silent.excess), math.inf)


# ---- verdicts


def bound_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    """No measured mean is above the bound."""
    shares = [(p.excess + 2 * p.error) / p.bound for p in points if p.theorem == theorem and p.bound is not None]
    return Verdict(
        claim=f"Theorem {theorem}: the bound holds with explicit constants",
        criterion="mean excess loss plus two standard errors at most the bound, at every problem, horizon, delay, "
        "noise and L measured",
        measured=f"at most {max(shares):.2g} of the bound, in {len(shares)} settings",
        reproduced=max(shares) <= 1,
    )


def rate_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    """The excess falls at least as fast as promised."""
    points = select(points, panel="delay", theorem=theorem, delays=CONSTANT)
    slopes = {}
    for problem in distinct(points, "problem"):
        ours = select(points, problem=problem)
        if theorem != 4:
            slopes[f"{problem}, no delay"] = slope(select(ours, delay=0))
        if theorem != 3:
            start = f", from T = {longest(at_root(ours))[0].T:,} on" if theorem == 4 else ""
            slopes[f"{problem}, delay √T{start}"] = slope(at_root(ours))
    promised = PROMISED[theorem]
    where = {3: "without delay", 4: "at a delay of √T"}.get(theorem, "without delay and at a delay of √T")
    return Verdict(
        claim=f"Theorem {theorem}: the excess loss falls as T^{promised:g} or faster, {where}",
        criterion=f"slope over the {FITTED} longest horizons at most {promised + SLOPE_TOLERANCE:g}",
        measured="; ".join(f"{name}: {value:.2f}" for name, value in slopes.items()),
        reproduced=max(slopes.values()) <= promised + SLOPE_TOLERANCE,
    )


def threshold_verdict(points: Iterable[Point], rule: str) -> Verdict:
    """Delays up to √T cost a constant factor, the same for all T; far longer ones cost more."""
    points = select(points, panel="delay", rule=rule)
    at_threshold, beyond, exponents = [], [], {}
    for problem in distinct(points, "problem"):
        ours = select(points, problem=problem)
        for T in compared(sorted(distinct(ours, "T"))):
            late = curve(select(ours, T=T))
            ((root, ratio),) = [(point, ratio) for point, ratio in late if at_root([point])]
            if rule != STRONGLY_CONVEX or settled(root):
                at_threshold.append(ratio)
            beyond.append(late[-1][1] / ratio)
        exponents[problem] = doubling_exponent(ours)
    long_enough = " (for T past (24 L/H)²)" if rule == STRONGLY_CONVEX else ""
    shown = f"at most {max(at_threshold):.2f}" if at_threshold else "no horizon long enough"
    return Verdict(
        claim=f"{TITLES[rule]}: no degradation, up to a constant, as long as the mean delay is of the order of √T",
        criterion=f"excess loss at a delay of √T at most {NO_DEGRADATION:g} times that without delay{long_enough}; at "
        f"T/2 at least {BEYOND:g} times that at √T; the delay that doubles it grows as T^{0.5 - SLOPE_TOLERANCE:g} or "
        "faster",
        measured=f"{shown}; at least {min(beyond):.1f}; exponents "
        + ", ".join(f"{value:.2f} ({problem})" for problem, value in exponents.items()),
        reproduced=bool(at_threshold)
        and max(at_threshold) <= NO_DEGRADATION
        and min(beyond) >= BEYOND
        and min(exponents.values()) >= 0.5 - SLOPE_TOLERANCE,
    )


def average_delay_verdict(points: Iterable[Point]) -> Verdict:
    """The mean delay counts, not the largest."""
    points = [point for point in select(points, panel="delay") if point.rule in (ANYTIME, OPTIMISTIC)]
    ratios = []
    for burst in at_root(points, ONE_IN_TEN):
        (even,) = at_root(select(points, problem=burst.problem, rule=burst.rule, T=burst.T))
        ratios.append(burst.excess / even.excess)
    return Verdict(
        claim="Theorems 1 and 2: the average delay counts, not the largest",
        criterion="with one gradient in ten 10√T late and the others on time, excess loss at most "
        f"{SAME:g} times that with all of them √T late",
        measured=f"{min(ratios):.2f} to {max(ratios):.2f} times, in {len(ratios)} settings",
        reproduced=max(ratios) <= SAME,
    )


def noise_verdict(points: Iterable[Point], theorem: int) -> Verdict:
    """The noise enters through its own term only, and without it the rate is the fast one."""
    rule, term = {2: (OPTIMISTIC, "σD/√T"), 3: (STRONGLY_CONVEX, "σ²/(HT)")}[theorem]
    points = select(points, panel="noise", rule=rule, delay=0)
    rate, promised = fall_without_noise(points), WITHOUT_NOISE[theorem]
    silent, *noisy = sorted(select(points, T=max(distinct(points, "T"))), key=lambda point: point.sigma)
    shares = [(point.excess - silent.excess) / noise_term(point) for point in noisy]
    return Verdict(
        claim=f"Theorem {theorem}: without noise the excess loss falls as T^{promised:g} or faster, and noise adds a "
        f"term of the order of {term}",
        criterion=f"without noise and delay, slope at most {promised + SLOPE_TOLERANCE:g} until the excess is lost in "
        f"rounding; at the longest horizon, every σ adds at most {NOISE_CONSTANT:g} {term}",
        measured=f"slope {rate:.2f}; noise adds at most {max(shares):.2g} {term}",
        reproduced=rate <= promised + SLOPE_TOLERANCE and max(shares) <= NOISE_CONSTANT,
    )


def independence_verdict(points: Iterable[Point]) -> Verdict:
    """Algorithm 2 needs neither L nor sigma; SGD with a fixed step does."""
    points = select(points, panel="constants")
    worst = {
        rule: [worsening(select(points, rule=rule, delay=delay)) for delay in sorted(distinct(points, "delay"))]
        for rule in (OPTIMISTIC, ANYTIME, SGD_AVERAGE)
    }
    decades = math.log10(max(distinct(points, "L")) / min(distinct(points, "L")))
    return Verdict(
        claim="Algorithm 2 needs to know neither L nor σ",
        criterion=f"over {decades:.0f} decades of L and of σ, excess loss divided by LD²/T^1.5 + LD²μ/T + σD/√T at "
        f"most {INDEPENDENT:g} times that at L = σ = 1, without delay and at a delay of √T; not so for SGD with the "
        "step that is best at L = σ = 1",
        measured="; ".join(
            f"{_with_step(rule)}: {without:.3g} and {late:.3g} times" for rule, (without, late) in worst.items()
        ),
        reproduced=max(worst[OPTIMISTIC]) <= INDEPENDENT < min(worst[SGD_AVERAGE]),
    )


def _with_step(rule: str) -> str:
    """The title of a rule in the panel where L and sigma vary and steps do not."""
    return TITLES[rule] + ("" if rule == OPTIMISTIC else ", fixed step")


def verdicts(points: Sequence[Point]) -> tuple[Verdict, ...]:
    """All of them."""
    return (
        *(bound_verdict(points, theorem) for theorem in PROMISED),
        *(rate_verdict(points, theorem) for theorem in PROMISED),
        *(threshold_verdict(points, rule) for rule in RULES),
        average_delay_verdict(points),
        *(noise_verdict(points, theorem) for theorem in WITHOUT_NOISE),
        independence_verdict(points),
    )


# ---- figures

_ALGORITHM = {ANYTIME: "Algorithm 1", OPTIMISTIC: "Algorithm 2", STRONGLY_CONVEX: "Algorithm 4"}
_BOUND = "#999999"


def _grid(rows: int, height: float, xlabels: Sequence[str], ylabel: str) -> tuple[Figure, list[Axes]]:
    """Two columns of panels with logarithmic axes, narrow enough to be read on a telephone."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for ax, xlabel in zip(axes[-2:], xlabels, strict=True):
        ax.set_xlabel(xlabel, fontsize=9.5)
    figure.supylabel(ylabel, fontsize=9.5)
    for ax in axes:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.tick_params(labelsize=8.5)
        ax.minorticks_off()
    return figure, axes


def _measured(ax: Axes, points: Sequence[Point], late: bool) -> None:
    """The mean excess over the horizon, with two standard errors to either side, and the bound."""
    T, colour, line = [point.T for point in points], COLOURS[points[0].rule], "--" if late else "-"
    excess, errors = [point.excess for point in points], [2 * point.error for point in points]
    ax.errorbar(T, excess, errors, fmt="s" if late else "o", linestyle=line, color=colour, markersize=4,
                linewidth=1.4, markerfacecolor="white" if late else colour)  # fmt: skip
    ax.plot(T, [point.bound or math.nan for point in points], color=_BOUND, linewidth=1.6, linestyle=line)


def plot_rates(points: Iterable[Point], problem: str) -> Figure:
    """Measured excess and bounds over the horizon: a panel for each theorem."""
    points = select(points, panel="delay", problem=problem, delays=CONSTANT)
    figure, axes = _grid(2, 5.6, ["updates T"] * 2, "excess loss")
    for ax, theorem in zip(axes, PROMISED, strict=True):
        ours = select(points, theorem=theorem)
        slopes = []
        for late, shown in ((False, select(ours, delay=0)), (True, at_root(ours))):
            if shown:
                _measured(ax, shown, late)
                slopes.append(f"slope {slope(shown):.2f}, {'delay √T' if late else 'no delay'}".replace("-", "−"))
        ax.text(0.04, 0.04, "\n".join(slopes), transform=ax.transAxes, fontsize=8.5)
        low, high = ax.get_ylim()
        ax.set_ylim(low * (low / high) ** 0.18, high)  # room for the text
        ax.set_title(f"Theorem {theorem}", fontsize=10)
    handles = [
        Line2D([], [], color="black", marker="o", markersize=4, label="measured, no delay"),
        Line2D([], [], color="black", marker="s", markersize=4, linestyle="--", markerfacecolor="white",
               label="measured, delay √T"),
        Line2D([], [], color=_BOUND, label="bound, no delay"),
        Line2D([], [], color=_BOUND, linestyle="--", label="bound, delay √T"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def plot_threshold(points: Iterable[Point]) -> Figure:
    """The price of a delay over the delay in units of √T: a row for each rule, a column for each problem."""
    points = select(points, panel="delay")
    names = distinct(points, "problem")
    figure, axes = _grid(len(RULES), 7.4, ["mean delay / √T"] * 2, "excess loss / excess loss without delay")
    for ax, (rule, problem) in zip(axes, [(rule, name) for rule in RULES for name in names], strict=True):
        ours = select(points, rule=rule, problem=problem)
        for T, alpha in zip(compared(sorted(distinct(ours, "T"))), (0.35, 0.6, 1.0), strict=True):
            of_T, root = select(ours, T=T), math.sqrt(T)
            steady = curve(of_T)
            ax.plot([point.mean_delay / root for point, _ in steady], [ratio for _, ratio in steady],
                    color=COLOURS[rule], alpha=alpha, linewidth=1.5, label=f"T = {T:,}")  # fmt: skip
            without = select(of_T, delay=0)[0].excess
            for burst in at_root(of_T, ONE_IN_TEN):
                ax.plot(burst.mean_delay / root, burst.excess / without, "*", color=COLOURS[rule], alpha=alpha,
                        markersize=9, markeredgecolor="black", markeredgewidth=0.6)  # fmt: skip
        ax.axvline(1, color="black", linewidth=0.8, linestyle=":")
        ax.axhline(NO_DEGRADATION, color="black", linewidth=0.8, linestyle=":")
        ax.set_ylim(0.7, None)
        ax.set_title(f"{_ALGORITHM[rule]}, {problem}", fontsize=10)
        ax.legend(fontsize=8, loc="upper left", handlelength=1.2, framealpha=0.9)
    return figure


def plot_noise(points: Iterable[Point]) -> Figure:
    """Excess over the noise at the longest horizon, without delay and at a delay of √T."""
    points = select(points, panel="noise")
    T = max(distinct(points, "T"))
    figure, axes = _grid(1, 3.7, ["noise σ"] * 2, f"excess loss at T = {T:,}")
    for ax, delay in zip(axes, sorted(distinct(points, "delay")), strict=True):
        ours = select(points, T=T, delay=delay)
        for rule in RULES:
            noisy = [point for point in select(ours, rule=rule) if point.sigma > 0]
            ax.plot([point.sigma for point in noisy], [point.excess for point in noisy], "o-", color=COLOURS[rule],
                    markersize=3.5, linewidth=1.5, label=TITLES[rule])  # fmt: skip
        for rule, dashes, label in ((OPTIMISTIC, "--", "σD/√T"), (STRONGLY_CONVEX, ":", "σ²/(HT)")):
            noisy = [point for point in select(ours, rule=rule) if point.sigma > 0]
            ax.plot([point.sigma for point in noisy], [noise_term(point) for point in noisy], dashes, color=_BOUND,
                    linewidth=1.6, label=label)  # fmt: skip
        ax.set_title("no delay" if delay == 0 else "delay √T", fontsize=10)
    low = min(ax.get_ylim()[0] for ax in axes)
    for ax in axes:
        ax.set_ylim(max(low, ROUNDING), 1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
    return figure


def plot_constants(points: Iterable[Point]) -> Figure:
    """How much worse than at L = sigma = 1: over L, at the worst sigma, and over sigma, at the worst L."""
    points = select(points, panel="constants")
    figure, axes = _grid(2, 5.2, ["smoothness L", "noise σ"], "normalised excess loss / that at L = σ = 1")
    panels = [(delay, name) for delay in sorted(distinct(points, "delay")) for name in ("L", "sigma")]
    for ax, (delay, name) in zip(axes, panels, strict=True):
        for rule in (SGD_AVERAGE, ANYTIME, OPTIMISTIC):
            values = normalised(select(points, delay=delay, rule=rule))
            scales = sorted(distinct(points, name))
            worst = [max(value for key, value in values.items() if key[name == "sigma"] == scale) for scale in scales]
            ax.plot(scales, [value / values[1.0, 1.0] for value in worst], "o-", color=COLOURS[rule], markersize=3.5,
                    label=_with_step(rule))  # fmt: skip
        ax.axhline(INDEPENDENT, color="black", linewidth=0.8, linestyle=":")
        ax.set_title(f"{'no delay' if delay == 0 else 'delay √T'}, worst {'σ' if name == 'L' else 'L'}", fontsize=10)
    for row in (axes[:2], axes[2:]):
        top = max(ax.get_ylim()[1] for ax in row)
        for ax in row:
            ax.set_ylim(0.5, top)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1, fontsize=8.5)
    return figure


def plot(points: Sequence[Point]) -> dict[str, Figure]:
    """All figures, by the stems of their files."""
    return {
        "theorems-quadratic": plot_rates(points, "quadratic"),
        "theorems-least-squares": plot_rates(points, "least squares"),
        "theorems-delay": plot_threshold(points),
        "theorems-noise": plot_noise(points),
        "theorems-constants": plot_constants(points),
    }


# ---- the section


def _constants(points: Iterable[Point]) -> list[dict[str, Any]]:
    """L, H, G and sigma of every problem of the first panel."""
    seen = dict.fromkeys((p.problem, p.L, p.H, p.G, p.sigma) for p in select(points, panel="delay"))
    return [dict(zip(("problem", "L", "H", "G", "sigma"), values, strict=True)) for values in seen]


def _about_delays(points: Iterable[Point]) -> str:
    points = select(points, panel="delay")
    names = distinct(points, "problem")
    apart, growth = (
        {rule: [of(select(points, rule=rule, problem=name)) for name in names] for rule in RULES}
        for of in (collapse, doubling_exponent)
    )
    factors = ", ".join(f"{max(apart[rule]):.2f} ({_ALGORITHM[rule]})" for rule in RULES)
    faster = min(growth[STRONGLY_CONVEX]) > 0.5 + SLOPE_TOLERANCE
    return (
        "Over the mean delay in units of √T, the theory wants curves of different horizons T to coincide. Up to √T "
        f"they differ by factors of at most {factors}."
        + (" Algorithm 4's do not coincide: they move to the right with T, since the delay that it can bear grows "
           "faster than the √T that its theorem guarantees; past that delay its price rises far more steeply than that "
           "of Algorithms 1 and 2." if faster else "")
    )  # fmt: skip


def _about_noise(points: Iterable[Point]) -> str:
    points = select(points, panel="noise")
    T = max(distinct(points, "T"))
    at = {}
    for delay in sorted(distinct(points, "delay")):
        doubled = {rule: takeover(select(points, rule=rule, T=T, delay=delay)) for rule in RULES}
        at[delay] = ", ".join(f"{sigma:.2g} ({_ALGORITHM[rule]})" for rule, sigma in doubled.items())
    without, root = at
    return (
        f"Noise has doubled the excess loss, on a grid of half decades from 0.001 on, at σ = {at[without]} without "
        f"delay; at a delay of √T, which sets a floor of its own, at σ = {at[root]}. The order of Theorem 2's bound "
        f"puts this at σ = LD(1/T + μ/√T), {D / T:.1g} without delay and {D / T + D * root / math.sqrt(T):.1g} at √T."
    )


def _about_constants(points: Iterable[Point]) -> str:
    points = select(points, panel="constants", L=1.0, sigma=1.0)
    values = {
        rule: [normalised([point])[1.0, 1.0] for point in sorted(select(points, rule=rule), key=lambda p: p.delay)]
        for rule in (OPTIMISTIC, SGD_AVERAGE)
    }
    return (
        "Where L and σ vary, SGD's step is the best of a grid at L = σ = 1, for either delay, and then left alone, as "
        "is Algorithm 1's. At L = σ = 1 itself the excess loss over the order of the bound is "
        + ", and ".join(f"{without:.2g} (no delay) and {late:.2g} (√T) for {TITLES[rule]}"
                        for rule, (without, late) in values.items())
        + ": a tuned constant step exploits that the quadratic is strongly convex. The figure shows what happens to it "
        "elsewhere."
    )  # fmt: skip


def text(config: Config, points: Sequence[Point]) -> tuple[str, ...]:
    """What was run, where its constants come from, and what the numbers say beyond the verdicts."""
    shown = "; ".join(
        f"{c['problem']}: L = {c['L']:.3g}, H = {c['H']:.3g}, G = {c['G']:.3g}, σ = {c['sigma']:.3g}"
        for c in _constants(points)
    )
    return (
        "Measured excess losses, held against the four theorems with the explicit constants of `lategrad.theory`, on "
        f"the ball of radius {RADIUS:g} (D = {D:g}). Algorithm 1 uses its theorem's step D/G̃, Algorithm 2 knows D "
        f"only, Algorithms 3 and 4 know H only. Means are over {config.seeds} seeds on the quadratic and "
        f"{config.least_squares_seeds} on least squares; error bars are two standard errors.",
        f"Two problems. A noisy quadratic in {DIM} dimensions with its optimum inside the ball. Least squares on the "
        f"digits, even against odd, features centred, batch {BATCH}: for Theorems 1 and 2 without a penalty, not "
        "strongly convex, its optimum on the sphere; for Theorems 3 and 4 with the penalty that makes "
        f"L/H = {L_OVER_H:g}, its optimum inside. The minimum over the ball is known to 1e-9. {shown}.",
        "L and H are exact. G and σ are bounds that hold all over the ball, proved, not estimated: on the quadratic "
        "G = L(r + ‖x*‖), and σ is exact; on least squares, by the triangle inequality, G = ‖∇f(0)‖ + Lr, and σ is the "
        "root mean square of the length of a row's gradient, bounded in the same way, over the root of the batch.",
        "After T updates Algorithms 1 and 2 return x_{T+1}, so their bounds are taken at T + 1; Algorithms 3 and 4 "
        "return the weighted average of x_1, ..., x_T. Delays are constant but for the start, where τ_t ≤ t - 1; their "
        "mean, start included, is what is shown and what enters the bounds.",
        "The theorems promise orders. The factors and tolerances in the criteria are ours, chosen after small pilot "
        "runs; that the explicit bounds hold needs none.",
        "Theorem 4's explicit bound is far from tight, and its rate starts late: the steps of Algorithm 4, 24/(Ht), "
        f"are too long for a delay of √T until T has passed (24 L/H)² or so, here {(24 * L_OVER_H) ** 2:,.0f}; that is "
        f"why L/H is only {L_OVER_H:g} here. Until then the excess loss at a delay of √T is nearly flat, then it "
        "catches up. A slope fitted from before on includes the catching up and is steeper than the rate.",
        _about_delays(points),
        _about_noise(points),
        _about_constants(points),
    )


CAPTIONS = {
    "theorems-quadratic": "Noisy quadratic: mean excess loss and the theorems' bounds over the number of updates.",
    "theorems-least-squares": "Least squares on the digits: mean excess loss and the theorems' bounds.",
    "theorems-delay": "The price of delays: excess loss relative to no delay, over the mean delay in units of √T. "
    f"Dotted: a delay of √T, and the factor of {NO_DEGRADATION:g} of the criterion. Stars: one gradient in ten 10√T "
    "late, the others on time.",
    "theorems-noise": "Excess loss over the noise on the quadratic, and the theorems' noise terms without constants.",
    "theorems-constants": "Excess loss divided by the order of Theorem 2's bound, relative to that at L = σ = 1, where "
    "the fixed steps were chosen: over L at the worst σ, and over σ at the worst L. Dotted: the criterion's "
    f"{INDEPENDENT:g}.",
}


def section(scale: str, *, device: str = "cpu", progress: Report | None = None) -> Section:
    """Run everything at a scale ("quick", "paper" or "full") and judge it."""
    return section_of(Config.of(scale), device=device, progress=progress)


def section_of(config: Config, *, device: str = "cpu", progress: Report | None = None) -> Section:
    """The same for a configuration of one's own."""
    points = run(config, device, progress)
    return Section(
        name="theorems",
        title="Theorems 1 to 4, measured",
        text=text(config, points),
        figures=plot(points),
        captions=dict(CAPTIONS),
        rows=[asdict(point) for point in points],
        verdicts=verdicts(points),
        config={**asdict(config), "D": D, "batch": BATCH, "dim": DIM, "constants": _constants(points)},
    )
