"""The theorems, measured: rates and explicit bounds on a noisy quadratic with a known optimum."""

import math

import pytest
import torch

import lategrad as lg
from lategrad import theory
from lategrad.theory import DelayStatistics

SEEDS, DIM = 64, 8
L, H, SIGMA, RADIUS = 1.0, 0.5, 1.0, 1.0
D = 2 * RADIUS
CURVATURES = torch.linspace(H, L, DIM, dtype=torch.float64)
OPTIMUM = torch.full((DIM,), 0.6 / math.sqrt(DIM), dtype=torch.float64)
G = L * (RADIUS + 0.6)  # |A (x - x*)| <= L |x - x*|
HORIZONS = [256, 512, 1024, 2048, 4096, 8192]  # from where (24 L / H)^2 has been passed on the way


def excess(x):
    return 0.5 * (CURVATURES * (x - OPTIMUM) ** 2).sum(-1)


def mean_excess(rule, steps, tau, point, sigma=SIGMA):
    """Average over seeds of f - f* at the rule's `point` after `steps` updates with delay `tau`."""
    noise = torch.Generator().manual_seed(0)
    state = rule.init(torch.zeros(SEEDS, DIM, dtype=torch.float64))
    queries = [rule.query(state)]
    for t in range(1, steps + 1):
        stale = queries[t - 1 - min(tau, t - 1)]
        xi = torch.randn(SEEDS, DIM, generator=noise, dtype=torch.float64) * sigma / math.sqrt(DIM)
        state = rule.update(state, CURVATURES * (stale - OPTIMUM) + xi, torch.tensor(tau))
        queries.append(rule.query(state))
    x = queries[-2] if point == "x_T" else rule.output(state)
    return excess(x).mean().item()


def statistics(tau, steps):
    return theory.delay_statistics(torch.arange(steps).clamp_max(tau))


def bound_1(steps, tau):
    regret = theory.ogd_regret(steps, D=D, gradient=theory.gradient_bound(G, SIGMA))
    return theory.theorem_1(steps, L=L, D=D, mu=statistics(tau, steps).mu, regret=regret)


def bound_2(steps, tau):
    return theory.theorem_2(steps, L=L, D=D, G=G, sigma=SIGMA, delays=statistics(tau, steps))


def bound_3(steps, tau):
    return theory.theorem_3(steps, L=L, H=H, D=D, G=G, sigma=SIGMA)


def bound_4(steps, tau):
    return theory.theorem_4(steps, L=L, H=H, D=D, G=G, sigma=SIGMA, delays=statistics(tau, steps))


DOMAIN = lg.Ball(RADIUS)
CASES = {
    "theorem 1": (lg.Anytime(lg.OGD(D / theory.gradient_bound(G, SIGMA), DOMAIN)), "x_T", bound_1, -0.5),
    "theorem 2": (lg.Anytime(lg.OptimisticOGD(D, DOMAIN)), "x_T", bound_2, -0.5),
    "theorem 3": (lg.StronglyConvexOGD(H, DOMAIN), "output", bound_3, -1.0),
    "theorem 4": (lg.StronglyConvexOGD(H, DOMAIN), "output", bound_4, -1.0),
}
SLOPE_TOLERANCE = 0.1  # the fit over 64 seeds and five doublings of T is good to a few hundredths


LARGEST = 0.5 * L * (RADIUS + 0.6) ** 2  # no point of the ball has a larger excess
BINDING = [
    ("theorem 1", 1024, 0), ("theorem 1", 8192, 90), ("theorem 2", 2048, 0), ("theorem 2", 8192, 90),
    ("theorem 3", 4096, 0), ("theorem 4", 8192, 0), ("theorem 4", 8192, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "steps", "tau"), BINDING)
def test_the_bound_holds_where_it_could_be_broken(name, steps, tau):
    """At these settings a wrong rule could be above the bound, which is below the largest excess of the set."""
    rule, point, bound, _ = CASES[name]
    assert mean_excess(rule, steps, tau, point) <= bound(steps, tau) < LARGEST


def test_the_bound_of_theorem_1_is_broken_by_a_rule_that_stays_where_it_is():
    assert mean_excess(lg.SGD(0.0, DOMAIN), 8192, 0, "output") > bound_1(8192, 0)


