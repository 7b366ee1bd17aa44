"""Checkpoints: a run continues from them exactly, and damage is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import lategrad as lg
from lategrad.problems import ModuleProblem, Quadratic, load
from lategrad.registry import build_rule
from lategrad.serve import Server, Settings
from lategrad.serve.checkpoints.archive import Archive
from lategrad.serve.checkpoints.checkpoint import DamagedError, checkpoint_paths, write_tensors
from lategrad.serve.checkpoints.identity import identify
from lategrad.support.runs import tensors

PROBLEM = Quadratic(dim=4)
ZERO = torch.zeros(4, dtype=torch.float64)


class _Archived(Server):
    """A server with a folder for its checkpoints."""

    def __init__(self, folder, rule=None, problem=PROBLEM, **options):
        chosen = Settings(**{"steps": 1000, "compile": False, **options})
        super().__init__(problem, rule or lg.Anytime(lg.OGD(lr=0.3)), chosen)
        self.archive = Archive(folder, chosen.checkpoint_every, chosen.keep)

    def save(self):
        return self.archive.save(self.checkpoint(self.archive.logged))

    def load(self):
        self.restore(self.archive.load())


def _bits(server):
    return [leaf.clone() for leaf in tensors(server.state)]


def _same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _advance(server, count, worker=0):
    job = server.join(worker)
    for _ in range(count):
        job = server.deliver(worker, job.version, job.sequence, PROBLEM.gradient(job.query, ZERO))
    server.jobs.cancel(worker)


@pytest.mark.parametrize("name", ["anytime-sgd", "optimistic-anytime", "adaptive-revision", "steady", "rennala"])
def test_a_restored_server_continues_as_if_nothing_had_happened(name, tmp_path):
    rule = build_rule(name, 0.3, lg.Ball(1.0))
    straight, first = (
        Server(PROBLEM, rule, Settings(steps=1000, compile=False, record_every=5)),
        _Archived(tmp_path, rule, record_every=5),
    )
    _advance(straight, 12)
    _advance(first, 12)
    first.save()
    second = _Archived(tmp_path, rule, record_every=5)
    second.load()
    for server in (straight, second):
        _advance(server, 9)
    a, b = straight.trace(), second.trace()
    assert torch.equal(a.output, b.output)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.delays, b.delays)
    assert torch.equal(a.worker, b.worker)
    assert torch.equal(a.sequence, b.sequence)


def test_what_a_checkpoint_calls_output_is_the_rules_output(tmp_path):
    server = _Archived(tmp_path, lg.StronglyConvexOGD(0.1))  # its query is another point
    _advance(server, 20)
    server.save()
    saved = load_file(checkpoint_paths(tmp_path)[0].with_suffix(".safetensors"))
    assert torch.equal(saved["output"], server.output())
    assert not torch.equal(saved["output"], server.rule.query(server.state))


def _two_checkpoints(folder):
    server = _Archived(folder)
    _advance(server, 10)
    server.save()
    at_ten = _bits(server)
    _advance(server, 10)
    server.save()
    return at_ten, _bits(server)


_DAMAGES = [(suffix, damage) for suffix in (".json", ".safetensors") for damage in ("truncated", "flipped", "emptied")]


@pytest.mark.parametrize(("suffix", "damage"), [*_DAMAGES, (".safetensors", "removed")])
def test_of_a_damaged_checkpoint_the_one_before_is_used_with_a_warning(tmp_path, suffix, damage):
    at_ten, _ = _two_checkpoints(tmp_path)
    victim = checkpoint_paths(tmp_path)[0].with_suffix(suffix)
    contents = bytearray(victim.read_bytes())
    if damage == "removed":
        victim.unlink()
    else:
        contents[len(contents) // 2] ^= 4
        victim.write_bytes({"truncated": contents[:-7], "flipped": contents, "emptied": b""}[damage])
    server = _Archived(tmp_path)
    with pytest.warns(UserWarning, match="is damaged: .*trying the one before it"):
        server.load()
    assert server.version == 10
    assert _same(at_ten, _bits(server))
    _advance(server, 3)
    assert server.save()  # the damaged one does not take the place of a good one
    assert [int(path.stem.split("-")[1]) for path in checkpoint_paths(tmp_path)] == [13, 10]


def _sealed(description):
    text = json.dumps(description)
    return json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text})


@pytest.mark.parametrize("kind", ["nested", "a list", "no text", "missing keys", "wrong types", "a folder", "a fifo",
                                  "a stray name", "tensors a fifo"])  # fmt: skip
def test_any_other_damage_falls_back_to_the_checkpoint_before_with_one_line(tmp_path, kind):
    at_ten, at_twenty = _two_checkpoints(tmp_path)
    path = checkpoint_paths(tmp_path)[0]
    description = json.loads(json.loads(path.read_text())["checkpoint"])
    match kind:
        case "nested":
            path.write_text("[" * 100_000)
        case "a list":
            path.write_text("[1, 2]")
        case "no text":
            path.write_text(json.dumps({"checksum": "", "checkpoint": {"a": 1}}))
        case "missing keys":
            del description["config"]["settings"]
            path.write_text(_sealed(description))
        case "wrong types":
            path.write_text(_sealed({**description, "log": [], "version": "20"}))
        case "a folder":
            path.unlink()
            (path / "inside").mkdir(parents=True)
        case "a fifo":
            path.unlink()
            os.mkfifo(path)
        case "tensors a fifo":
            path.with_suffix(".safetensors").unlink()
            os.mkfifo(path.with_suffix(".safetensors"))
        case "a stray name":
            (tmp_path / "checkpoint-copy of mine.json").write_text("{}")
    server = _Archived(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        server.load()
    assert [one.category for one in warned].count(UserWarning) == (kind != "a stray name")
    assert _same(at_twenty if kind == "a stray name" else at_ten, _bits(server))
    _advance(server, 3)
    assert server.save()
    assert (tmp_path / f"checkpoint-{server.version:012d}.json").exists()


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
    server = _Archived(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server.load()
    assert _same({10: at_ten, 20: at_twenty}[server.version], _bits(server))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed", "a folder", "a fifo"])
def test_a_damaged_log_of_updates_costs_the_history_and_nothing_else(tmp_path, damage):
    _, at_twenty = _two_checkpoints(tmp_path)
    log = tmp_path / "updates.bin"
    contents = bytearray(log.read_bytes())
    contents[3] ^= 1
    log.unlink()
    if damage in ("flipped", "truncated"):
        log.write_bytes(contents if damage == "flipped" else contents[:-1])
    elif damage == "a folder":
        log.mkdir()
    elif damage == "a fifo":
        os.mkfifo(log)
    server = _Archived(tmp_path)
    with pytest.warns(UserWarning, match="the parameters are intact, but the workers and delays of the first 20"):
        server.load()
    assert _same(at_twenty, _bits(server))
    _advance(server, 5)
    if damage in ("a folder", "a fifo"):
        with pytest.warns(UserWarning, match="the log of updates cannot be written at update 25"):
            assert server.save()
        assert int(checkpoint_paths(tmp_path)[0].stem.split("-")[1]) == 25
        return
    assert server.save()
    again = _Archived(tmp_path)
    again.load()
    trace = again.trace()
    assert (trace.worker[:20] == -1).all()
    assert (trace.worker[20:] == 0).all()
    with pytest.raises(ValueError, match="trace must be whole: its log of updates was damaged"):
        lg.replay(trace, PROBLEM, again.rule)


def test_a_log_that_is_removed_during_the_run_is_written_again(tmp_path):
    server = _Archived(tmp_path)
    _advance(server, 10)
    server.save()
    (tmp_path / "updates.bin").unlink()
    _advance(server, 10)
    with pytest.warns(UserWarning, match="was removed or truncated during the run: it is written again"):
        assert server.save()
    again = _Archived(tmp_path)
    again.load()
    assert torch.equal(again.trace().sequence, server.trace().sequence)


def test_updates_after_the_last_checkpoint_are_dropped_from_the_log(tmp_path):
    server = _Archived(tmp_path)
    _advance(server, 10)
    server.save()
    _advance(server, 5)
    server.save()
    for path in tmp_path.glob("checkpoint-000000000015.*"):  # the server died between the log and the checkpoint
        path.unlink()
    again = _Archived(tmp_path)
    again.load()
    assert again.version == 10
    _advance(again, 2)
    again.save()
    third = _Archived(tmp_path)
    third.load()
    assert third.version == 12
    assert torch.equal(third.trace().sequence, again.trace().sequence)


def test_a_checkpoint_of_another_rule_or_problem_is_refused(tmp_path):
    server = _Archived(tmp_path)
    server.save()
    with pytest.raises(ValueError, match="rule must be that of the checkpoint"):
        _Archived(tmp_path, lg.SGD(lr=0.1)).load()
    with pytest.raises(ValueError, match="problem must be the one of the checkpoint"):
        _Archived(tmp_path, problem=Quadratic(dim=5)).load()


def test_when_the_disk_is_full_the_run_continues_and_the_old_checkpoint_stays(tmp_path):
    resource = pytest.importorskip("resource")
    server = _Archived(tmp_path)
    _advance(server, 10)
    assert server.save()
    _advance(server, 200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # real writes, which really fail
    try:
        with (
            pytest.warns(UserWarning, match="checkpoint at update 210 failed, training continues"),
            pytest.warns(UserWarning, match="the log of updates cannot be written at update 210"),
        ):
            assert not server.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = _Archived(tmp_path)
    again.load()
    assert again.version == 10
    assert not list(tmp_path.glob(".*.part"))
    assert server.save()  # once there is room again
    again.load()
    assert again.version == 210


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    server = _Archived(tmp_path, checkpoint_every=10, keep=3)
    for _ in range(75):
        _advance(server, 1)
        if server.archive.schedule.is_due(server.version):
            server.save()
    assert [int(path.stem.split("-")[1]) for path in checkpoint_paths(tmp_path)] == [70, 60, 50]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


class _Interrupted(lg.SGD):
    """An update that a second Ctrl-C interrupts, after a part of the state was written."""

    def update(self, state, grad, delay):
        if delay == 1:
            tensors(state)[0].add_(1)
            raise KeyboardInterrupt
        return super().update(state, grad, delay)


def test_an_update_that_was_interrupted_is_not_saved(tmp_path):
    server = _Archived(tmp_path, _Interrupted(lr=0.1))
    late = server.join(1)
    _advance(server, 1)
    server.save()
    with pytest.raises(KeyboardInterrupt):
        server.deliver(1, late.version, late.sequence, ZERO)
    with pytest.raises(RuntimeError, match="update 2 was interrupted"):
        server.save()
    again = _Archived(tmp_path, _Interrupted(lr=0.1))
    again.load()
    assert again.version == 1


def test_what_a_failed_or_killed_checkpoint_left_is_removed(tmp_path):
    server = _Archived(tmp_path)
    _advance(server, 5)
    assert server.save()
    (tmp_path / ".checkpoint-000000000009.json.1234.part").write_text("of a process that was killed")
    (tmp_path / "checkpoint-000000000009.safetensors").write_text("without its description")
    _advance(server, 5)
    assert server.save()
    names = sorted(path.name for path in tmp_path.iterdir())
    stems = [f"checkpoint-{version:012d}" for version in (5, 10)]
    assert names == [f"{stem}{suffix}" for stem in stems for suffix in (".json", ".safetensors")] + ["updates.bin"]


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    server = _Archived(tmp_path)
    _advance(server, 5)
    server.save()
    with pytest.raises(ValueError, match="steps must be >= 5, the updates made already, got 3"):
        _Archived(tmp_path, steps=3).load()


def test_problems_are_told_apart_by_their_contents_and_by_no_address(tmp_path):
    class Plain(Quadratic):
        __repr__ = object.__repr__

    assert identify(Plain())["problem"].endswith("Plain")
    torch.manual_seed(0)
    one, other = (ModuleProblem(torch.nn.Linear(64, 10), load("digits")) for _ in range(2))
    assert identify(one)["problem"] == identify(other)["problem"]
    assert identify(one)["contents"] == identify(other)["contents"]
    assert identify(one)["start"] != identify(other)["start"]
    centred = ModuleProblem(torch.nn.Linear(64, 10), load("digits", "centre"))
    assert identify(one)["contents"] != identify(centred)["contents"]
    assert identify(one) == identify(one.to("cpu"))


def test_a_checkpoint_shares_no_memory_with_the_server(tmp_path):
    """So that it may be written, or sent, while the server continues."""
    server = _Archived(tmp_path, lg.SGD(lr=0.1))
    _advance(server, 5)
    checkpoint = server.checkpoint()
    before = {name: leaf.clone() for name, leaf in checkpoint.tensors.items()}
    _advance(server, 5)
    assert all(torch.equal(before[name], leaf) for name, leaf in checkpoint.tensors.items())
    assert len(checkpoint.rows) == 5
    assert checkpoint.description["next_sequence"] == {"0": 6}


@pytest.mark.parametrize("rule", [lg.Anytime(lg.OGD(lr=0.3)), lg.StronglyConvexOGD(0.1), lg.Scheduled(lg.SGD(lr=0.1))])
def test_a_checkpoint_in_the_place_of_an_earlier_one_is_the_same(rule, tmp_path):
    server = _Archived(tmp_path, rule)
    _advance(server, 5)
    earlier = server.checkpoint()
    addresses = {name: leaf.data_ptr() for name, leaf in earlier.tensors.items()}
    _advance(server, 5)
    expected = server.checkpoint()
    made = server.checkpoint(room=earlier.tensors)
    assert {name: leaf.data_ptr() for name, leaf in made.tensors.items()} == addresses
    assert made.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(made.tensors[name], leaf) for name, leaf in expected.tensors.items())
    shared = len(addresses) - len(set(addresses.values()))
    assert shared == any(leaf is server.output() for leaf in tensors(server.state))  # a part is copied once
    assert server.archive.save(made)
    again = _Archived(tmp_path, rule)
    again.load()
    assert _same(_bits(again), _bits(server))


def test_a_checkpoint_of_another_version_of_the_library_says_so(tmp_path):
    server = _Archived(tmp_path)
    server.save()
    path = checkpoint_paths(tmp_path)[0]
    sealed = json.loads(path.read_text())
    text = sealed["checkpoint"].replace("lategrad-checkpoint-5", "lategrad-checkpoint-1")
    checksum = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps({"checksum": checksum, "checkpoint": text}))
    with (
        pytest.warns(UserWarning, match="of another version of lategrad"),
        pytest.raises(DamagedError, match="is of another version of lategrad: its format is 'lategrad-checkpoint-1'"),
    ):
        server.load()


def test_the_file_of_the_tensors_is_one_that_the_library_reads(tmp_path):
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    written = {str(dtype): torch.arange(7).to(dtype) for dtype in floats + others}
    written |= {"number": torch.tensor(3.5), "none": torch.zeros(0), 'turned "ö"': torch.ones(3, 4).cumsum(0).T}
    checksum = write_tensors(tmp_path / "t.safetensors", written)
    assert hashlib.sha256((tmp_path / "t.safetensors").read_bytes()).hexdigest() == checksum
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
