"""Deterministic facts that hold on any gradients and any delays, whatever the objective."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from lategrad import theory
from lategrad.learners import Linear

DIM = 3
gradients = st.lists(st.lists(st.floats(-10, 10), min_size=DIM, max_size=DIM), min_size=5, max_size=60).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)
LEARNERS = {
    "ogd": lambda d: lg.OGD(0.7, d),
    "ftrl": lambda d: lg.FTRL(0.7, d),
    "adagrad-norm": lambda d: lg.AdaGradNorm(2.0, d),
    "optimistic-ogd": lambda d: lg.OptimisticOGD(2.0, d),
    "optimistic-ftrl": lambda d: lg.OptimisticFTRL(2.0, d),
}


def queries_and_plays(rule, grads):
    state = rule.init(torch.ones(DIM, dtype=torch.float64))
    queries, plays = [], []
    for grad in grads:
        queries.append(rule.query(state))
        plays.append(rule.learner.predict(state.learner) if isinstance(rule, lg.Anytime) else None)
        state = rule.update(state, grad, torch.tensor(0))
    return queries, plays


@pytest.mark.parametrize("name", LEARNERS)
@given(grads=gradients)
def test_anytime_queries_move_slowly(name, grads):
    """|x_t - x_{t-tau}| <= 2 tau D / (t + 1), the heart of Theorem 1, for every tau at once."""
    domain = lg.Ball(1.0)
    queries, _ = queries_and_plays(lg.Anytime(LEARNERS[name](domain)), grads)
    for t in range(1, len(queries) + 1):
        for tau in range(t):
            moved = (queries[t - 1] - queries[t - 1 - tau]).norm().item()
            assert moved <= theory.anytime_displacement(t, tau, D=domain.diameter) + 1e-12


@pytest.mark.parametrize("power", [0, 1, 2])
@given(grads=gradients)
def test_averaging_identity(power, grads):
    """alpha_t (x_t - w_t) = alpha_{1:t-1} (x_{t-1} - x_t)."""
    x, w = queries_and_plays(lg.Anytime(lg.OGD(0.7, lg.Ball(1.0)), power=power), grads)
    for t in range(2, len(x) + 1):
        total = sum(i**power for i in range(1, t))
        left = t**power * (x[t - 1] - w[t - 1])
        right = total * (x[t - 2] - x[t - 1])
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9 * max(1, total))


@given(grads=gradients)
def test_strongly_convex_queries_move_slowly(grads):
    """|x_t - x_{t-tau}| <= 48 G (tau + 2) / (H t) for gradients of norm at most G."""
    H, G = 2.0, max(grads.norm(dim=-1).max().item(), 1e-6)
    domain = lg.Ball(12 * G / H)  # diameter 24 G / H
    queries, _ = queries_and_plays(lg.StronglyConvexOGD(H, domain), grads)
    for t in range(1, len(queries) + 1):
        for tau in range(t):
            moved = (queries[t - 1] - queries[t - 1 - tau]).norm().item()
            assert moved <= theory.strongly_convex_displacement(t, tau, H=H, gradient=G) + 1e-12


def test_a_query_can_move_as_far_as_the_bound_says():
    """Plays at one end of the set and then at the other: the displacement after one update is the bound."""
    domain = lg.Ball(1.0)
    grads = torch.tensor([[-1.0, 0.0, 0.0]] * 9 + [[1e6, 0.0, 0.0]], dtype=torch.float64)
    rule = lg.Anytime(lg.OGD(1e6, domain))
    queries, _ = queries_and_plays(rule, [*grads, torch.zeros(DIM, dtype=torch.float64)])
    moved = (queries[10] - queries[9]).norm().item()
    bound = theory.anytime_displacement(11, 1, D=domain.diameter)
    assert 0.9 * bound < moved <= bound


@pytest.mark.parametrize("form", ["function", "tensor"])
@given(grads=gradients)
def test_averaging_identity_with_any_weights(form, grads):
    """alpha_t (x_t - w_t) = alpha_{1:t-1} (x_{t-1} - x_t), for weights that are no power of t."""
    alpha = [1 + (t % 3) * 2.5 for t in range(1, len(grads) + 2)]
    table = torch.tensor(alpha, dtype=torch.float64)
    rule = lg.Anytime(lg.OGD(0.7, lg.Ball(1.0)), weights=table if form == "tensor" else (lambda t: 1 + t % 3 * 2.5))
    x, w = queries_and_plays(rule, grads)
    for t in range(2, len(x) + 1):
        total = sum(alpha[: t - 1])
        torch.testing.assert_close(alpha[t - 1] * (x[t - 1] - w[t - 1]), total * (x[t - 2] - x[t - 1]))


def test_weights_are_the_powers_where_they_say_the_same_and_go_on_after_their_end():
    grads = torch.randn(12, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    learner = lg.OptimisticOGD(2.0, lg.Ball(1.0))  # whose steps depend on the weights

    def last(**options):
        return queries_and_plays(lg.Anytime(learner, **options), grads)[0][-1]

    square = torch.arange(1, 14, dtype=torch.float64) ** 2
    assert torch.equal(last(power=2), last(weights=square))
    assert torch.equal(last(power=2), last(weights=lambda t: t**2))
    ends = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.equal(last(weights=ends), last(weights=torch.cat([ends, torch.full((10,), 3.0)])))
    two_runs = lg.Anytime(learner, weights=torch.stack([square, torch.ones(13, dtype=torch.float64)]))
    both = queries_and_plays(two_runs, grads)[0][-1]
    torch.testing.assert_close(both, torch.stack([last(power=2), last(power=0)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": torch.tensor([0.0, 1.0])}, "weights must be finite numbers >= 0, the first > 0"),
        ({"weights": torch.tensor([1.0, -1.0])}, "weights must be finite numbers >= 0"),
        ({"weights": torch.tensor(1.0)}, "weights must be of shape"),
        ({"weights": [1.0, 2.0]}, "weights must be None, a function of t, or a tensor"),
        ({"weights": torch.ones(3), "power": 2}, "power must be left out"),
    ],
)
def test_bad_weights_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lg.Anytime(lg.OGD(1.0), **options)


def adversarial_gradients(kind, learner, steps, power, seed=0):
    """Play a learner against an adversary that sees its plays; returns (weighted regret, losses)."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    state = learner.init(torch.zeros(DIM, dtype=torch.float64))
    total, loss_sum, squares, last = (
        torch.zeros(DIM, dtype=torch.float64),
        0.0,
        0.0,
        torch.zeros(DIM).double(),
    )
    for t in range(1, steps + 1):
        w = learner.predict(state)
        grad = {
            "alternating": direction * (-1) ** t,
            "drifting": direction,
            "away": torch.nn.functional.normalize(-w + 1e-3 * direction, dim=-1) * -1,
            "random": torch.randn(DIM, generator=generator, dtype=torch.float64).clamp(-0.5, 0.5),
            "bursts": direction * (-1.0 if (t & (t - 1)) == 0 else 0.01),
        }[kind]
        alpha = float(t**power)
        loss_sum += alpha * (grad @ w).item()
        total += alpha * grad
        squares += alpha**2 * (grad - last).norm().item() ** 2
        last = grad
        next_alpha = torch.tensor([float((t + 1) ** power)], dtype=torch.float64)
        state = learner.update(state, Linear(torch.tensor([alpha]).double(), grad), Linear(next_alpha, grad))
    best = -learner.domain.radius * total.norm().item()  # min over the ball of <total, u>
    return loss_sum - best, squares


