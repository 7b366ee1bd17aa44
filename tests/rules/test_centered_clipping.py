"""Gradients of workers that are not to be trusted: the rule that stands them, in the simulator and for real."""

from __future__ import annotations

import statistics
import threading
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from helpers.serving import gradients_of, train_until
from lategrad.checks import check_rule
from lategrad.gates import NormGate, clip_norm
from lategrad.problems import Quadratic, SoftmaxRegression, load
from lategrad.serve import Server, Settings
from lategrad.sets import norm
from lategrad.support.runs import map_tensors, tensors

RULE = lg.CenteredClipping(lr=0.05, radius=0.2)


def test_it_keeps_the_contract_of_a_rule():
    check_rule(RULE)


def test_it_is_its_plain_transcription():
    lr, radius, beta = 0.3, 0.7, 0.8
    rule = lg.CenteredClipping(lr, radius, beta, domain=lg.Ball(1.5))
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
    rule = lg.CenteredClipping(lr=1.0, radius=2.0, momentum=0.75)
    state = rule.init(torch.zeros(2, dtype=torch.float64))
    state = rule.update(state, torch.tensor([a, b], dtype=torch.float64), torch.tensor(0))
    assert state.center.norm() <= 0.25 * 2.0 * (1 + 1e-12)


# ---- Norms


@pytest.mark.parametrize("ratio", [1.5, 10.0])
def test_the_gate_of_many_runs_is_its_plain_transcription_in_each(ratio):
    runs, rounds = 3, 400
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(rounds, runs, 1, generator=generator, dtype=torch.float64) + 0.5
    lengths[torch.rand(rounds, runs, 1, generator=generator) < 0.2] *= 100
    lengths[200:] *= 3  # all grow: the median follows
    gate = NormGate(ratio, (runs,))
    admitted = torch.stack([gate.admits(length) for length in lengths])
    for run in range(runs):
        last, alone = deque(maxlen=101), NormGate(ratio)
        for t, value in enumerate(lengths[:, run, 0].tolist()):
            learns = len(last) < 20
            most = float("inf") if learns else ratio * statistics.median_low(last)
            last.append(min(value, most))
            assert bool(admitted[t, run]) == (value <= most and not learns)
            assert alone.learns_from(lengths[t, run]) == learns
            assert learns or (alone.objection(lengths[t, run]) is None) == (value <= most)
    assert 0 < admitted.sum() < admitted.numel()


def test_a_gate_that_has_seen_zeros_alone_refuses_nothing():
    gate = NormGate(2.0)
    admitted = [bool(gate.admits(torch.zeros(1))) for _ in range(101)]
    assert admitted == [False] * 20 + [True] * 81
    assert gate.admits(torch.ones(1))


def test_a_long_first_gradient_is_not_applied_by_a_real_server():
    """Before it is known how long gradients are, none is."""
    server = Server(Quadratic(), lg.SGD(lr=0.1), Settings(steps=10, max_norm_ratio=5.0))
    job = server.join(0)
    for _ in range(20):
        job = server.deliver(0, job.version, job.sequence, torch.full((10,), 1e9, dtype=torch.float64))
        assert (job.version, server.refusals) == (0, {})
    server.deliver(0, job.version, job.sequence, torch.ones(10, dtype=torch.float64))
    assert server.version == 1


class Spiky(Quadratic):
    """Now and then a gradient is a thousand times as long."""

    def gradient(self, x, sample):
        return torch.where(sample[..., :1] > 0.15, 1000.0, 1.0) * super().gradient(x, sample)


SWEEP = lg.Anytime(lg.OGD(lr=torch.tensor([[0.1], [0.5]], dtype=torch.float64)))


@pytest.mark.parametrize("compile", [False, "rule", pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [lg.SGD(lr=0.01), SWEEP, RULE])
def test_a_refused_gradient_has_its_turn_and_changes_nothing(rule, compile):
    problem, steps, delay = Spiky(noise=0.1), 150, 2
    trace = lg.simulate(problem, rule, delay, steps, seed=1, max_norm_ratio=5.0, clip=0.4, compile=compile)
    runs = torch.broadcast_shapes(*(leaf.shape[:-1] for leaf in tensors(rule)), ())
    x0 = problem.start().expand(*runs, -1)
    state, gate = rule.init(x0), NormGate(5.0, runs)
    queries, refused = [rule.query(state)], torch.zeros(*runs, 1)
    for t in range(steps):
        grad = problem.gradient(queries[max(0, t - delay)], problem.samples(1, t, 1)[0])
        admitted = gate.admits(norm(grad))
        fresh = rule.update(state, clip_norm(grad, 0.4), torch.tensor(min(t, delay)))
        state = map_both(lambda new, old, admitted=admitted: torch.where(admitted, new, old), fresh, state)
        refused += ~admitted
        queries.append(rule.query(state))
    torch.testing.assert_close(trace.output, rule.output(state), rtol=1e-9, atol=1e-12)
    assert trace.config["refused"] == refused.squeeze(-1).int().tolist()
    assert refused.min() > 20
    assert (trace.config["clip"], trace.config["max_norm_ratio"]) == (0.4, 5.0)


def map_both(function, one, other):
    """Of two states with the same form."""
    values = iter([function(a, b) for a, b in zip(tensors(one), tensors(other), strict=True)])
    return map_tensors(lambda _: next(values), one)


@pytest.mark.parametrize("option", ["clip", "max_norm_ratio"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), torch.ones(2, 1), "long"])
def test_bad_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        lg.simulate(Quadratic(), RULE, 0, 10, **{option: value})


# ---- Attacks

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
    trace = train_until(lambda training: training.version >= 1500 and min(gradients_of(training, 8)) > 50,
                        problem, RULE, workers=8, engine="threads", record_every=500)  # fmt: skip
    assert trace.accuracy[-1] > 0.85


def test_without_a_defence_they_do():
    trace = train_until(lambda training: training.version >= 1500 and sum(gradients_of(training, 8)[:2]) > 300,
                        _Infiltrated(load("digits"), batch=32), lg.SGD(lr=0.05), workers=8, engine="threads",
                        record_every=500)  # fmt: skip
    assert trace.accuracy[-1] < 0.5
