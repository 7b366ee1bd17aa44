"""What docs/steady.md proves, on arbitrary gradients and delays."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from lategrad.learners import Linear

DIM, D, LR, C = 3, 2.0, 0.9, 2.0
gradients = st.lists(
    st.tuples(st.lists(st.floats(-10, 10), min_size=DIM, max_size=DIM), st.integers(0, 60)), min_size=5, max_size=60
).map(
    lambda rows: (
        torch.tensor([grad for grad, _ in rows], dtype=torch.float64),
        [min(tau, t) for t, (_, tau) in enumerate(rows)],
    )
)


def run(rule, grads, delays):
    """Iterates, averages and queries w_t, x_t, q_t for t = 1 .. T + 1, first at index 0."""
    states = [rule.init(torch.ones(DIM, dtype=torch.float64))]
    for grad, tau in zip(grads, delays, strict=True):
        states.append(rule.update(states[-1], grad, torch.tensor(tau)))
    return [s.w for s in states], [s.x for s in states], [rule.query(s) for s in states]


def theta(t, c=C):
    return min(1.0, c / math.sqrt(t))


def test_the_first_three_steps_by_hand():
    """Delays 0, 1, 1: s = 1, 1, 2; S = 1, 1 + 4 * 4, 17 + 9; weights 1, 2, 3, 4."""
    rule = lg.Steady(lr=1.0, c=1.2)
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    queries = []
    for grad, tau in ((1.0, 0), (-2.0, 1), (1.0, 1)):
        queries.append(rule.query(state).item())
        state = rule.update(state, torch.tensor([grad], dtype=torch.float64), torch.tensor(tau))
    w2 = -1.0
    w3 = w2 + 2 * 1 / 17**0.5
    w4 = w3 - 2 / 26**0.5
    x2, x3, x4 = 2 * w2 / 3, (2 * w2 + 3 * w3) / 6, (2 * w2 + 3 * w3 + 4 * w4) / 10
    assert queries == pytest.approx([0.0, x2 + 1.2 / 2**0.5 * (w2 - x2), x3 + 1.2 / 3**0.5 * (w3 - x3)])
    assert rule.query(state).item() == pytest.approx(x4 + 0.6 * (w4 - x4))
    assert rule.output(state).item() == pytest.approx(x4)


def shortened(t, tau, lr=LR, diameter=math.inf):
    """lr_t."""
    return min(lr, min(2 * lr, diameter / 10) * math.sqrt(t) / (1 + tau))


@pytest.mark.parametrize("per_coordinate", [False, True])
@given(late=gradients)
def test_an_update_is_short(per_coordinate, late):
    grads, delays = late
    domain = lg.Box(-1.0, 1.0)
    w, _, _ = run(lg.Steady(LR, domain, C, per_coordinate), grads, delays)
    for t, tau in enumerate(delays, start=1):
        step = shortened(t, tau, diameter=2 * math.sqrt(DIM))
        moved = (w[t] - w[t - 1]).abs()
        if per_coordinate:
            assert moved.max().item() <= step / math.sqrt(DIM) * ((t - tau) / t) ** 2 + 1e-12
        assert moved.norm().item() <= step * (t - tau) / t + 1e-12


@pytest.mark.parametrize("per_coordinate", [False, True])
@pytest.mark.parametrize("tau", [10, 1000])
def test_the_gradients_of_the_first_query_move_the_iterate_by_a_bounded_amount(tau, per_coordinate):
    growing = torch.ones(tau, DIM, dtype=torch.float64) * 2.0 ** torch.arange(tau).clamp_max(300).double().unsqueeze(-1)
    for grads in (torch.ones(tau, DIM, dtype=torch.float64), growing):
        w, _, _ = run(lg.Steady(LR, per_coordinate=per_coordinate), grads, range(tau))
        assert (w[-1] - w[0]).norm().item() < 4 * LR
    learner = lg.OGD(LR)  # the paper's, on gradients of norm 1, moves on and on
    state = learner.init(torch.zeros(DIM))
    for _ in range(tau):
        state = learner.update(state, Linear(torch.ones(1), torch.tensor([1.0, 0.0, 0.0])))
    assert learner.predict(state).norm().item() > math.sqrt(tau)


@pytest.mark.parametrize(
    ("domain", "diameter"),
    [
        (lg.Ball(1.0), 2.0),
        (lg.Box(-1.0, 1.0), 2 * math.sqrt(DIM)),
        (lg.Box(-torch.ones(DIM), torch.tensor([1.0, 1.0, 2.0])), math.sqrt(17)),
        (lg.Product((lg.Box(0.0, 3.0), 2), (lg.Ball(1.0), 1)), math.sqrt(22)),
        (lg.Product((lg.WholeSpace(), 2), (lg.Ball(1.0), 1)), math.inf),
    ],
)
def test_a_tenth_of_any_set_bounds_the_way_during_a_delay(domain, diameter):
    """One gradient of norm 1 that came 3 updates late: lr_4 = min(lr, min(2 lr, D/10) sqrt(4)/4)."""
    rule = lg.Steady(1.0, domain)
    state = rule.init(torch.full((DIM,), 0.2, dtype=torch.float64))
    zero = torch.zeros(DIM, dtype=torch.float64)
    for tau in range(3):
        state = rule.update(state, zero, torch.tensor(tau))
    grad = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    moved = (rule.update(state, grad, torch.tensor(3)).w - state.w).norm().item()
    assert moved == pytest.approx(min(1.0, min(2.0, diameter / 10) / 2) / 4)


@given(late=gradients)
def test_the_displacement_of_the_query(late):
    grads, delays = late
    w, _, q = run(lg.Steady(LR, lg.Ball(D / 2), C), grads, delays)
    longest = [(t**2 * (g @ g) / S).sqrt().item() if S > 0 else 0.0 for t, g, S in with_sums(grads)]
    for t in range(1, len(q) + 1):
        for s in range(1, t + 1):
            tau = t - s
            displaced = (q[t - 1] - q[s - 1]).norm().item()
            drift = (w[t - 1] - w[s - 1]).norm().item()
            first = (1 - theta(t)) * 2 * tau * D / (t + 1)
            fading = (theta(s) - theta(t)) * D
            assert displaced <= first + fading + theta(t) * drift + 1e-12
            assert fading <= C * tau * D / (s * math.sqrt(t)) + 1e-12
            # kappa: how much longer than the weighted root mean square up to it a gradient is
            kappa = max(
                (longest[i - 1] * math.sqrt(sum(j**2 for j in range(1, i + 1))) / i for i in range(s, t)), default=0.0
            )
            assert drift <= math.sqrt(3) * kappa * LR * tau / math.sqrt(s) + 1e-9


def with_sums(grads):
    total = 0.0
    for t, g in enumerate(grads, start=1):
        total += t**2 * (g @ g).item()
        yield t, g, total


@pytest.mark.parametrize("c", [0.0, 2.0, 20.0])
@given(late=gradients)
def test_interpolation_costs_nothing_without_delays(c, late):
    """sum_t t (f(x_T) - f(u)) <= sum_t t <grad f(q_t), w_t - u> for any plays, any fading and any convex f."""
    grads, delays = late
    w, x, q = run(lg.Steady(LR, lg.Ball(D / 2), c), grads, delays)

    def f(point):
        return torch.nn.functional.softplus(3 * point - 1).sum()

    u = torch.full((DIM,), -0.2, dtype=torch.float64)
    right = 0.0
    for t in range(1, len(w) + 1):
        point = q[t - 1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(point), point)
        right += t * (gradient @ (w[t - 1] - u)).item()
        assert t * (t + 1) / 2 * (f(x[t - 1]) - f(u)).item() <= right + 1e-9


@given(late=gradients)
def test_the_regret(late):
    """sum_t a_t <g_t, w_t - u> <= (D^2/(2 lr) + lr) sqrt(S_T), a_t = s_t lr_t/lr, on any gradients and delays."""
    grads, delays = late
    w, _, _ = run(lg.Steady(LR, lg.Ball(D / 2), C), grads, delays)
    S = sum(t**2 * (g @ g).item() for t, g in enumerate(grads, start=1))
    weights = [(t - tau) * shortened(t, tau, diameter=D) / LR for t, tau in enumerate(delays, start=1)]
    assert regret(weights, grads, w) <= (D**2 / (2 * LR) + LR) * math.sqrt(S) + 1e-9


def regret(weights, grads, w):
    """Against the best point of the ball."""
    total = sum(a * g for a, g in zip(weights, grads, strict=True))
    played = sum(a * (g @ p).item() for a, g, p in zip(weights, grads, w, strict=False))
    return played + D / 2 * total.norm().item()


@pytest.mark.parametrize("tau", [0, 3, 20])
@given(late=gradients)
def test_the_regret_under_a_constant_delay(tau, late):
    """sum_t s_t <g_t, w_t - u> has D^2 (1 + tau) G (T + 2)/(sqrt(3) m) more, m = min(2 lr, D/10)."""
    grads, _ = late
    T, delays = len(grads), [min(tau, t) for t in range(len(grads))]
    w, _, _ = run(lg.Steady(LR, lg.Ball(D / 2), C), grads, delays)
    S = sum(t**2 * (g @ g).item() for t, g in enumerate(grads, start=1))
    G, m = grads.norm(dim=-1).max().item(), min(2 * LR, D / 10)
    extra = D**2 * (1 + tau) * G * (T + 2) / (math.sqrt(3) * m)
    weights = [t - late for t, late in enumerate(delays, start=1)]
    assert regret(weights, grads, w) <= (D**2 / (2 * LR) + LR) * math.sqrt(S) + extra + 1e-9


@pytest.mark.parametrize("tau", [0, 10, 100])
def test_the_theorem_holds_on_a_quadratic(tau):
    """No noise, and kappa measured: the bound of docs/steady.md on f = |x - a|^2 / 2, T = 3000."""
    T, a = 3000, torch.tensor([0.6, 0.0, 0.0], dtype=torch.float64)
    domain, c, lr, L = lg.Ball(1.0), 20.0, math.sqrt(2.0), 1.0
    rule = lg.Steady(lr, domain, c)
    state = rule.init(torch.tensor([-0.8, 0.6, 0.0], dtype=torch.float64))
    queries, grads = [rule.query(state)], []
    for t in range(1, T):
        late = min(tau, t - 1)
        grads.append(queries[t - 1 - late] - a)
        state = rule.update(state, grads[-1], torch.tensor(late))
        queries.append(rule.query(state))
    G = max(g.norm().item() for g in grads)
    kappa = max(g.norm().item() / math.sqrt(6 * S / (t * (t + 1) * (2 * t + 1))) for t, g, S in with_sums(grads))
    mean = sum(min(tau, t) for t in range(T)) / T
    bound = (D**2 / (2 * lr) + lr) * 2 * G / math.sqrt(3 * T)
    bound += 2 * mean * D / (T + 1) * (G + 2 * L * D + math.sqrt(3) * kappa * c * L * lr)
    bound += 4 * c * L * D**2 * mean / (math.sqrt(T) * (T + 1))
    bound += 2 * D**2 * G * (1 + tau) * (T + 2) / (math.sqrt(3) * min(2 * lr, D / 10) * T * (T + 1))
    excess = 0.5 * (rule.output(state) - a).norm().item() ** 2
    assert excess <= bound
    assert excess < 0.02


def test_it_withstands_delays_that_throw_sgd_away():
    """A quadratic without a set; the step of each is good without delays."""
    scales = torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)

    def excess(rule, tau):
        state = rule.init(torch.zeros(DIM, dtype=torch.float64))
        queries = [rule.query(state)]
        for t in range(1, 2001):
            late = min(tau, t - 1)
            state = rule.update(state, scales * (queries[t - 1 - late] - 1), torch.tensor(late))
            queries.append(rule.query(state))
        return (scales * (rule.output(state) - 1) ** 2).sum().item() / 2

    for rule in (lg.Steady(1.0), lg.Steady(1.0, per_coordinate=True), lg.SGD(0.3)):
        assert excess(rule, 0) < 1e-3
    assert excess(lg.SGD(0.3), 100) > 1e3
    assert excess(lg.Steady(1.0), 100) < 0.05
    assert excess(lg.Steady(1.0, per_coordinate=True), 100) < 0.05
