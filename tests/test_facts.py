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
    """|x_t - x_{t-tau}| <= 8 tau D / t, the heart of Theorem 1, for every tau at once."""
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


def test_the_regret_test_can_fail():
    """A step ten times too large breaks OGD's bound against an adversary that exploits it."""
    domain = lg.Ball(1.0)
    learner = lg.OGD(10 * domain.diameter, domain, schedule="constant")
    regret, _ = adversarial_gradients("away", learner, 400, 0)
    assert regret > theory.ogd_regret(400, D=domain.diameter, gradient=1.0, power=0)
