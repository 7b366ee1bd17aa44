"""SteadyShort: its first round, what docs/steady.md proves of it, and that it is better where runs are short."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from helpers.late_quadratic import LARGEST, NUMBERS, on_a_quadratic
from lategrad import theory
from lategrad.problems import SoftmaxRegression, load

DIM, D, LR, C = 3, 2.0, 0.9, 2.0
entries = st.floats(-10, 10).map(lambda entry: entry if abs(entry) > 1e-100 else 0.0)  # whose square has all digits
gradients = st.lists(st.lists(entries, min_size=DIM, max_size=DIM), min_size=2, max_size=60).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)


def run(rule, grads, delays):
    """All states, the first before any update."""
    states = [rule.init(torch.full((DIM,), 0.1, dtype=torch.float64))]
    for grad, tau in zip(grads, delays, strict=True):
        states.append(rule.update(states[-1], grad, torch.tensor(tau)))
    return states


@given(grads=gradients)
def test_the_first_round_is_one_step_along_the_sum(grads):
    states = run(lg.SteadyShort(LR), grads, range(len(grads)))
    time = torch.arange(1, len(grads) + 1, dtype=torch.float64).unsqueeze(-1)
    total, squares = (time * grads).sum(0), (time * grads).square().sum().item()
    step = min(LR, 30 * LR / math.sqrt(len(grads))) / math.sqrt(squares) if squares > 0 else 0.0
    expected = states[0].w - step * total
    rule = lg.SteadyShort(LR)
    for point in (states[-1].w, rule.query(states[-1]), rule.output(states[-1])):
        torch.testing.assert_close(point, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("domain", [lg.WholeSpace(), lg.Ball(5.0)])
@given(grads=gradients)
def test_the_first_round_goes_no_further_than_its_reach(domain, grads):
    """30 lr, half the set and lr sqrt(t), on any gradients."""
    states = run(lg.SteadyShort(LR, domain), grads, range(len(grads)))
    for t, state in enumerate(states):
        far = min(30 * LR, domain.diameter / 2, LR * math.sqrt(t))
        assert (state.w - states[0].w).norm() <= far + 1e-9


def test_a_long_first_round_reaches_its_limit():
    """1600 equal gradients: the bound of 30 lr is what is reached, up to the factor sqrt(3)/2 of the weights."""
    states = run(lg.SteadyShort(LR), torch.ones(1600, DIM, dtype=torch.float64), range(1600))
    assert (states[-1].w - states[0].w).norm().item() == pytest.approx(30 * LR * math.sqrt(3) / 2, rel=1e-3)


@pytest.mark.parametrize("tau", [0, 3, 20])
@given(grads=gradients)
def test_the_regret_after_the_first_round(tau, grads):
    """sum_{t >= tau + 3} t <g_t, w_t - u> is at most what steady_regret_in_constant_delay says."""
    T, delays = len(grads), [min(tau, t) for t in range(len(grads))]
    w = [state.w for state in run(lg.SteadyShort(LR, lg.Ball(D / 2), C), grads, delays)]
    time = torch.arange(1, T + 1, dtype=torch.float64).unsqueeze(-1)
    weighted = (time * grads)[tau + 2 :]
    played = sum((g @ p).item() for g, p in zip(weighted, w[tau + 2 :], strict=False))
    squares, G = (time * grads).square().sum().item(), grads.norm(dim=-1).max().item()
    bound = theory.steady_regret_in_constant_delay(T, D=D, lr=LR, squares=squares, gradient=G, tau=tau)
    assert played + D / 2 * weighted.sum(0).norm().item() <= bound + 1e-9


@pytest.mark.parametrize(("tau", "noise"), [(0, 0.0), (10, 1.0), (30, 0.0), (30, 1.0)])
def test_the_theorem_holds_on_a_quadratic(tau, noise):
    """The bound holds, and it is below the largest excess loss of the ball."""
    T, c, lr = 3000, 1.0, math.sqrt(2.0)
    delays = [min(tau, t) for t in range(T - 1)]
    excess, activities = on_a_quadratic(
        lg.SteadyShort(lr, lg.Ball(1.0), c), delays, noise, torch.Generator().manual_seed(0)
    )
    numbers = {**NUMBERS, "sigma": noise, "lr": lr, "c": c, "tau": tau, "activity": max(activities)}
    assert excess <= theory.steady_short_in_constant_delay(T, **numbers) < LARGEST
    with pytest.raises(ValueError, match="T must be at least"):
        theory.steady_short_in_constant_delay(2 * tau + 5, **numbers)


def test_it_is_better_than_steady_where_there_are_few_rounds():
    problem = SoftmaxRegression(load("digits", "standardise-globally"), batch=16)
    accuracy = {
        rule: lg.simulate(problem, rule(lr=10.0), [300, 1000], 1500, seed=3, record_every=1500).accuracy[-1]
        for rule in (lg.Steady, lg.SteadyShort)
    }
    assert (accuracy[lg.SteadyShort] > accuracy[lg.Steady] + 0.05).all()
    assert (accuracy[lg.SteadyShort] > 0.84).all()