ADVERSARIES = ["alternating", "drifting", "away", "random", "bursts"]


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("steps", [1, 10, 400])
def test_ogd_regret_stays_under_its_bound(kind, power, steps):
    domain = lg.Ball(1.0)
    regret, _ = adversarial_gradients(kind, lg.OGD(domain.diameter, domain), steps, power)
    assert regret <= theory.ogd_regret(steps, D=domain.diameter, gradient=1.0, power=power) + 1e-9


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("steps", [1, 10, 400])
def test_optimistic_ogd_regret_stays_under_its_bound(kind, power, steps):
    domain = lg.Ball(1.0)
    regret, surprise = adversarial_gradients(kind, lg.OptimisticOGD(domain.diameter, domain), steps, power)
    assert regret <= theory.optimistic_ogd_regret(D=domain.diameter, surprise=surprise) + 1e-9


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("steps", [1, 10, 400])
def test_ftrl_regrets_stay_under_their_bounds(kind, power, steps):
    """And the bounds say something: at 400 rounds they are below what the worst plays would have lost."""
    domain = lg.Ball(1.0)
    D, weights = domain.diameter, torch.arange(1, steps + 1, dtype=torch.float64) ** power
    regret, _ = adversarial_gradients(kind, lg.FTRL(1.0, domain), steps, power)
    bound = theory.ftrl_regret(weights, D=1.0, gradient=1.0, lr=1.0)  # no point is farther than 1 from the start
    assert regret <= bound + 1e-9
    assert steps < 400 or bound < D * weights.sum().item() / 5
    regret, surprise = adversarial_gradients(kind, lg.OptimisticFTRL(D, domain), steps, power)
    assert regret <= theory.optimistic_ftrl_regret(D=D, surprise=surprise) + 1e-9