def test_late_gradients_count_by_when_they_come():
    """Theorem 4 knows the sum of (tau_t + 2)^2/t; without it, tau_t < t bounds it."""
    delays = torch.arange(8192).clamp_max(90)
    known = theory.delay_statistics(delays.tolist())
    assert known.early == pytest.approx(sum((min(t, 90) + 2) ** 2 / (t + 1) for t in range(8192)))
    assert known.early <= 2 * 8192 * (known.mu + 2)
    common = {"L": L, "H": H, "D": D, "G": G, "sigma": SIGMA}
    unknown = DelayStatistics(known.mu, known.sigma)
    assert theory.theorem_4(8192, **common, delays=known) < theory.theorem_4(8192, **common, delays=unknown)


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True], ids=["no delay", "delay sqrt(T)"])
@pytest.mark.parametrize(
    "name", ["theorem 1", *(pytest.param(f"theorem {i}", marks=pytest.mark.slow) for i in (2, 3, 4))]
)
def test_rate_and_bound(name, late):
    rule, point, bound, promised = CASES[name]
    if late and name == "theorem 3":
        name, bound = "theorem 4", bound_4  # Algorithm 3 is Algorithm 4 without delays
    delays = [math.isqrt(T) if late else 0 for T in HORIZONS]
    measured = [mean_excess(rule, T, tau, point) for T, tau in zip(HORIZONS, delays, strict=True)]
    for T, tau, value in zip(HORIZONS, delays, measured, strict=True):
        assert value <= bound(T, tau), f"{name}: {value} above the bound at T = {T}"
    x, y = torch.tensor(HORIZONS).log(), torch.tensor(measured).log()
    slope = (((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()).item()
    assert slope <= promised + SLOPE_TOLERANCE, f"{name}: the excess falls as T^{slope:.2f}"


def test_a_rule_that_is_not_delay_robust_fails_the_rate():
    """SGD with a step of 1/L diverges to the boundary under a delay of sqrt(T): the test above can fail."""
    rule = lg.SGD(1 / L, DOMAIN)
    first, last = (mean_excess(rule, T, math.isqrt(T), "output") for T in (64, 1024))
    assert last > first * (1024 / 64) ** -0.4


def test_theorem_3_without_noise_is_quadratic():
    """Without noise Theorem 3 promises O(1/T^2)."""
    rule = lg.StronglyConvexOGD(H, DOMAIN)
    early, late = (mean_excess(rule, T, 0, "output", sigma=0.0) for T in (512, 2048))
    assert late <= early * (2048 / 512) ** -1.9


def test_bounds_grow_with_everything_that_makes_the_problem_harder():
    base = {"L": 2.0, "H": 0.5, "D": 1.0, "G": 3.0, "sigma": 1.0}
    delays = DelayStatistics(mu=20.0, sigma=5.0)
    later = DelayStatistics(mu=40.0, sigma=5.0)

    def no_h(**values):
        return {key: value for key, value in values.items() if key != "H"}

    for harder in ({"L": 4.0}, {"D": 2.0}, {"G": 6.0}, {"sigma": 2.0}):
        args = base | harder
        assert theory.theorem_2(1000, **no_h(**args), delays=delays) > theory.theorem_2(
            1000, **no_h(**base), delays=delays
        )
        assert theory.theorem_3(1000, **args) > theory.theorem_3(1000, **base)
        assert theory.theorem_4(1000, **args, delays=delays) > theory.theorem_4(1000, **base, delays=delays)
    assert theory.theorem_2(1000, **no_h(**base), delays=later) > theory.theorem_2(1000, **no_h(**base), delays=delays)
    assert theory.theorem_4(1000, **base, delays=later) > theory.theorem_4(1000, **base, delays=delays)


def test_theorem_2_forgets_delays_up_to_the_square_root_of_the_horizon():
    """With mu = sqrt(T) the delay terms are of the order of the noise term, so the ratio stays bounded."""

    def ratio(T):
        late = DelayStatistics(mu=math.sqrt(T), sigma=0.0)
        none = DelayStatistics(mu=0.0, sigma=0.0)
        common = {"L": 1.0, "D": 1.0, "G": 1.0, "sigma": 1.0}
        return theory.theorem_2(T, **common, delays=late) / theory.theorem_2(T, **common, delays=none)

    assert ratio(10**8) < 1.05 * ratio(10**6)


def test_unknown_power_is_refused():
    with pytest.raises(ValueError, match="power must be 0 or 1"):
        theory.ogd_regret(10, D=1.0, gradient=1.0, power=2)


def test_the_regret_of_algorithm_4_by_hand():
    """H = 6: eta_1 = 4/3 and eta_2 = 4/15, hence 3/4 + 2/3 + 128/15 + 2 * 3 * (9 + 1); x_1's distances do not enter."""
    regret = theory.strongly_convex_regret(
        6.0,
        1.0,
        surprise=torch.tensor([1.0, 2.0]),
        to_comparator=torch.tensor([9.0, 3.0]),
        ahead=torch.tensor([9.0, 1.0]),
    )
    assert regret == pytest.approx(3 / 4 + 2 / 3 + 128 / 15 + 60)


@pytest.mark.parametrize("delays", [[0, -1], [], [[0, 1]], 3])
def test_statistics_are_of_a_list_of_delays(delays):
    with pytest.raises(ValueError, match="delays must be a list of numbers >= 0"):
        theory.delay_statistics(delays)
