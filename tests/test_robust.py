"""Gradients of workers that are not to be trusted: the rule that stands them, in the simulator and for real."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from lategrad.checks import check_rule
from lategrad.problems import SoftmaxRegression, load

RULE = lg.CentredClipping(lr=0.05, radius=0.2)


def test_it_keeps_the_contract_of_a_rule():
    check_rule(RULE)


def test_it_is_its_plain_transcription():
    lr, radius, beta = 0.3, 0.7, 0.8
    rule = lg.CentredClipping(lr, radius, beta, domain=lg.Ball(1.5))
    generator = torch.Generator().manual_seed(0)
    state = rule.init(torch.zeros(3, dtype=torch.float64))
    x, v = [0.0] * 3, [0.0] * 3
    for _ in range(200):
        grad = torch.randn(3, generator=generator, dtype=torch.float64)
        state = rule.update(state, grad, torch.tensor(0))
        surprise = [g - c for g, c in zip(grad.tolist(), v, strict=True)]
        share = min(1.0, radius / sum(s * s for s in surprise) ** 0.5)
        v = [c + (1 - beta) * share * s for c, s in zip(v, surprise, strict=True)]
        x = [a - lr * c for a, c in zip(x, v, strict=True)]
        length = sum(a * a for a in x) ** 0.5
        x = [a * min(1.0, 1.5 / length) for a in x]
    torch.testing.assert_close(state.x, torch.tensor(x, dtype=torch.float64))


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_no_gradient_moves_the_momentum_further_than_its_share_of_the_radius(a, b):
    rule = lg.CentredClipping(lr=1.0, radius=2.0, momentum=0.75)
    state = rule.init(torch.zeros(2, dtype=torch.float64))
    state = rule.update(state, torch.tensor([a, b], dtype=torch.float64), torch.tensor(0))
    assert state.center.norm() <= 0.25 * 2.0 * (1 + 1e-12)


ATTACKS = {
    "sign flipped": lambda grad: -10 * grad,
    "scaled": lambda grad: 1000 * grad,
    "random": torch.randn_like,
    "constant": lambda grad: torch.linspace(-1, 1, grad.shape[-1]).to(grad).expand_as(grad),
}


class _Infiltrated(SoftmaxRegression):
    """The first workers of 8 are bad; worker threads can tell who they are."""

    attack, bad = "sign flipped", 2

    def gradient(self, x, sample):
        grad = super().gradient(x, sample)
        worker = int(threading.current_thread().name.rpartition("-")[2])
        return ATTACKS[self.attack](grad) if worker < self.bad else grad


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("attack", ATTACKS)
def test_bad_workers_do_not_keep_the_others_from_learning(attack, bad):
    problem = _Infiltrated(load("digits"), batch=32)
    problem.attack, problem.bad = attack, bad
    torch.manual_seed(0)
    trace = lg.train(problem, RULE, steps=1500, workers=8, engine="threads", record_every=1500)
    assert set(trace.worker.tolist()) == set(range(8))
    assert trace.accuracy[-1] > 0.85


def test_without_a_defence_they_do():
    trace = lg.train(_Infiltrated(load("digits"), batch=32), lg.SGD(lr=0.05), steps=1500, workers=8, engine="threads")
    assert trace.accuracy[-1] < 0.5
