"""What docs/steady.md proves, on arbitrary gradients and delays."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from helpers.late_quadratic import LARGEST, NUMBERS, on_a_quadratic
from lategrad import theory
from lategrad.learners import Linear

DIM, D, LR, C = 3, 2.0, 0.9, 2.0
entries = st.floats(-10, 10).map(lambda entry: entry if abs(entry) > 1e-100 else 0.0)  # whose square has all digits
gradients = st.lists(
    st.tuples(st.lists(entries, min_size=DIM, max_size=DIM), st.integers(0, 60)), min_size=5, max_size=60
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
    for t in range(1, len(q) + 1):
        for s in range(1, t + 1):
            tau = t - s
            displaced = (q[t - 1] - q[s - 1]).norm().item()
            drift = (w[t - 1] - w[s - 1]).norm().item()
            first = (1 - theta(t)) * 2 * tau * D / (t + 1)
            fading = (theta(s) - theta(t)) * D
            assert displaced <= first + fading + theta(t) * drift + 1e-12
            assert fading <= C * tau * D / (s * math.sqrt(t)) + 1e-12


def sums(grads, per_coordinate=False):
    """S_1, ..., S_T."""
    times = torch.arange(1, len(grads) + 1, dtype=torch.float64).unsqueeze(-1)
    squares = (times * grads).square().cumsum(0)
    return squares if per_coordinate else squares.sum(-1)


@given(grads=gradients.map(lambda late: late[0]), tiny=st.sampled_from([0.0, 1e-150, 1e-8, 1.0]))
def test_the_activity(grads, tiny):
    """sum t^2 |g_t|^2 / S_t <= min_n (n + ln(S_T / S_n)), also where the first gradients are nearly zero."""
    grads = torch.cat([tiny * grads[:3], grads[3:]])
    S = sums(grads)
    active = sum(
        (t**2 * (g @ g) / total).item() for t, (g, total) in enumerate(zip(grads, S, strict=True), 1) if total > 0
    )
    assert active <= theory.steady_activity(S) + 1e-9
    assert theory.steady_activity(S) <= len(grads)


def test_the_activity_grows_as_the_logarithm():
    bounds = [theory.steady_activity(sums(torch.ones(T, DIM, dtype=torch.float64))) for T in (100, 10_000)]
    assert bounds[1] - bounds[0] == pytest.approx(3 * math.log(100), abs=0.1)


def drift_of(w, delays):
    """sum_t s_t theta_t |w_t - w_{s_t}|, and the most that it could be in the set."""
    moved = [(w[t - 1] - w[t - 1 - tau]).norm().item() for t, tau in enumerate(delays, start=1)]
    weights = [(t - tau) * theta(t) for t, tau in enumerate(delays, start=1)]
    return sum(a * b for a, b in zip(weights, moved, strict=True)), sum(weights)


WIDE = 200.0


@pytest.mark.parametrize("per_coordinate", [False, True])
@given(late=gradients)
def test_the_drift_on_any_gradients_and_any_delays(per_coordinate, late):
    """sum_t s_t theta_t |w_t - w_s| <= c lr sqrt(A F sum t tau_t), on a set so wide that this says something."""
    grads, delays = late
    w, _, _ = run(lg.Steady(LR, lg.Box(-WIDE, WIDE), C, per_coordinate), grads, delays)
    squares = sums(grads, per_coordinate).reshape(len(grads), -1)
    activity = sum(theory.steady_activity(column) for column in squares.T) / squares.shape[1]
    bound = theory.steady_drift(torch.tensor(delays), lr=LR, c=C, activity=activity)
    drift, weights = drift_of(w, delays)
    assert drift <= bound + 1e-9
    assert bound <= 2 * WIDE * weights


def test_the_drift_comes_near_its_bound():
    """Gradients that always point the same way: the bound is no more than a few times too large."""
    grads, delays = torch.ones(2000, DIM, dtype=torch.float64), [min(10, t) for t in range(2000)]
    w, _, _ = run(lg.Steady(LR, lg.Box(-WIDE, WIDE), C), grads, delays)
    activity = theory.steady_activity(sums(grads))
    bound = theory.steady_drift(torch.tensor(delays), lr=LR, c=C, activity=activity)
    assert bound / 4 < drift_of(w, delays)[0] <= bound
    assert bound <= C * LR * 10 * math.sqrt(activity * 2000 * 2001 / 2)


@given(delays=st.lists(st.integers(0, 60), min_size=1, max_size=60))
def test_gradients_in_flight(delays):
    late = [min(tau, t) for t, tau in enumerate(delays)]
    ways = [(t - tau, t) for t, tau in enumerate(late, start=1)]
    most = max(sum(asked <= i < arrives for asked, arrives in ways) for i in range(1, len(late) + 1))
    assert theory.largest_in_flight(torch.tensor(late)) == most


@given(late=gradients)
def test_what_shortened_steps_leave_out(late):
    """sum_t t (1 - lambda_t) <= u^4/10 + 4 u^2/27, u = (1 + tau) lr/m, whatever the horizon."""
    _, delays = late
    lr, diameter = 0.5, 40.0  # m = 2 lr
    left_out = sum(t * (1 - shortened(t, tau, lr, diameter) / lr) for t, tau in enumerate(delays, start=1))
    assert left_out <= theory.steady_shortening(max(delays), lr=lr, D=diameter) + 1e-9


def test_what_shortened_steps_leave_out_in_a_long_run():
    """Near the bound, which is far below the one term by term."""
    T, lr, diameter = 2000, 0.5, 40.0
    whole = sum(t * (1 - shortened(t, 40, lr, diameter) / lr) for t in range(1, T + 1))
    assert whole > 0.9 * theory.steady_shortening(40, lr=lr, D=diameter)
    assert theory.steady_shortening(40, lr=lr, D=diameter) < T * (41 / 2) ** 2 / 40  # term by term it would be T u^2


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


def regret(weights, grads, w, radius=D / 2):
    """Against the best point of the ball."""
    total = sum(a * g for a, g in zip(weights, grads, strict=True))
    played = sum(a * (g @ p).item() for a, g, p in zip(weights, grads, w, strict=False))
    return played + radius * total.norm().item()


@given(late=gradients)
def test_the_regret(late):
    """sum_t a_t <g_t, w_t - u> <= (D^2/(2 lr) + lr) sqrt(S_T), a_t = s_t lr_t/lr, on any gradients and delays."""
    grads, delays = late
    w, _, _ = run(lg.Steady(LR, lg.Ball(D / 2), C), grads, delays)
    weights = [(t - tau) * shortened(t, tau, diameter=D) / LR for t, tau in enumerate(delays, start=1)]
    assert regret(weights, grads, w) <= theory.steady_regret(D, LR, sums(grads)[-1].item()) + 1e-9


@given(late=gradients)
def test_the_regret_per_coordinate_on_a_box(late):
    """The same on a cube of diameter D, with the weights s^2/t: (D^2/(2 lr) + lr)/sqrt(d) for every coordinate."""
    grads, delays = late
    half = D / 2 / math.sqrt(DIM)
    w, _, _ = run(lg.Steady(LR, lg.Box(-half, half), C, per_coordinate=True), grads, delays)
    weights = [(t - tau) ** 2 / t * shortened(t, tau, diameter=D) / LR for t, tau in enumerate(delays, start=1)]
    total = sum(a * g for a, g in zip(weights, grads, strict=True))
    played = sum(a * (g * p) for a, g, p in zip(weights, grads, w, strict=False))
    roots = sums(grads, per_coordinate=True)[-1].sqrt()
    assert (played + half * total.abs() <= (D**2 / (2 * LR) + LR) / math.sqrt(DIM) * roots + 1e-9).all()
    assert roots.sum() / math.sqrt(DIM) <= sums(grads)[-1].sqrt() + 1e-9  # never worse than with one sum


@pytest.mark.parametrize("tau", [0, 3, 20])
@given(late=gradients)
def test_the_regret_under_a_constant_delay(tau, late):
    """sum_t s_t <g_t, w_t - u> has D^2 (1 + tau) G (T + 2)/(sqrt(3) m) more, m = min(2 lr, D/10)."""
    grads, _ = late
    T, delays = len(grads), [min(tau, t) for t in range(len(grads))]
    w, _, _ = run(lg.Steady(LR, lg.Ball(D / 2), C), grads, delays)
    G = grads.norm(dim=-1).max().item()
    weights = [t - late for t, late in enumerate(delays, start=1)]
    bound = theory.steady_regret_in_constant_delay(T, D=D, lr=LR, squares=sums(grads)[-1].item(), gradient=G, tau=tau)
    assert regret(weights, grads, w) <= bound + 1e-9


@pytest.mark.parametrize("tau", [0, 1, 5])
def test_the_bounds_on_the_regret_say_something_and_can_be_broken(tau):
    """An adversary that sees the iterate. The bounds are below what the worst plays would have lost."""
    T, radius, lr = 2000, 1.0, D / math.sqrt(2)

    def play(rule):
        state, w, grads = rule.init(torch.full((DIM,), 0.1, dtype=torch.float64)), [], []
        delays = [min(tau, t) for t in range(T)]
        for late in delays:
            w.append(state.w)
            grads.append(torch.nn.functional.normalize(state.w, dim=-1))
            state = rule.update(state, grads[-1], torch.tensor(late))
        return torch.stack(grads), delays, w

    grads, delays, w = play(lg.Steady(lr, lg.Ball(radius), C))
    squares, weights = sums(grads)[-1].item(), [t - late for t, late in enumerate(delays, start=1)]
    bound = theory.steady_regret_in_constant_delay(T, D=D, lr=lr, squares=squares, gradient=1.0, tau=tau)
    assert regret(weights, grads, w) <= bound < D * sum(weights) / 4
    if tau:
        return  # long steps would be shortened
    grads, _, w = play(lg.Steady(100 * lr, lg.Ball(radius), C))
    assert regret(weights, grads, w) > theory.steady_regret(D, lr, sums(grads)[-1].item())


@pytest.mark.parametrize(("tau", "noise"), [(0, 0.0), (10, 1.0), (30, 0.0), (30, 1.0)])
def test_the_theorem_holds_on_a_quadratic(tau, noise):
    """The bound of docs/steady.md, which is below the largest excess loss of the ball."""
    T, c, lr = 3000, 1.0, math.sqrt(2.0)
    delays = [min(tau, t) for t in range(T - 1)]
    excess, activities = on_a_quadratic(lg.Steady(lr, lg.Ball(1.0), c), delays, noise, torch.Generator().manual_seed(0))
    numbers = {**NUMBERS, "sigma": noise, "lr": lr, "c": c, "activity": max(activities)}
    assert excess <= theory.steady_in_constant_delay(T, tau=tau, **numbers) < LARGEST


def test_the_theorem_holds_in_random_delays():
    """Delays 0 to 3 at random, noise of variance 1; the bound is below the largest excess loss of the ball."""
    T, c, lr = 3000, 1.0, math.sqrt(2.0)
    generator = torch.Generator().manual_seed(1)
    delays = torch.minimum(torch.randint(0, 4, (T - 1,), generator=generator), torch.arange(T - 1))
    excess, activities = on_a_quadratic(lg.Steady(lr, lg.Ball(1.0), c), delays.tolist(), 1.0, generator)
    shortening = sum(theory.steady_shortening(tau, lr=lr, D=D) for tau in range(4)) / 4
    bound = theory.steady_in_random_delays(
        T, **NUMBERS, sigma=1.0, lr=lr, c=c, mu=1.5, in_flight=theory.largest_in_flight(delays),
        activity=sum(activities) / len(activities), shortening=shortening,
    )  # fmt: skip
    assert excess <= bound < LARGEST


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
