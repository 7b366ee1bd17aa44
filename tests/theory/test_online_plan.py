"""Corollary 1 of docs/theory-online.md: the choice of the constants, and what is refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lategrad as lg
from lategrad import theory

TOLERANCE = 1e-9


@settings(max_examples=40, deadline=None)
@given(
    delta=st.floats(1e-3, 10), share=st.floats(0.01, 0.99), gap=st.floats(0, 100), G=st.floats(0.01, 10),
    sigma=st.floats(0, 10), W=st.integers(0, 1000),
)  # fmt: skip
def test_the_plan_reaches_its_accuracy_and_is_of_the_order_that_is_stated(delta, share, gap, G, sigma, W):
    eps = share * G
    plan = theory.online_plan(delta=delta, eps=eps, gap=gap, G=G, sigma=sigma, W=W)
    arguments = {"K": plan.period, "D": plan.radius, "gap": gap, "G": G, "sigma": sigma, "W": W}
    bound = theory.theorem_a(plan.updates, lr=plan.lr, **arguments)
    assert bound <= eps * (1 + TOLERANCE)
    assert plan.radius * (plan.period + 1) / 2 == pytest.approx(delta)
    assert plan.period >= 18 * W + 9
    scale = (theory.online_scale(G, sigma, W) + sigma) ** 2
    assert scale <= (6 * sigma**2 + 2 * (1 + 3 * W) * G**2) * (1 + TOLERANCE)
    assert plan.updates <= (12.5 * gap / (delta * eps) + 10) * scale / eps**2 * (1 + TOLERANCE)
    for factor in (0.9, 1.1):  # the learning rate is the best one
        assert theory.theorem_a(plan.updates, lr=factor * plan.lr, **arguments) > bound


def test_fewer_updates_than_planned_miss_the_accuracy():
    """At most a factor of 9 is lost to the roundings and to the constants 3, 5 and 9."""
    problem = {"gap": 50.0, "G": 1.0, "sigma": 1.0, "W": 7}
    plan = theory.online_plan(delta=0.1, eps=0.1, **problem)
    K = plan.period // 9
    D = 0.2 / (K + 1)
    lr = D / (theory.online_scale(1.0, 1.0, 7) * math.sqrt(K))
    assert theory.theorem_a(plan.updates // plan.period * K, K=K, D=D, lr=lr, **problem) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 2.0}, r"eps must be below G = 1, which bounds the gradient everywhere, got 2.0"),
        ({"eps": 0.0}, r"eps must be a finite number > 0, got 0.0"),
        ({"delta": -1.0}, r"delta must be a finite number > 0, got -1.0"),
        ({"gap": math.inf}, r"gap must be a finite number >= 0, got inf"),
        ({"sigma": -1.0}, r"sigma must be a finite number >= 0, got -1.0"),
        ({"W": -1}, r"W must be a finite number >= 0, got -1"),
    ],
)
def test_a_plan_from_bad_input_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        theory.online_plan(**{"delta": 1.0, "eps": 0.5, "gap": 1.0, "G": 1.0, "sigma": 1.0, "W": 0} | change)


def test_a_bound_or_a_rule_from_bad_input_is_refused():
    with pytest.raises(ValueError, match="updates must be a positive multiple of K = 10, got 15"):
        theory.theorem_a(15, K=10, D=1.0, lr=1.0, gap=1.0, G=1.0, sigma=1.0, W=0)
    with pytest.raises(ValueError, match=r"lr must be a finite number > 0, got 0\.0"):
        theory.online_regret(10, D=1.0, lr=0.0, G=1.0, sigma=1.0, W=0, unmatched=0)
    with pytest.raises(ValueError, match="period must be an integer >= 2, got 1"):
        lg.OnlineToNonconvex(0.1, 1.0, period=1)
    with pytest.raises(ValueError, match="radius must be a finite number > 0, got 0"):
        lg.OnlineToNonconvex(0.1, 0.0)
