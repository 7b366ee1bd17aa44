"""Theorem A of docs/theory-online.md, step by step, and its bound on a function with known constants."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lategrad as lg
from lategrad import theory

TOLERANCE = 1e-9
DIM = 3
fast = settings(max_examples=40, deadline=None)
vectors = st.lists(st.lists(st.floats(-5, 5), min_size=DIM, max_size=DIM), min_size=4, max_size=24).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)
positive = st.floats(0.01, 3.0)


def clip(v, radius):
    return v * (radius / v.norm(dim=-1, keepdim=True).clamp_min(radius))


def dot(u, v):
    return (u * v).sum(-1)


def run(rule, x0, asked, gradient, at="query"):
    """Points x_1, x_2, ..., and the queries w_n; update n gets `gradient(w, n)` of the query of update `asked[n]`."""
    state = rule.init(x0)
    points, queries = [rule.query(state)], []
    for n, of in enumerate(asked):
        queries.append(rule.query(state) if at == "query" else state.x)
        state = rule.update(state, gradient(queries[of], n), torch.tensor(n - of))
        points.append(state.x)
    return torch.stack(points), torch.stack(queries)


def by_workers(arrivals, workers):
    """The query of each update when worker `arrivals[n]` finishes at update n and takes the next query with it."""
    holds, asked = [0] * workers, []
    for n, worker in enumerate(arrivals):
        asked.append(holds[worker])
        holds[worker] = n + 1
    return asked


def delays(asked):
    return torch.arange(len(asked)) - torch.tensor(asked)


def matched(asked, first, last):
    """Updates of the period first .. last - 1 with the first gradient of a query of the same period."""
    seen, pairs = set(), []
    for n in range(first, last):
        if asked[n] >= first and asked[n] not in seen:
            seen.add(asked[n])
            pairs.append(n)
    return pairs


# ---- Step 2: the learner


@fast
@given(vectors, vectors, positive, positive)
def test_the_learner_has_the_regret_of_dual_averaging(grads, others, lr, D):
    rule = lg.OnlineToNonconvex(lr, D, period=len(grads) + 1)
    points, _ = run(rule, torch.zeros(DIM, dtype=torch.float64), range(len(grads)), lambda w, n: grads[n])
    steps, u = points.diff(dim=0), clip(others[0], D)
    bound = u.norm() ** 2 / (2 * lr) + lr / 2 * (grads**2).sum()
    assert dot(grads, steps - u).sum() <= bound + TOLERANCE * (1 + bound)
    assert (steps.norm(dim=-1) <= D * (1 + TOLERANCE)).all()


def test_the_regret_and_the_drift_are_met_with_equality():
    """Gradients that are all the same: no constant of steps 2 and 4 can be smaller."""
    K, lr, tau = 10, 0.1, 3
    g, D = torch.tensor([1.0], dtype=torch.float64), 1.0  # D = lr K G
    points, _ = run(lg.OnlineToNonconvex(lr, D, period=K + 1), 0 * g, range(K), lambda w, n: g)
    steps = points.diff(dim=0)
    assert dot(g, steps + D).sum().item() == pytest.approx(D**2 / (2 * lr) + lr * K / 2)
    drift = sum(dot(g, steps[n - tau] - steps[n]).item() for n in range(tau, K))
    assert drift == pytest.approx(lr * tau * (K - tau))


# ---- Steps 3 to 5: late, missing and extra gradients


def second_period(exact, noise, asked, lr, D):
    """The regret of the second of two periods, and the terms that bound it, the last one per unmatched update."""
    K = len(exact) // 2
    points, _ = run(lg.OnlineToNonconvex(lr, D, K), exact[0], asked, lambda w, n: exact[asked[n]] + noise[n])
    steps, G, u = points.diff(dim=0), exact.norm(dim=-1).max(), clip(-1e6 * exact[K:].sum(0), D)
    received, pairs = exact[asked] + noise, matched(asked, K, 2 * K)
    drifts = [received[asked[n] : n].sum(0).norm() for n in pairs]
    for n, drift in zip(pairs, drifts, strict=True):
        assert (steps[n] - steps[asked[n]]).norm() <= lr * drift + TOLERANCE
    terms = {
        "learning": D**2 / (2 * lr) + lr / 2 * (received[K:] ** 2).sum().item(),
        "late": lr * G.item() * float(sum(drifts)),
        "fresh": (-dot(noise[K:], steps[K:]).sum() + noise[K:].sum(0) @ u).item(),
        "unmatched": 4 * D * G.item() * (K - len(pairs)),
    }
    return dot(exact[K:], steps[K:] - u).sum().item(), terms


@fast
@given(st.data(), vectors, vectors, positive, positive)
def test_the_regret_with_any_late_missing_and_extra_gradients(data, exact, noise, lr, D):
    """Gradients of the first period arrive in the second; some queries have several, some none."""
    K = min(len(exact), len(noise)) // 2
    exact, noise = exact[: 2 * K], noise[: 2 * K]
    asked = [data.draw(st.integers(0, n)) for n in range(2 * K)]
    regret, terms = second_period(exact, noise, asked, lr, D)
    assert regret <= sum(terms.values()) + 1e-7


def row(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_losses_that_turn_when_the_learner_hears_of_them_need_the_term_for_what_is_late():
    """Signs that stay for twice the delay: the learner's sum of gradients is a quarter of a wave behind, always."""
    W, K = 7, 560
    exact = row([1.0 if n // (2 * W) % 2 else -1.0 for n in range(2 * K)])
    asked, lr = [max(0, n - W) for n in range(2 * K)], 1 / math.sqrt(K)
    regret, terms = second_period(exact, 0 * exact, asked, lr, 1.0)
    assert sum(terms.values()) - terms["late"] < regret <= sum(terms.values())
    known = {"D": 1.0, "lr": lr, "G": 1.0, "sigma": 0.0, "unmatched": W}
    assert theory.online_regret(K, W=0, **known) < regret <= theory.online_regret(K, W=W, **known)


def test_noise_that_hides_the_gradient_needs_the_term_for_the_noise():
    """The learner receives 0 and stays, which costs D at every update."""
    K, lr = 20, 0.1
    regret, terms = second_period(row([1.0] * 2 * K), row([-1.0] * 2 * K), range(2 * K), lr, 1.0)
    assert regret == pytest.approx(K)
    assert sum(terms.values()) - terms["fresh"] < regret <= sum(terms.values())


def test_gradients_of_the_period_before_need_the_term_for_what_is_unmatched():
    """All of them point the wrong way. The term's 4 could not be 1; whether it could be 2 is not known."""
    K = 12
    exact = row([-1.0] * K + [1.0] * K)
    asked, lr = [n if n < K else n - K for n in range(2 * K)], 1 / math.sqrt(K)
    regret, terms = second_period(exact, 0 * exact, asked, lr, 1.0)
    assert regret == pytest.approx(21.7, abs=0.05)
    assert terms["late"] == terms["fresh"] == 0
    assert terms["learning"] + terms["unmatched"] / 4 < regret <= terms["learning"] + terms["unmatched"]
    known = {"D": 1.0, "lr": lr, "G": 1.0, "sigma": 0.0, "W": 0}
    assert theory.online_regret(K, unmatched=K / 4, **known) < regret <= theory.online_regret(K, unmatched=K, **known)


@fast
@given(st.integers(1, 6), st.data(), st.integers(2, 9))
def test_workers_leave_at_most_w_queries_unmatched_and_their_delays_sum_to_wk(workers, data, K):
    arrivals = data.draw(st.lists(st.integers(0, workers - 1), min_size=3 * K, max_size=3 * K))
    asked = by_workers(arrivals, workers)
    W = theory.largest_in_flight(delays(asked))
    assert workers > W
    for first in range(0, 3 * K, K):
        pairs = matched(asked, first, first + K)
        assert K - len(pairs) <= W
        assert sum(n - asked[n] for n in pairs) <= W * K


def test_delays_that_no_workers_have_can_leave_half_of_the_queries_without_a_gradient():
    asked = [n - n % 2 for n in range(40)]
    assert theory.largest_in_flight(delays(asked)) == 1
    assert 40 - len(matched(asked, 0, 40)) == 20


# ---- Step 6: expectations, exactly: all signs of the noise are runs


def w_shape(x):
    """A non-convex, non-smooth function with Lipschitz constant 1 and infimum 0."""
    return (x.abs() - 1).abs().sum(-1) / math.sqrt(x.shape[-1])


def w_gradient(x):
    return x.sign() * (x.abs() - 1).sign() / math.sqrt(x.shape[-1])


def all_signs(K):
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=K)), dtype=torch.float64)


