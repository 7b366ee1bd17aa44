"""The server on its own: no transport, no workers, every order of events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.registry import RULES, build_rule, parse_set
from lategrad.rules.rule import apply_update, issue_ticket
from lategrad.serve import Server, Settings
from lategrad.serve.jobs import FOREVER, ForeignMessageError
from lategrad.support.runs import tensors

PROBLEM = Quadratic(dim=4)
ZERO = torch.zeros(4, dtype=torch.float64)


def _server(rule=None, **options):
    settings = Settings(**{"steps": 1000, "compile": False, **options})
    return Server(PROBLEM, rule or lg.Anytime(lg.OGD(lr=0.3)), settings)


def _bits(server):
    return [leaf.clone() for leaf in tensors(server.state)]


def _same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore:SteadyMuon without blocks")
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=25), seed=st.integers(0, 9))
def test_every_order_of_arrivals_is_the_rule_applied_in_that_order(name, order, seed):
    """A plain loop over kept queries and tickets, written without the server, is what it must equal."""
    rule = build_rule(name, 0.3, lg.Ball(1.0))
    server = _server(rule, steps=len(order))
    jobs = {worker: server.join(worker) for worker in range(4)}
    state = rule.init(PROBLEM.start())
    held = {worker: (rule.query(state).clone(), issue_ticket(rule, state).clone(), 0) for worker in range(4)}
    noise = torch.randn(len(order), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    delays = []
    for made, (worker, z) in enumerate(zip(order, noise, strict=True)):
        query, ticket, version = held[worker]
        assert torch.equal(jobs[worker].query, query)
        grad = PROBLEM.gradient(query, z)
        state = apply_update(rule, state, grad, torch.tensor(made - version), ticket)
        delays.append(made - version)
        job = jobs[worker]
        jobs[worker] = server.deliver(worker, job.version, job.sequence, grad)
        held[worker] = (rule.query(state).clone(), issue_ticket(rule, state).clone(), made + 1)
    assert server.done
    assert jobs[order[-1]] is None
    assert torch.equal(server.output(), rule.output(state))
    trace = server.trace()
    assert trace.delays.tolist() == delays
    assert trace.worker.tolist() == order
    assert len(set(zip(order, trace.sequence.tolist(), strict=True))) == len(order)
    assert torch.equal(trace.version, torch.arange(len(order)) - torch.tensor(delays))


_COMPILED = [(name, ("whole", "ball:1")[i % 2]) for i, name in enumerate(RULES)] + [("anytime-sgd", "simplex")]
"""Each rule once; `test_execution_loops.py` has all of them on both sets."""


@pytest.mark.filterwarnings("ignore:SteadyMuon without blocks")
@pytest.mark.parametrize(("name", "domain"), _COMPILED)
def test_the_compiled_update_is_the_rules_own(name, domain):
    """As C loops, or, for a simplex, as torch compiles it; with a tensor as lr and with none."""
    value = 0.3 if domain == "whole" else torch.tensor([0.3], dtype=torch.float64)
    rule = build_rule(name, value, parse_set(domain))
    plain, fast = _server(rule, compile=False), _server(rule, compile=True)
    generator = torch.Generator().manual_seed(0)
    assert plain.config["backend"] == "eager"
    assert fast.config["backend"] == ("compile" if domain == "simplex" else "loops")
    held = {worker: (plain.join(worker), fast.join(worker)) for worker in range(3)}
    for step in range(30):
        worker = step * step % 3
        a, b = held[worker]
        torch.testing.assert_close(b.query, a.query, rtol=1e-9, atol=1e-9)
        grad = PROBLEM.gradient(a.query, torch.randn(4, generator=generator, dtype=torch.float64))
        held[worker] = tuple(
            server.deliver(worker, job.version, job.sequence, grad) for server, job in ((plain, a), (fast, b))
        )
    torch.testing.assert_close(fast.output(), plain.output(), rtol=1e-9, atol=1e-9)


BAD = {
    "nan": (ZERO * torch.nan, "not finite"),
    "inf": (ZERO + torch.inf, "not finite"),
    "one inf": (torch.tensor([0, torch.inf, 0, -torch.inf]).double(), "finite"),
    "shape": (ZERO[:3], r"shape \(3,\) instead of \(4,\)"),
    "matrix": (ZERO.view(1, 4), r"shape \(1, 4\)"),
    "dtype": (ZERO.float(), "float32 instead of torch.float64"),
}


@pytest.fixture
def fourth():
    """A server that has made three updates, and the job that process 5 holds."""
    server = _server()
    job = server.join(5)
    for _ in range(3):
        job = server.deliver(5, job.version, job.sequence, torch.ones_like(ZERO))
    return server, job


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_applied_is_refused_counted_reported_and_leaves_the_state_untouched(fourth, bad):
    server, job = fourth
    before, log = _bits(server), len(server.log)
    grad, reason = BAD[bad]
    with pytest.warns(UserWarning, match=f"refused a gradient of worker 5 at update 4: .*{reason}"):
        after = server.deliver(5, job.version, job.sequence, grad)
    assert _same(before, _bits(server))
    assert len(server.log) == log
    assert server.trace().config["refusals"] == {"worker 5": 1}
    server.deliver(5, after.version, after.sequence, ZERO)  # and the worker continues
    assert server.version == 4


FOREIGN = {
    "future": (lambda job: (99, job.sequence), "it is for version 99, job 3 was issued with 3"),
    "version": (lambda job: (job.version - 1, job.sequence), "it is for version 2, job 3 was issued with 3"),
    "repeated": (lambda job: (job.version, job.sequence - 1), "it answers job 2, which worker 5 does not hold"),
    "unknown": (lambda job: (job.version, 77), "it answers job 77, which worker 5 does not hold"),
    "negative": (lambda job: (job.version, -1), "it answers job -1, which worker 5 does not hold"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_answers_no_job_of_its_sender_raises_and_leaves_the_state_untouched(fourth, foreign):
    server, job = fourth
    before, log = _bits(server), len(server.log)
    make, reason = FOREIGN[foreign]
    with pytest.raises(ForeignMessageError, match=reason):
        server.deliver(5, *make(job), ZERO)
    assert _same(before, _bits(server))
    assert len(server.log) == log
    assert server.trace().config["refusals"] == {}
    server.deliver(5, job.version, job.sequence, ZERO)  # the job itself is still open
    assert server.version == 4


def test_a_huge_but_finite_gradient_is_not_refused():
    server = Server(Quadratic(dim=4, dtype=torch.float32), lg.SGD(lr=1e-38), Settings(steps=5))
    job = server.join(0)
    server.deliver(0, job.version, job.sequence, torch.full((4,), 3e38))  # the sum overflows, no entry does
    assert server.version == 1


@pytest.mark.filterwarnings("ignore:refused")
def test_a_worker_is_dropped_after_so_many_refusals_in_a_row_and_not_before():
    server = _server(max_refusals=3)
    job = server.join(0)
    for good in (False, False, True, False, False):
        job = server.deliver(0, job.version, job.sequence, ZERO if good else ZERO * torch.nan)
    assert job is not None
    with pytest.warns(UserWarning, match="worker 0 is dropped: 3 gradients in a row were refused"):
        assert server.deliver(0, job.version, job.sequence, ZERO * torch.nan) is None
    assert server.join(0) is None
    assert server.join(1) is not None


def test_a_late_gradient_of_a_worker_that_is_gone_is_used_unless_it_was_given_up():
    server = _server()
    late, lost, other = server.join(0), server.join(1), server.join(2)
    server.jobs.remove(0, wait=FOREVER)
    for _ in range(10):
        other = server.deliver(2, other.version, other.sequence, ZERO)
    assert server.deliver(0, late.version, late.sequence, ZERO) is None
    assert server.trace().delays[-1] == 10
    server.jobs.remove(1)
    with pytest.warns(UserWarning, match="refused a gradient of worker 1 .* job 0 was given up when its process ended"):
        assert server.deliver(1, lost.version, lost.sequence, ZERO) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_query_may_be_the_states_own_or_copied_to_where_the_worker_wants_it(device):
    """Copied, as between devices, it is the same vector, and stays as it was."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    in_place = Server(PROBLEM, lg.SGD(lr=0.1), Settings(steps=10, compile=False), query_in_place=True)
    copying = _server(lg.SGD(lr=0.1), steps=10, server_device=device)
    out = torch.empty_like(ZERO)
    a, b = in_place.join(0), copying.join(0, out=out)
    for _ in range(5):
        grad = PROBLEM.gradient(a.query, ZERO)
        a = in_place.deliver(0, a.version, a.sequence, grad)
        b = copying.deliver(0, b.version, b.sequence, grad, out)
        assert a.query is in_place.state.x
        assert b.query is out
        assert torch.equal(a.query, out)


def test_a_rule_with_run_dimensions_is_refused():
    with pytest.raises(ValueError, match="rule must be for one run"):
        _server(lg.SGD(lr=torch.tensor([[0.1], [0.2]])))


@pytest.mark.parametrize("name", ["steps", "keep", "record_every", "checkpoint_every", "max_refusals"])
def test_bad_numbers_are_named(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1"):
        _server(**{name: 0})
