"""Facts about the baselines and the experimental learners that do not depend on a transcription."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import strategies as st

import lategrad as lg
from lategrad import baselines
from lategrad.registry import RULES, build_rule
from lategrad.rules import apply_update, issue_ticket
from lategrad.support.runs import map_tensors, tensors

STEPS, DIM = 60, 4
gradients = st.lists(st.lists(st.floats(-10, 10), min_size=DIM, max_size=DIM), min_size=2, max_size=40).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)


def random_gradients(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def late(rule, x0, delays, oracle):
    """All states of a rule; `oracle(query, t)` is the gradient at a past query that arrives at update t."""
    states = [rule.init(x0)]
    for t, tau in enumerate(delays, start=1):
        asked = states[t - 1 - min(tau, t - 1)]
        grad = oracle(rule.query(asked), t)
        states.append(apply_update(rule, states[-1], grad, torch.tensor(min(tau, t - 1)), issue_ticket(rule, asked)))
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_delays_for_each_run_equal_the_runs_one_by_one(name, dtype):
    """Hosts give one delay of shape (*runs, 1); every run must see its own, and no state may change its kind."""
    expected = pytest.warns(UserWarning, match="without blocks") if name == "steady-muon" else nullcontext()
    with expected:
        compare_runs(build_rule(name, 0.3, lg.Ball(1.0)), dtype, runs=3)


def compare_runs(rule, dtype, runs):
    grads = random_gradients(STEPS, runs, DIM).to(dtype)
    delays = torch.randint(0, 12, (STEPS, runs, 1), generator=torch.Generator().manual_seed(1))
    delays = torch.minimum(delays, torch.arange(STEPS)[:, None, None])
    together, alone = [rule.init(torch.zeros(runs, DIM, dtype=dtype))], []
    for t in range(STEPS):
        tickets = torch.stack([issue_ticket(rule, together[t - delays[t, run]])[run] for run in range(runs)])
        together.append(apply_update(rule, together[-1], grads[t], delays[t], tickets))
    for run in range(runs):
        states = [rule.init(torch.zeros(DIM, dtype=dtype))]
        for t in range(STEPS):
            ticket = issue_ticket(rule, states[t - delays[t, run]])
            states.append(apply_update(rule, states[-1], grads[t, run], delays[t, run, 0], ticket))
        alone.append(states[-1])
    kinds = [[(leaf.dtype, leaf.shape) for leaf in tensors(state)] for state in together]
    assert all(kind == kinds[0] for kind in kinds)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for run, state in enumerate(alone):
        row = map_tensors(lambda leaf, run=run: leaf[run], together[-1])
        for got, want in zip(tensors(row), tensors(state), strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


SGD_WITHOUT_DELAYS = {
    "dc-asgd": baselines.DCASGD(0.1),
    "dc-asgd-a": baselines.AdaptiveDCASGD(0.1),
    "staleness-aware": baselines.StalenessAware(0.1),
    "delay-adaptive": baselines.DelayAdaptive(0.1),
    "delay-adaptive-workers": baselines.DelayAdaptive(0.1, workers=3),
    "ringmaster": baselines.Ringmaster(0.1, threshold=1),
    "rennala": baselines.Rennala(0.1, batch=1),
    "clipped-sgd": baselines.ClippedSGD(0.1, clip=1e6),
}


@pytest.mark.parametrize("name", SGD_WITHOUT_DELAYS)
def test_without_delays_it_is_sgd(name):
    rule, grads, x0 = SGD_WITHOUT_DELAYS[name], random_gradients(STEPS, DIM), torch.zeros(DIM, dtype=torch.float64)
    states = late(rule, x0, [0] * STEPS, lambda query, t: grads[t - 1])
    sgd = late(lg.SGD(0.1), x0, [0] * STEPS, lambda query, t: grads[t - 1])
    for one, other in zip(states, sgd, strict=True):
        torch.testing.assert_close(rule.output(one), other.x, rtol=1e-12, atol=1e-12)


def test_adaptive_revision_without_delays_is_adagrad():
    grads, x0 = random_gradients(STEPS, DIM), torch.zeros(DIM, dtype=torch.float64)
    revision = late(baselines.AdaptiveRevision(0.3), x0, [0] * STEPS, lambda query, t: grads[t - 1])
    adagrad = late(baselines.AsyncAdaGrad(0.3), x0, [0] * STEPS, lambda query, t: grads[t - 1])
    torch.testing.assert_close(revision[-1].x, adagrad[-1].x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(revision[-1].mean, adagrad[-1].mean, rtol=1e-12, atol=1e-12)


def test_adaptive_revision_treats_gradients_that_missed_each_other_as_one():
    """n gradients from x_1, unprojected: z' = 1 + (g_1 + .. + g_n)^2 and x = -lr (g_1 + .. + g_n)/sqrt(z')."""
    rule = baselines.AdaptiveRevision(0.3, average="none")
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    ticket = rule.ticket(state)
    for tau, g in enumerate([1.0, 2.0, 0.5, 3.0]):
        state = rule.update(state, torch.tensor([g], dtype=torch.float64), torch.tensor(tau), ticket)
    assert rule.output(state).item() == pytest.approx(-0.3 * 6.5 / math.sqrt(1 + 6.5**2))


def test_schedule_free_is_uniform_anytime_without_its_start():
    grads, x0 = random_gradients(STEPS, DIM), torch.ones(DIM, dtype=torch.float64)
    free = late(baselines.ScheduleFree(0.1), x0, [0] * STEPS, lambda query, t: grads[t - 1])
    anytime = late(lg.Anytime(lg.OGD(0.1, schedule="constant"), power=0), x0, [0] * STEPS, lambda q, t: grads[t - 1])
    for T in range(1, STEPS + 1):
        torch.testing.assert_close((T + 1) * anytime[T].x, x0 + T * free[T].x, rtol=1e-12, atol=1e-12)


def test_ringmaster_and_rennala_continue_when_every_gradient_is_late():
    """At a constant delay of 20 a change of x can only follow a query that was handed out after the one before it."""
    x0, delays = torch.zeros(DIM, dtype=torch.float64), [20] * 600

    def oracle(query, t):
        return query - 1

    ring = late(baselines.Ringmaster(0.1, threshold=5), x0, delays, oracle)
    moves = [t for t in range(600) if not torch.equal(ring[t + 1].x, ring[t].x)]
    assert len(moves) == ring[-1].version.item()
    assert moves[:12] == [0, 1, 2, 3, 4, 21, 22, 23, 24, 25, 42, 43]  # five, then none until x_6 is answered
    assert torch.allclose(ring[-1].x, torch.ones_like(x0), atol=1e-2)
    rennala = late(baselines.Rennala(0.5, batch=5), x0, delays, oracle)
    moves = [t for t in range(600) if not torch.equal(rennala[t + 1].x, rennala[t].x)]
    assert moves[:4] == [4, 29, 54, 79]  # the new x is asked for at once, and answered 20 updates later
    assert torch.allclose(rennala[-1].x, torch.ones_like(x0), atol=1e-2)


def test_unixgrad_accelerates():
    """On a smooth objective without noise the excess loss falls as 1/T^2: 16 times less for 4 times the rounds."""
    scales = torch.logspace(-3, 0, DIM, dtype=torch.float64)
    rule = baselines.UniXGrad(2.0, lg.Ball(1.0))
    excess = {}
    for rounds in (100, 400):
        states = late(rule, torch.zeros(DIM, dtype=torch.float64), [0] * 2 * rounds, lambda q, t: scales * (q - 0.4))
        excess[rounds] = (scales * (rule.output(states[-1]) - 0.4) ** 2).sum().item() / 2
    assert excess[400] < excess[100] / 12


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: baselines.AdaptiveRevision(0.1, average="median"),
            "average must be one of 'none', 'uniform', 'linear'",
        ),
        (lambda: baselines.AsyncAdaGrad(-0.1), "lr must be a finite number >= 0, got -0.1"),
        (lambda: baselines.AdaDelay(0.0), "diameter must be a finite number > 0, got 0.0"),
        (lambda: baselines.AdaDelay(1.0, smoothness=0.0), "smoothness must be a finite number > 0, got 0.0"),
        (lambda: baselines.DCASGD(0.1, lam=-1.0), "lam must be"),
        (lambda: baselines.AdaptiveDCASGD(0.1, decay=1.0), r"decay must be a number in \[0, 1\), got 1.0"),
        (lambda: baselines.StalenessAware(float("nan")), "lr must be"),
        (lambda: baselines.DelayAdaptive(0.1, workers=0), "workers must be a finite number >= 1, got 0"),
        (lambda: baselines.Ringmaster(0.1, threshold=0), "threshold must be a finite number >= 1, got 0"),
        (lambda: baselines.Rennala(0.1, batch=0), "batch must be a finite number >= 1, got 0"),
        (lambda: baselines.ClippedSGD(0.1, clip=0.0), "clip must be a finite number > 0, got 0.0"),
        (lambda: baselines.ScheduleFree(0.1, interpolation=1.1), r"interpolation must be a number in \[0, 1\]"),
        (lambda: baselines.UniXGrad(-1.0), "diameter must be"),
        (lambda: lg.Steady(c=-1.0), "c must be a finite number >= 0, got -1.0"),
        (lambda: lg.Steady(per_coordinate=1), "per_coordinate must be True or False, got 1"),
    ],
)
def test_bad_hyper_parameters_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
