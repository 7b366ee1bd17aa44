"""What the bounds of docs/theory-deep.md ask for: the best learning rate, and how many updates reach an accuracy."""

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lategrad import theory


@given(L=st.floats(0.1, 10), Delta=st.floats(0.1, 10), memory=st.floats(1, 100), W=st.integers(1, 50),
       A=st.floats(0.3, 1), B=st.floats(1, 1.5), nesterov=st.booleans())  # fmt: skip
@example(L=1.0, Delta=1.0, memory=1.0, W=1, A=1.0, B=1.5, nesterov=False)  # the curvature alone
@settings(max_examples=40, deadline=None)
def test_the_best_learning_rate_is_the_best(L, Delta, memory, W, A, B, nesterov):
    known = {"L": L, "Delta": Delta, "memory": memory, "outstanding": W, "A": A, "B": B, "nesterov": nesterov}
    best = theory.normalized_lr(500, **known)
    at = [theory.normalized_momentum(500, **known, sigma=1.0, rho=2.0, lr=best * f) for f in (0.95, 1, 1.05)]
    assert at[1] < min(at[0], at[2])


@given(eps=st.floats(0.05, 2), L=st.floats(0.1, 10), Delta=st.floats(0.1, 10), sigma=st.floats(0, 3),
       rho=st.floats(1, 5), W=st.integers(1, 100))  # fmt: skip
@example(eps=2.0, L=0.1, Delta=0.1, sigma=3.0, rho=5.0, W=1)  # the start of a long memory
@example(eps=1e-3, L=1.0, Delta=1.0, sigma=1.0, rho=5.0, W=1)  # 3e16 updates
@settings(max_examples=60, deadline=None)
def test_the_plan_reaches_its_accuracy(eps, L, Delta, sigma, rho, W):
    known = {"L": L, "Delta": Delta, "sigma": sigma, "rho": rho, "outstanding": W}
    plan = theory.normalized_plan(eps, **known)
    assert theory.normalized_momentum(plan.N, **known, lr=plan.lr, memory=plan.memory) <= eps * (1 + 1e-12)


def test_the_plan_and_the_start_are_those_of_the_page():
    """By hand: M = 36 * 4 / 0.25 = 576, M + W = 581; where L is small, the start of the momentum decides."""
    known = {"Delta": 3.0, "sigma": 1.0, "rho": 2.0, "outstanding": 5}
    plan = theory.normalized_plan(0.5, L=2.0, **known)
    assert (plan.memory, plan.N) == (576, 32 * 6 * 581 * 4)
    assert plan.lr == pytest.approx(math.sqrt(3 / (4 * 446_208 * 581)))
    assert theory.normalized_plan(0.5, L=0.01, **known).N == 8477  # 1152 (1 + ln 577) = 8476.2
    assert theory.momentum_noise(10, 4) == pytest.approx((1 + 0.4 * (1 + math.log(5))) / math.sqrt(7))


def test_the_plan_has_the_rate_of_the_theorem():
    """Noise costs 1/eps^4 and the outstanding gradients W/eps^2."""
    quiet = [theory.normalized_plan(eps, L=1, Delta=1, sigma=0, rho=1, outstanding=10**4).N for eps in (1e-2, 1e-3)]
    noisy = [theory.normalized_plan(eps, L=1, Delta=1, sigma=1, rho=1, outstanding=1).N for eps in (1e-2, 1e-3)]
    assert quiet[1] / quiet[0] == pytest.approx(1e2, rel=1e-3)
    assert noisy[1] / noisy[0] == pytest.approx(1e4, rel=1e-3)
    workers = [theory.normalized_plan(1e-2, L=1, Delta=1, sigma=1, rho=1, outstanding=W).N for W in (1, 360_000)]
    assert all(b < 2.1 * a for a, b in pairwise(workers)), "a round in the memory costs at most about a factor of 2"