def enumerate_period(W, sigma, lr, D, K=9, flip=1.0):
    """One period at a constant delay of W, with noise of norm sigma along a direction that depends on the query."""
    signs = all_signs(K)
    asked = [max(0, n - W) for n in range(K)]
    noise = []

    def gradient(w, n):
        direction = torch.stack([(7 * w[:, 0]).cos(), (7 * w[:, 0]).sin()], dim=-1)
        noise.append(sigma * signs[:, n, None] * direction)
        return flip * (w_gradient(w) + noise[n])

    x0 = torch.tensor([0.4, 1.1], dtype=torch.float64).expand(len(signs), 2)
    points, queries = run(lg.OnlineToNonconvex(lr, D, period=K), x0, asked, gradient)
    return points.diff(dim=0), w_gradient(queries), torch.stack(noise)


@pytest.mark.parametrize("W", [0, 1, 3, 6])
@pytest.mark.parametrize(("sigma", "D", "lr"), [(0.0, 0.3, 0.1), (1.0, 0.3, 0.05), (3.0, 0.1, 0.3), (0.3, 2.0, 1.0)])
def test_noise_is_fresh_and_the_expected_regret_is_bounded(W, sigma, D, lr):
    K = 9
    steps, gradients, noise = enumerate_period(W, sigma, lr, D, K)
    assert dot(noise, steps).sum(0).mean().item() == pytest.approx(0, abs=1e-12)
    assert noise.sum(0).norm(dim=-1).mean() <= sigma * math.sqrt(K) + TOLERANCE
    for q, n in itertools.combinations(range(K), 2):
        assert noise[q:n].sum(0).norm(dim=-1).mean() <= sigma * math.sqrt(n - q) + TOLERANCE
    u = clip(-1e6 * gradients.sum(0), D)  # the best comparator of each run, which knows the noise
    regret = dot(gradients, steps - u).sum(0).mean().item()
    assert regret <= theory.online_regret(K, D=D, lr=lr, G=1.0, sigma=sigma, W=W, unmatched=W)