@given(grads=gradients, lr=st.floats(0.1, 10))
def test_the_regret_of_ftrl_on_arbitrary_gradients(grads, lr):
    learner, G = lg.FTRL(lr, lg.Ball(1.0)), max(grads.norm(dim=-1).max().item(), 1e-9)
    state, total, lost = learner.init(torch.zeros(DIM, dtype=torch.float64)), torch.zeros(DIM).double(), 0.0
    for t, grad in enumerate(grads, start=1):
        lost += t * (grad @ learner.predict(state)).item()
        total += t * grad
        state = learner.update(state, Linear(torch.tensor([float(t)]).double(), grad))
    weights = torch.arange(1, len(grads) + 1)
    assert lost + total.norm().item() <= theory.ftrl_regret(weights, D=1.0, gradient=G, lr=lr) * (1 + 1e-9)


def test_ftrl_with_too_long_a_step_breaks_the_bound_of_a_shorter_one():
    regret, _ = adversarial_gradients("away", lg.FTRL(100.0, lg.Ball(1.0)), 400, 0)
    assert regret > theory.ftrl_regret(torch.ones(400), D=1.0, gradient=1.0, lr=1.0)


def test_the_steps_of_the_strongly_convex_rule():
    """The paper's lemma: alpha_t eta_t never grows, and alpha_t^2 eta_t at most fourfold; and 24 t/H bounds it."""
    H = 0.7
    step = [theory.strongly_convex_lr(t, H) for t in range(1, 2000)]
    for t in range(2, 2000):
        now, before = step[t - 1], step[t - 2]
        assert t**2 * now <= (t - 1) ** 2 * before
        assert t**4 * now <= 4 * (t - 1) ** 4 * before
        assert t**4 * now <= 24 * t / H


@given(grads=gradients)
def test_the_lemma_on_the_strongly_convex_rule(grads):
    """On any gradients, against the best point of the ball."""
    H, domain = 2.0, lg.Ball(1.0)
    rule = lg.StronglyConvexOGD(H, domain)
    states = [rule.init(torch.ones(DIM, dtype=torch.float64))]
    for grad in grads:
        states.append(rule.update(states[-1], grad, torch.tensor(0)))
    x, y = [state.x for state in states[:-1]], [state.y for state in states[:-1]]  # x_t and y_{t-1}
    hints = torch.cat([torch.zeros(1, DIM, dtype=torch.float64), grads[:-1]])
    total = sum(t**2 * g for t, g in enumerate(grads, start=1))
    u = -torch.nn.functional.normalize(total, dim=-1)
    regret = sum(t**2 * (g @ (p - u)).item() for t, (g, p) in enumerate(zip(grads, x, strict=True), start=1))
    bound = theory.strongly_convex_regret(
        H,
        domain.diameter,
        surprise=(grads - hints).norm(dim=-1),
        to_comparator=torch.stack([(p - u).norm() for p in x]),
        ahead=torch.stack([(p - b).norm() for p, b in zip(x, y, strict=True)]),
    )
    assert regret <= bound * (1 + 1e-9)


@given(rows=st.lists(st.lists(st.floats(-3, 3), min_size=DIM, max_size=DIM), min_size=2, max_size=2))
def test_gradients_of_a_smooth_convex_function_are_cocoercive(rows):
    """softplus(3 z) is 9/4-smooth."""
    x, y = (torch.tensor(row, dtype=torch.float64) for row in rows)
    gap = 3 * (torch.sigmoid(3 * x) - torch.sigmoid(3 * y))
    assert (gap @ gap).item() <= theory.gradient_difference(9 / 4, (gap @ (x - y)).item()) + 1e-12


def test_the_regret_test_can_fail():
    """A step ten times too large breaks OGD's bound against an adversary that exploits it."""
    domain = lg.Ball(1.0)
    learner = lg.OGD(10 * domain.diameter, domain, schedule="constant")
    regret, _ = adversarial_gradients("away", learner, 400, 0)
    assert regret > theory.ogd_regret(400, D=domain.diameter, gradient=1.0, power=0)
