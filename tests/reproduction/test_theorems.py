"""The theorems' section: its numbers are what they claim to be, and its verdicts can come out both ways."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from lategrad.delays import Constant
from lategrad.simulator import simulate
from reproduction.theorems import measure as problems
from reproduction.theorems import verdicts
from reproduction.theorems.measure import (
    ANYTIME,
    CONSTANT,
    ONE_IN_TEN,
    OPTIMISTIC,
    PLANS,
    SGD_AVERAGE,
    STRONGLY_CONVEX,
    D,
    Pattern,
    Point,
    TheoremPlan,
    measure_points,
    points_of,
)
from reproduction.theorems.study import section_of

TINY = TheoremPlan(
    quadratic_horizons=(16, 32, 64, 128, 256),
    least_squares_horizons=(16, 32, 64, 128, 256),
    noise_horizons=(16, 64, 256),
    constants_horizon=64,
    sigmas=(0.0, 0.1, 1.0),
    scales=(0.1, 1.0, 10.0),
    seeds=4,
    least_squares_seeds=3,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def section(out):
    return section_of(TINY, out)


# ---- a small run


def test_section_is_complete(section):
    assert section.name == "theorems"
    assert {verdict.figure for verdict in section.verdicts} <= set(section.figures)
    assert section.figures.keys() == section.captions.keys()
    assert all(row.keys() == section.rows[0].keys() for row in section.rows)
    assert all(math.isfinite(row["excess"]) and math.isfinite(row["spread"]) for row in section.rows)
    assert {row["panel"] for row in section.rows} == {"delay", "noise", "constants"}
    assert {row["theorem"] for row in section.rows} == {None, 1, 2, 3, 4}
    assert json.loads(json.dumps(section.config))["seeds"] == 4
    assert len({verdict.claim for verdict in section.verdicts}) == len(section.verdicts) == 15


def test_bounds_hold(section):
    bounded = [row for row in section.rows if row["bound"] is not None]
    assert len(bounded) > 300
    assert all(row["excess"] <= row["bound"] for row in bounded)
    assert all(verdict.holds is not False for verdict in section.verdicts if "bound holds" in verdict.claim)


def test_what_was_measured_is_not_measured_again(section, out):
    files = sorted((out / "traces").iterdir())
    before = [path.stat().st_mtime_ns for path in files]
    assert section_of(TINY, out).rows == section.rows
    assert [path.stat().st_mtime_ns for path in files] == before


def test_other_choices_are_measured_again(tmp_path):
    first, again = (points_of(f"{ANYTIME}-noise", replace(TINY, seeds=seeds), tmp_path) for seeds in (2, 3))
    assert {point.seeds for point in first} == {2}
    assert {point.seeds for point in again} == {3}


def test_figures_can_be_drawn(section, tmp_path):
    for stem, figure in section.figures.items():
        figure.savefig(tmp_path / f"{stem}.png", dpi=50)
        assert all(ax.has_data() for ax in figure.axes)


def test_a_horizon_of_a_long_run_is_a_run_of_its_own():
    """The T-th record of a simulation with many delays and noises is that of T updates with one of each."""
    setting = problems.quadratic([(1.0, 0.1), (10.0, 1.0)])
    patterns = [Pattern(CONSTANT, 0), Pattern(CONSTANT, 8)]
    for name in (ANYTIME, OPTIMISTIC):
        rule = problems.rule_for(name, setting.constants)
        points = measure_points("delay", setting, name, rule, patterns, [32, 64, 128], seeds=3)
        (point,) = verdicts.select(points, T=64, delay=8, sigma=1.0)
        alone = problems.quadratic([(10.0, 1.0)])
        rule = problems.rule_for(name, alone.constants)
        trace = simulate(alone.problem, rule, Constant(8), 64, seed=[0, 1, 2], progress=False)
        assert point.L == 10.0
        assert point.excess == pytest.approx(trace.loss[-1].mean().item(), rel=1e-9)
        assert point.mean_delay == pytest.approx(trace.delays.double().mean().item())


def test_one_in_ten_has_the_mean_of_a_constant_delay():
    delays = Pattern(ONE_IN_TEN, 16).model().draw(10_000, seed=0).delays
    assert delays.double().mean().item() == pytest.approx(16, rel=0.02)
    assert delays.max() == 160


@pytest.mark.parametrize("config", PLANS.values(), ids=PLANS)
def test_scales_fit_together(config):
    assert 1.0 in config.scales
    assert config.sigmas[0] == 0
    for horizons in (config.quadratic_horizons, config.least_squares_horizons, config.noise_horizons):
        assert all(T % horizons[0] == 0 for T in horizons)
        assert math.isqrt(horizons[-1]) ** 2 == horizons[-1]
    longest = min(config.quadratic_horizons[-1], config.least_squares_horizons[-1])
    assert longest >= (24 * problems.L_OVER_H) ** 2  # else Theorem 4's threshold cannot be judged


# ---- the constants


@pytest.mark.parametrize("strongly_convex", [False, True])
def test_least_squares_constants_hold_all_over_the_ball(strongly_convex):
    setting = problems.least_squares(strongly_convex)
    (c,), problem = setting.constants, setting.problem
    if strongly_convex:
        assert pytest.approx(problems.L_OVER_H) == c.L / c.H
    rows, targets = problem.train, problem.targets[:, 0]
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(50, problem.dim, generator=generator, dtype=torch.float64)
    _, vectors = torch.linalg.eigh(rows.mT @ rows)
    for x in torch.cat([directions, vectors[:, -1:].mT, -vectors[:, -1:].mT]):  # the steepest ones too
        x = problems.RADIUS * x / x.norm()
        value, gradient = problem.value_and_gradient(x)
        each = (rows @ x - targets).unsqueeze(-1) * rows
        variance = (each.square().sum(-1).mean() - each.mean(0).square().sum()) / problems.BATCH
        assert gradient.norm() <= c.G
        assert variance <= c.sigma**2
        assert value >= setting.best


def test_quadratic_constants():
    setting = problems.quadratic([(1.0, 0.5), (4.0, 2.0)])
    x = -setting.problem.optimum / setting.problem.optimum.norm() * problems.RADIUS  # the far end of the ball
    silent = setting.problem.gradient(x.expand(1, 2, -1), torch.zeros(1, problems.DIM, dtype=torch.float64))[0]
    for c, gradient, curvatures in zip(setting.constants, silent, setting.problem.curvatures, strict=True):
        assert gradient.norm() <= c.G
        assert (curvatures.max().item(), curvatures.min().item()) == (c.L, c.H)
    assert setting.problem.loss(setting.problem.optimum.expand(2, -1)).max() == setting.best


# ---- verdicts on made-up numbers

HORIZONS = (64, 256, 1024, 4096, 16384)
FLAT = Point("delay", "quadratic", ANYTIME, 1, 64, CONSTANT, 0, 0.0, 1.0, 0.5, 1.6, 1.0, 16, 1.0, 0.0, 20.0, 10.0)


def late_points(rule, excess):
    """Points of the delay panel whose excess is a function of T and the delay."""
    points = []
    for T in HORIZONS:
        for delay in [0, *(2**k for k in range(int(math.log2(T))))]:
            theorem = problems.theorem_for("delay", rule, delay)
            points.append(replace(FLAT, rule=rule, theorem=theorem, T=T, delay=delay, mean_delay=float(delay),
                                  excess=excess(T, delay)))  # fmt: skip
        root = math.isqrt(T)
        points.append(replace(points[-1], delays=ONE_IN_TEN, delay=root, mean_delay=float(root),
                              excess=excess(T, 10 * root)))  # fmt: skip
    return points


def test_bound_verdict_both_ways():
    assert verdicts.bound_verdict([FLAT], 1).holds
    assert not verdicts.bound_verdict([FLAT, replace(FLAT, excess=11.0)], 1).holds
    assert not verdicts.bound_verdict([replace(FLAT, excess=9.0, spread=4.0)], 1).holds  # 9 + 2 * 4/4 > 10


def test_a_bound_that_nothing_could_break_does_not_count():
    vacuous = replace(FLAT, worst=9.0)
    verdict = verdicts.bound_verdict([FLAT, vacuous], 1)
    assert verdict.holds
    assert "1 of 2 settings counted" in verdict.measured
    nothing = verdicts.bound_verdict([vacuous], 1)
    assert nothing.holds is None
    assert "0 of 1 settings counted" in nothing.measured


@pytest.mark.parametrize("setting", [problems.quadratic([(1.0, 0.5), (4.0, 2.0)]), problems.least_squares(True)])
def test_the_largest_excess_is_that_of_a_point_and_no_point_found_is_worse(setting):
    worst = problems.largest_excess(setting)
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(500, len(setting.constants), setting.problem.dim, generator=generator, dtype=torch.float64)
    losses = setting.problem.loss(problems.RADIUS * points / points.norm(dim=-1, keepdim=True)).squeeze(-1)
    assert all((losses.amax(0) - setting.best) <= torch.tensor(worst) + 1e-9)
    if setting.name == "quadratic":
        assert worst[1] == pytest.approx(4 * worst[0])
        c = setting.constants[0]
        assert worst[0] <= c.L / 2 * (problems.RADIUS + problems.OPTIMUM_LENGTH) ** 2 + 1e-9


@pytest.mark.parametrize("theorem", [1, 2, 3, 4])
@pytest.mark.parametrize(("off", "holds"), [(-0.3, True), (0.05, True), (0.2, False)])
def test_rate_verdict_both_ways(theorem, off, holds):
    rule = {1: ANYTIME, 2: OPTIMISTIC, 3: STRONGLY_CONVEX, 4: STRONGLY_CONVEX}[theorem]
    power = verdicts.PROMISED[theorem] + off
    verdict = verdicts.rate_verdict(late_points(rule, lambda T, delay: T**power), theorem)
    assert verdict.holds is holds
    assert f"{power:.2f}" in verdict.measured


@pytest.mark.parametrize("rule", problems.RULES)
@pytest.mark.parametrize(
    ("price", "holds"),
    [
        (lambda T, delay: 1 + delay / math.sqrt(T), True),
        (lambda T, delay: 1 + 10 * delay / math.sqrt(T), False),  # √T is dear
        (lambda T, delay: 1 + delay / T**0.25, False),  # and dearer with every T
        (lambda T, delay: 1 + min(delay / math.sqrt(T), 1), False),  # nothing happens beyond
        (lambda T, delay: 1 + delay / 8, False),  # the threshold does not move
    ],
)
def test_threshold_verdict_both_ways(rule, price, holds):
    points = late_points(rule, lambda T, delay: price(T, delay) / math.sqrt(T))
    assert verdicts.threshold_verdict(points, rule).holds is holds


def test_algorithm_4_is_judged_past_its_start_only():
    def price(T, delay):
        return 1 + delay / math.sqrt(T) * (100 if T < (24 * problems.L_OVER_H) ** 2 else 1)

    assert verdicts.threshold_verdict(late_points(STRONGLY_CONVEX, price), STRONGLY_CONVEX).holds
    assert not verdicts.threshold_verdict(late_points(ANYTIME, price), ANYTIME).holds
    short = [point for point in late_points(STRONGLY_CONVEX, price) if point.T <= 1024]
    verdict = verdicts.threshold_verdict(short, STRONGLY_CONVEX)
    assert verdict.holds is None
    assert "no horizon long enough" in verdict.measured


def test_doubling_delay_is_interpolated():
    points = [replace(FLAT, delay=k, mean_delay=float(k), excess=1 + k / 10) for k in (0, 4, 8, 16)]
    assert verdicts.doubling_delay(points) == pytest.approx(10)
    assert verdicts.doubling_delay(points[:3]) == 8  # never reached: the largest


@pytest.mark.parametrize(("bursts", "holds"), [(1.2, True), (1.8, False)])
def test_average_delay_verdict_both_ways(bursts, holds):
    points = late_points(ANYTIME, lambda T, delay: 1.0)
    points = [replace(point, excess=bursts) if point.delays == ONE_IN_TEN else point for point in points]
    assert verdicts.average_delay_verdict(points).holds is holds


@pytest.mark.parametrize("theorem", [2, 3])
@pytest.mark.parametrize(("power", "share", "holds"), [(-4, 0.5, True), (-1, 0.5, False), (-4, 5.0, False)])
def test_noise_verdict_both_ways(theorem, power, share, holds):
    rule = {2: OPTIMISTIC, 3: STRONGLY_CONVEX}[theorem]
    points = []
    for T in HORIZONS:
        for sigma in (0.0, 0.1, 1.0):
            point = replace(FLAT, panel="noise", rule=rule, T=T, sigma=sigma)
            points.append(replace(point, excess=float(T) ** power + share * verdicts.noise_term(point)))
    assert verdicts.noise_verdict(points, theorem).holds is holds


def test_fall_without_noise_ends_at_rounding():
    points = [replace(FLAT, T=T, sigma=0.0, excess=max(T**-5.0, 0.0) if T < 1024 else 0.0) for T in HORIZONS]
    assert verdicts.fall_without_noise(points) < -4
    assert verdicts.fall_without_noise(points[-2:]) == -math.inf


def constants_points(rule, ratio):
    """Points of the constants panel whose excess is ``ratio(L, sigma)`` times the order of the bound."""
    points = []
    for delay in (0, 32):
        for L in (0.1, 1.0, 10.0):
            for sigma in (0.1, 1.0, 10.0):
                size = problems.order(1024, delay, L, sigma)
                points.append(replace(FLAT, panel="constants", rule=rule, T=1024, delay=delay, mean_delay=float(delay),
                                      L=L, sigma=sigma, excess=ratio(L, sigma) * size))  # fmt: skip
    return points


@pytest.mark.parametrize(("ours", "theirs", "holds"), [(3.0, 300.0, True), (30.0, 300.0, False), (3.0, 3.0, False)])
def test_independence_verdict_both_ways(ours, theirs, holds):
    points = [
        point
        for rule, worst in ((OPTIMISTIC, ours), (ANYTIME, 5.0), (SGD_AVERAGE, theirs))
        for point in constants_points(
            rule, lambda L, sigma, worst=worst: 0.1 * (worst if (L, sigma) == (10, 0.1) else 1)
        )
    ]
    verdict = verdicts.independence_verdict(points)
    assert verdict.holds is holds
    assert "2 decades" in verdict.criterion


def test_order_of_the_bound():
    assert problems.order(T=100, mu=5.0, L=2.0, sigma=3.0) == pytest.approx(
        2 * D**2 / 1000 + 2 * D**2 * 0.05 + 3 * D / 10
    )


def test_rows_are_plain(section):
    assert set(section.rows[0]) == set(asdict(FLAT))
    assert not any(isinstance(value, torch.Tensor | np.generic) for row in section.rows for value in row.values())
