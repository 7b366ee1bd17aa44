"""The server on its own: no transport, no workers, every order of events."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lategrad as lg
from lategrad.problems import ModuleProblem, Quadratic, load
from lategrad.registry import RULES, build_rule, parse_set
from lategrad.rules.rule import apply_update, issue_ticket
from lategrad.serve import Server
from lategrad.serve.checkpoint import DamagedError, checkpoint_paths
from lategrad.serve.server import identify
from lategrad.support.runs import tensors

PROBLEM = Quadratic(dim=4)
ZERO = torch.zeros(4, dtype=torch.float64)


def _server(rule=None, **options):
    return Server(PROBLEM, rule or lg.Anytime(lg.OGD(lr=0.3)), **{"steps": 1000, "compile": False, **options})


def _bits(server):
    return [leaf.clone() for leaf in tensors(server.state)]


def _same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20)
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=25), seed=st.integers(0, 9))
def test_every_order_of_arrivals_is_the_rule_applied_in_that_order(name, order, seed):
    """A plain loop over kept queries and tickets, written without the server, is what it must equal."""
    rule = build_rule(name, 0.3, lg.Ball(1.0))
    server = _server(rule, steps=len(order))
    jobs = {worker: server.issue(worker) for worker in range(4)}
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
        jobs[worker] = server.exchange(worker, job.version, job.sequence, grad)
        held[worker] = (rule.query(state).clone(), issue_ticket(rule, state).clone(), made + 1)
    assert server.done
    assert jobs[order[-1]] is None
    assert torch.equal(server.output(), rule.output(state))
    trace = server.trace()
    assert trace.delays.tolist() == delays
    assert trace.worker.tolist() == order
    assert len(set(zip(order, trace.sequence.tolist(), strict=True))) == len(order)
    assert torch.equal(trace.version, torch.arange(len(order)) - torch.tensor(delays))


_COMPILED = [(name, domain) for name in RULES for domain in ("whole", "ball:1")] + [("anytime-sgd", "simplex")]


@pytest.mark.parametrize(("name", "domain"), _COMPILED)
def test_the_compiled_update_is_the_rules_own(name, domain):
    """As C loops, or, for a simplex, as torch compiles it; with a tensor as lr and with none."""
    value = 0.3 if domain == "whole" else torch.tensor([0.3], dtype=torch.float64)
    rule = build_rule(name, value, parse_set(domain))
    plain, fast = _server(rule, compile=False), _server(rule, compile=True)
    generator = torch.Generator().manual_seed(0)
    assert plain.config["backend"] == "eager"
    assert fast.config["backend"] == ("compile" if domain == "simplex" else "loops")
    held = {worker: (plain.issue(worker), fast.issue(worker)) for worker in range(3)}
    for step in range(30):
        worker = step * step % 3
        a, b = held[worker]
        torch.testing.assert_close(b.query, a.query, rtol=1e-9, atol=1e-9)
        grad = PROBLEM.gradient(a.query, torch.randn(4, generator=generator, dtype=torch.float64))
        held[worker] = tuple(
            server.exchange(worker, job.version, job.sequence, grad) for server, job in ((plain, a), (fast, b))
        )
    torch.testing.assert_close(fast.output(), plain.output(), rtol=1e-9, atol=1e-9)


BAD = {
    "nan": (lambda job: (job.version, job.sequence, ZERO * torch.nan), "not finite"),
    "inf": (lambda job: (job.version, job.sequence, ZERO + torch.inf), "not finite"),
    "one inf": (
        lambda job: (job.version, job.sequence, torch.tensor([0, torch.inf, 0, -torch.inf]).double()),
        "finite",
    ),
    "shape": (lambda job: (job.version, job.sequence, ZERO[:3]), r"shape \(3,\) instead of \(4,\)"),
    "matrix": (lambda job: (job.version, job.sequence, ZERO.view(1, 4)), r"shape \(1, 4\)"),
    "dtype": (lambda job: (job.version, job.sequence, ZERO.float()), "float32 instead of torch.float64"),
    "future": (lambda job: (99, job.sequence, ZERO), "version 99 is from the future: the server is at 3"),
    "version": (lambda job: (job.version - 1, job.sequence, ZERO), "version 2 instead of 3"),
    "repeated": (lambda job: (job.version, job.sequence - 1, ZERO), "sequence number 2 was used before"),
    "unknown": (lambda job: (job.version, 77, ZERO), "sequence number 77 was never handed out"),
    "negative": (lambda job: (job.version, -1, ZERO), "sequence number -1 was never handed out"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_applied_is_refused_counted_reported_and_leaves_the_state_untouched(bad):
    server = _server()
    job = server.issue(5)
    for _ in range(3):
        job = server.exchange(5, job.version, job.sequence, torch.ones_like(ZERO))
    before, log = _bits(server), len(server.log)
    make, reason = BAD[bad]
    version, sequence, grad = make(job)
    with pytest.warns(UserWarning, match=f"refused a gradient of worker 5 at update 4: .*{reason}"):
        after = server.exchange(5, version, sequence, grad)
    assert _same(before, _bits(server))
    assert len(server.log) == log
    assert server.trace().config["refusals"] == {"worker 5": 1}
    server.exchange(5, after.version, after.sequence, ZERO)  # and the worker goes on
    assert server.version == 4


def test_a_huge_but_finite_gradient_is_not_refused():
    server = Server(Quadratic(dim=4, dtype=torch.float32), lg.SGD(lr=1e-38), steps=5)
    job = server.issue(0)
    server.exchange(0, job.version, job.sequence, torch.full((4,), 3e38))  # the sum overflows, no entry does
    assert server.version == 1


@pytest.mark.filterwarnings("ignore:refused")
def test_a_worker_is_dropped_after_so_many_refusals_in_a_row_and_not_before():
    server = _server(max_refusals=3)
    job = server.issue(0)
    for good in (False, False, True, False, False):
        job = server.exchange(0, job.version, job.sequence, ZERO if good else ZERO * torch.nan)
    assert job is not None
    with pytest.warns(UserWarning, match="worker 0 is dropped: 3 gradients in a row were refused"):
        assert server.exchange(0, job.version, job.sequence, ZERO * torch.nan) is None
    assert server.issue(0) is None
    assert server.issue(1) is not None


def test_a_late_gradient_of_a_worker_that_is_gone_is_used_unless_it_was_given_up():
    server = _server()
    late, lost, other = server.issue(0), server.issue(1), server.issue(2)
    for _ in range(10):
        other = server.exchange(2, other.version, other.sequence, ZERO)
    server.exchange(0, late.version, late.sequence, ZERO)
    assert server.trace().delays[-1] == 10
    server.forget(1, lost.sequence)
    with pytest.warns(UserWarning, match="was used before"):
        server.exchange(1, lost.version, lost.sequence, ZERO)


def test_a_rule_with_run_dimensions_is_refused():
    with pytest.raises(ValueError, match="rule must be for one run"):
        _server(lg.SGD(lr=torch.tensor([[0.1], [0.2]])))


@pytest.mark.parametrize("name", ["steps", "keep", "record_every", "checkpoint_every", "max_refusals"])
def test_bad_numbers_are_named(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1"):
        _server(**{name: 0})


# Checkpoints


def _advance(server, count, worker=0):
    job = server.issue(worker)
    for _ in range(count):
        job = server.exchange(worker, job.version, job.sequence, PROBLEM.gradient(job.query, ZERO))
    if job is not None:
        server.forget(worker, job.sequence)


@pytest.mark.parametrize("name", ["anytime-sgd", "optimistic-anytime", "adaptive-revision", "steady", "rennala"])
def test_a_restored_server_goes_on_as_if_nothing_had_happened(name, tmp_path):
    rule = build_rule(name, 0.3, lg.Ball(1.0))
    straight, first = _server(rule, record_every=5), _server(rule, record_every=5, folder=tmp_path)
    _advance(straight, 12)
    _advance(first, 12)
    first.checkpoint()
    second = _server(rule, record_every=5, folder=tmp_path)
    second.restore()
    for server in (straight, second):
        _advance(server, 9)
    a, b = straight.trace(), second.trace()
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.delays, b.delays)
    assert torch.equal(a.worker, b.worker)
    assert torch.equal(a.sequence, b.sequence)


def test_what_a_checkpoint_calls_output_is_the_rules_output(tmp_path):
    from safetensors.torch import load_file

    server = _server(lg.StronglyConvexOGD(0.1), folder=tmp_path)  # its query is another point
    _advance(server, 20)
    server.checkpoint()
    saved = load_file(checkpoint_paths(tmp_path)[0].with_suffix(".safetensors"))
    assert torch.equal(saved["output"], server.output())
    assert not torch.equal(saved["output"], server.rule.query(server.state))


def _two_checkpoints(folder):
    server = _server(folder=folder)
    _advance(server, 10)
    server.checkpoint()
    at_ten = _bits(server)
    _advance(server, 10)
    server.checkpoint()
    return at_ten, _bits(server)


_DAMAGES = [(suffix, damage) for suffix in (".json", ".safetensors") for damage in ("truncated", "flipped", "emptied")]


@pytest.mark.parametrize(("suffix", "damage"), [*_DAMAGES, (".safetensors", "removed")])
def test_of_a_damaged_checkpoint_the_one_before_is_used_and_that_is_said(tmp_path, suffix, damage):
    at_ten, _ = _two_checkpoints(tmp_path)
    victim = checkpoint_paths(tmp_path)[0].with_suffix(suffix)
    contents = bytearray(victim.read_bytes())
    if damage == "removed":
        victim.unlink()
    else:
        contents[len(contents) // 2] ^= 4
        victim.write_bytes({"truncated": contents[:-7], "flipped": contents, "emptied": b""}[damage])
    server = _server(folder=tmp_path)
    with pytest.warns(UserWarning, match="is damaged: .*trying the one before"):
        server.restore()
    assert server.version == 10
    assert _same(at_ten, _bits(server))
    _advance(server, 3)
    assert server.checkpoint()  # the damaged one does not take the place of a good one
    assert [int(path.stem.split("-")[1]) for path in checkpoint_paths(tmp_path)] == [13, 10]


@settings(max_examples=40)
@given(
    position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.sampled_from([".json", ".safetensors"])
)
def test_any_flipped_bit_is_noticed_or_harmless(tmp_path_factory, position, bit, which):
    folder = tmp_path_factory.mktemp("flip")
    at_ten, at_twenty = _two_checkpoints(folder)
    victim = checkpoint_paths(folder)[0].with_suffix(which)
    contents = bytearray(victim.read_bytes())
    contents[int(position * len(contents))] ^= 1 << bit
    victim.write_bytes(contents)
    server = _server(folder=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server.restore()
    assert _same({10: at_ten, 20: at_twenty}[server.version], _bits(server))


def test_a_damaged_log_of_updates_is_noticed(tmp_path):
    _two_checkpoints(tmp_path)
    log = tmp_path / "updates.bin"
    contents = bytearray(log.read_bytes())
    contents[3] ^= 1
    log.write_bytes(contents)
    with (
        pytest.warns(UserWarning, match="updates.bin"),
        pytest.raises(DamagedError, match="no checkpoint .* is usable"),
    ):
        _server(folder=tmp_path).restore()


def test_updates_after_the_last_checkpoint_are_dropped_from_the_log(tmp_path):
    server = _server(folder=tmp_path)
    _advance(server, 10)
    server.checkpoint()
    _advance(server, 5)
    server.log.flush()  # the server dies between the log and the checkpoint
    again = _server(folder=tmp_path)
    again.restore()
    assert again.version == 10
    _advance(again, 2)
    again.checkpoint()
    third = _server(folder=tmp_path)
    third.restore()
    assert third.version == 12
    assert torch.equal(third.trace().sequence, again.trace().sequence)


def test_a_checkpoint_of_another_rule_or_problem_is_refused(tmp_path):
    server = _server(folder=tmp_path)
    server.checkpoint()
    with pytest.raises(ValueError, match="rule must be that of the checkpoint"):
        _server(lg.SGD(lr=0.1), folder=tmp_path).restore()
    with pytest.raises(ValueError, match="problem must be the one of the checkpoint"):
        Server(Quadratic(dim=5), lg.Anytime(lg.OGD(lr=0.3)), steps=1, folder=tmp_path).restore()


def test_when_the_disk_is_full_the_run_goes_on_and_the_old_checkpoint_stays(tmp_path):
    resource = pytest.importorskip("resource")
    server = _server(folder=tmp_path)
    _advance(server, 10)
    assert server.checkpoint()
    _advance(server, 200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # real writes, which really fail
    try:
        with pytest.warns(UserWarning, match="checkpoint at update 210 failed, training goes on"):
            assert not server.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = _server(folder=tmp_path)
    again.restore()
    assert again.version == 10
    assert not list(tmp_path.glob(".*.part"))
    assert server.checkpoint()  # once there is room again
    again.restore()
    assert again.version == 210


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    server = _server(folder=tmp_path, checkpoint_every=10, keep=3)
    _advance(server, 70)
    assert [int(path.stem.split("-")[1]) for path in checkpoint_paths(tmp_path)] == [70, 60, 50]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_an_update_that_was_broken_off_is_not_saved(tmp_path):
    """As by a second Ctrl-C: some of the state's tensors belong to the next update already."""
    server = _server(folder=tmp_path)
    _advance(server, 5)
    server.checkpoint()
    job = server.issue(0)

    def broken(*_):
        tensors(server.state)[0].add_(1)
        raise KeyboardInterrupt

    server._update = broken
    with pytest.raises(KeyboardInterrupt):
        server.exchange(0, job.version, job.sequence, ZERO)
    with pytest.warns(UserWarning, match="update 6 was broken off half-way"):
        assert not server.checkpoint()
    again = _server(folder=tmp_path)
    again.restore()
    assert again.version == 5