def test_a_learner_that_climbs_breaks_the_bound_on_the_regret():
    D, sigma = 0.1, 0.1
    lr = D / (theory.online_scale(1.0, sigma, 0) * 3)
    bound = theory.online_regret(9, D=D, lr=lr, G=1.0, sigma=sigma, W=0, unmatched=0)
    regrets = []
    for flip in (1.0, -1.0):
        steps, gradients, _ = enumerate_period(0, sigma, lr, D, flip=flip)
        regrets.append(dot(gradients, steps - clip(-1e6 * gradients.sum(0), D)).sum(0).mean().item())
    assert regrets[0] <= bound < regrets[1]


def test_losses_that_keep_their_sign_for_a_delay_break_the_bound_without_the_delay():
    """Signs that are drawn anew once in 1 + W updates: the learner hears of each when it is over."""
    K, W, D = 2048, 15, 1.0
    signs = torch.randint(0, 2, (K // (W + 1), 100, 1), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    losses = signs.repeat_interleave(W + 1, dim=0)
    lr = D / (theory.online_scale(1.0, 0.0, W) * math.sqrt(K))
    asked = [max(0, n - W) for n in range(K)]
    points, _ = run(lg.OnlineToNonconvex(lr, D, K), 0 * losses[0], asked, lambda w, n: losses[asked[n]])
    regret = ((losses * points.diff(dim=0)).sum(0) + D * losses.sum(0).abs()).mean().item()
    arguments = {"D": D, "lr": lr, "G": 1.0, "sigma": 0.0, "unmatched": W}
    bounds = [
        theory.online_regret(K, W=W, **arguments),
        theory.online_regret(K, W=0, **arguments | {"lr": D / math.sqrt(K)}),
    ]
    assert bounds[1] < regret <= bounds[0]


def test_the_bounds_are_those_of_the_page():
    """Every term once, by hand: G = 2, sigma = 1, W = 4, hence C^2 = (1 + 2 * 2)^2 + 5 * 4 = 45."""
    problem = {"D": 2.0, "lr": 0.5, "G": 2.0, "sigma": 1.0, "W": 4}
    assert theory.online_scale(2.0, 1.0, 4) == pytest.approx(math.sqrt(45))
    assert theory.online_regret(4, unmatched=3, **problem) == pytest.approx(4 + 45 + 4 + 48)
    assert theory.theorem_a(8, K=4, gap=16.0, unmatched=3, **problem) == pytest.approx(1 + 101 / 8)
    assert theory.theorem_a(8, K=4, gap=16.0, **problem) == pytest.approx(1 + 117 / 8)  # W unmatched


# ---- Step 1: a query at random on the step sees the decrease


def rule_in_a_valley(at):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1500, 2, generator=generator, dtype=torch.float64) / 2
    rule = lg.OnlineToNonconvex(0.2, radius=0.2, period=3)
    x0 = torch.full((2,), 1.5, dtype=torch.float64)
    points, queries = run(rule, x0, range(1500), lambda w, n: w_gradient(w) + noise[n], at=at)
    predicted = dot(w_gradient(queries), points.diff(dim=0))
    return predicted.sum().item(), (w_shape(points[-1]) - w_shape(points[0])).item(), predicted.norm().item()


def test_queries_on_the_steps_see_the_decrease_and_queries_at_their_ends_do_not():
    """The differences are a martingale, whose terms have at most the second moments of those of `predicted`."""
    predicted, decrease, size = rule_in_a_valley("query")
    assert abs(predicted - decrease) < 4 * size
    predicted, decrease, size = rule_in_a_valley("point")
    assert abs(predicted - decrease) > 10 * size


@fast
@given(vectors)
def test_the_integral_of_the_gradient_along_a_step_is_the_difference(rows):
    x, y = rows[0], rows[1]
    middles = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    slopes = dot(w_gradient(x + middles[:, None] * (y - x)), y - x)
    assert slopes.mean().item() == pytest.approx((w_shape(y) - w_shape(x)).item(), abs=0.01)


def draws(seed, n=2000):
    rule = lg.OnlineToNonconvex(0.1, 1.0, seed=seed)
    state, found = rule.init(torch.zeros(1)), []
    for _ in range(n):
        found.append(state.random.item() / (2**31 - 1))
        state = rule.update(state, torch.ones(1), torch.tensor(0))
    return torch.tensor(found, dtype=torch.float64)


def test_places_on_the_steps_are_uniform_uncorrelated_and_depend_on_the_seed():
    s = draws(0)
    counts = torch.histc(s, 10, 0.0, 1.0)
    assert ((counts - 200).abs() < 5 * math.sqrt(180)).all()
    for lag in (1, 2, 5):
        assert abs(torch.corrcoef(torch.stack([s[:-lag], s[lag:]]))[0, 1].item()) < 5 / math.sqrt(2000)
    assert torch.equal(s[:50], draws(0, 50))
    assert not torch.isin(draws(1, 50), s).any()


# ---- Step 8: the queries of a period are near their mean


@fast
@given(vectors, positive, positive)
def test_queries_of_a_period_are_near_the_output_and_so_are_their_gradients(grads, lr, D):
    K = len(grads)
    rule = lg.OnlineToNonconvex(lr, D, period=K)
    state, queries = rule.init(grads[0]), []
    for grad in grads:
        queries.append(rule.query(state))
        state = rule.update(state, grad, torch.tensor(0))
    w, mean, delta = torch.stack(queries), rule.output(state), D * (K + 1) / 2
    torch.testing.assert_close(mean, w.mean(0), rtol=1e-10, atol=1e-10)
    assert (w - mean).norm(dim=-1).max() <= delta
    gap = (w.cos().mean(0) - mean.cos()).norm()  # of f(x) = sum sin(x_i), whose L and rho are 1
    assert gap <= min(delta, delta**2 / 2) + TOLERANCE


def test_queries_can_be_nearly_as_far_from_their_mean_as_the_bound_says():
    K, D = 200, 0.1
    rule = lg.OnlineToNonconvex(1e6, D, period=K)
    _, queries = run(rule, torch.zeros(1), range(K), lambda w, n: torch.ones(1))
    assert (queries - queries.mean(0)).abs().max() > 0.97 * D * (K + 1) / 2


# ---- Step 7 and Theorem A: all periods, on a function with known constants

K, PERIODS, RADIUS, SIGMA, RUNS = 256, 16, 0.015, 0.5, 24


def mean_of_periods(rule, asked):
    """The mean over periods and runs of the norm of the mean gradient at the queries."""
    generator = torch.Generator().manual_seed(1)

    def gradient(w, n):
        signs = torch.randint(0, 2, w.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return w_gradient(w) + SIGMA / 2 * signs

    _, queries = run(rule, torch.full((RUNS, 4), 3.0, dtype=torch.float64), asked, gradient)
    return w_gradient(queries).view(-1, K, RUNS, 4).mean(1).norm(dim=-1).mean().item()


def planned(W, lr=None):
    """The learning rate, and the bound."""
    lr = lr or RADIUS / (theory.online_scale(1.0, SIGMA, W) * math.sqrt(K))
    return lr, theory.theorem_a(K * PERIODS, K=K, D=RADIUS, lr=lr, gap=4.0, G=1.0, sigma=SIGMA, W=W)


def test_theorem_a_holds_with_workers_where_it_could_be_broken():
    """No gradient is longer than 1, so that a bound below 1 says something."""
    arrivals = torch.randint(0, 4, (K * PERIODS,), generator=torch.Generator().manual_seed(2)).tolist()
    asked = by_workers(arrivals, 4)
    lr, bound = planned(theory.largest_in_flight(delays(asked)))
    assert mean_of_periods(lg.OnlineToNonconvex(lr, RADIUS, K), asked) <= bound < 0.4


def test_theorem_a_is_broken_by_a_rule_that_stays_and_by_delays_that_are_not_counted():
    assert mean_of_periods(lg.OnlineToNonconvex(0.0, RADIUS, K), range(K)) > planned(3)[1]
    late = [max(0, n - 100) for n in range(K * PERIODS)]
    lr, without = planned(0)
    assert without < mean_of_periods(lg.OnlineToNonconvex(lr, RADIUS, K), late) <= planned(100, lr)[1]