def test_what_a_failed_or_killed_checkpoint_left_is_removed(tmp_path):
    server = _server(folder=tmp_path)
    _advance(server, 5)
    assert server.checkpoint()
    (tmp_path / ".checkpoint-000000000009.json.1234.part").write_text("of a process that was killed")
    (tmp_path / "checkpoint-000000000009.safetensors").write_text("without its description")
    _advance(server, 5)
    assert server.checkpoint()
    names = sorted(path.name for path in tmp_path.iterdir())
    stems = [f"checkpoint-{version:012d}" for version in (5, 10)]
    assert names == [f"{stem}{suffix}" for stem in stems for suffix in (".json", ".safetensors")] + ["updates.bin"]


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    server = _server(folder=tmp_path)
    _advance(server, 5)
    server.checkpoint()
    with pytest.raises(ValueError, match="steps must be >= 5, the updates made already, got 3"):
        _server(folder=tmp_path, steps=3).restore()


def test_problems_are_told_apart_by_their_contents_and_by_no_address(tmp_path):
    class Plain(Quadratic):
        __repr__ = object.__repr__

    assert identify(Plain())["problem"].endswith("Plain")
    torch.manual_seed(0)
    one, other = (ModuleProblem(torch.nn.Linear(64, 10), load("digits")) for _ in range(2))
    assert identify(one)["problem"] == identify(other)["problem"]
    assert identify(one)["contents"] != identify(other)["contents"]
    assert identify(one) == identify(one.to("cpu"))
