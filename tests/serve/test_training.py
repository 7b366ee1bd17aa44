"""Real training with real workers, and everything that can go wrong with them, done for real."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import lategrad as lg
from helpers.serving import (
    PATIENCE,
    Babbling,
    Marked,
    MatricesOnly,
    Misbehaving,
    Poisonous,
    Shaped,
    Stillborn,
    audit,
    each_answer_is_a_new_query,
    gradients_of,
    train_until,
    wait_until,
)
from lategrad.cli import main as cli
from lategrad.problems import ModuleProblem, Quadratic, SoftmaxRegression, load
from lategrad.registry import build_rule
from lategrad.serve import Settings, Training, TrainingError, supervisor
from lategrad.serve.checkpoints.archive import lock_folder
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths, read_checkpoint
from lategrad.serve.observe.update_log import UpdateLog
from lategrad.serve.signals import ControlFile

RULE = lg.Anytime(lg.OGD(lr=0.3))
ENGINES = ("processes", "threads")
ROW_BYTES = UpdateLog.unknown(1).rows().itemsize


def _processes() -> dict[int, tuple[int, int]]:
    """The living processes of this machine: pid to (parent, session)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def _descendants() -> set[int]:
    parents = {pid: parent for pid, (parent, _) in _processes().items()}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid in parents if pid != os.getpid() and is_ours(pid)}


_HELPERS = 2
"""Processes that multiprocessing keeps for the next time: the fork server and the resource tracker."""


def _open_sockets() -> int:
    links = (Path(entry.path) for entry in os.scandir("/proc/self/fd"))
    return sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links)


def _shared_memory() -> set[str]:
    """Torch's segments that have a name; those of other processes have one for a moment, while they are made."""
    return {name for name in os.listdir("/dev/shm") if "torch" in name}


def _mapped() -> set[str]:
    """Torch's segments in the memory of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/torch" in line}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No orphan process, no leaked shared memory, no leaked descriptor after any test of this file."""
    shared, mapped, sockets, there = _shared_memory(), _mapped(), _open_sockets(), _descendants()
    yield
    wait_until(lambda: len(_descendants() - there) <= _HELPERS)
    if _mapped() - mapped or _open_sockets() > sockets:  # a collection takes a third of a second late in the suite
        gc.collect()
    left = _shared_memory() - shared
    wait_until(lambda: not left & _shared_memory())
    assert not _mapped() - mapped, "shared memory is mapped"
    assert _open_sockets() <= sockets, "sockets are left open"


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_training_reaches_what_simulation_reaches_and_replays_bit_for_bit(engine, prefetch):
    problem = SoftmaxRegression(load("digits"), batch=32)
    trace = train_until(lambda training: training.version >= 1500 and min(gradients_of(training, 3)) > 100,
                        problem, RULE, workers=3, engine=engine, prefetch=prefetch, record_every=100)  # fmt: skip
    audit(trace)
    assert each_answer_is_a_new_query(trace, 1 + prefetch)
    simulated = lg.simulate(problem, RULE, 3 * (1 + prefetch) - 1, len(trace.delays))
    assert trace.accuracy[-1] == pytest.approx(simulated.accuracy[-1].item(), abs=0.03)
    again = lg.replay(trace, problem, RULE)
    assert torch.equal(again.output, trace.output)
    assert torch.equal(again.query, trace.query)
    assert torch.equal(again.loss[-1], trace.loss[-1])


@pytest.mark.parametrize("name", ["sgd", "optimistic-anytime", "adaptive-revision", "rennala", "steady", "dc-asgd-a"])
def test_every_kind_of_rule_replays_bit_for_bit_from_its_file(name, tmp_path):
    problem = SoftmaxRegression(load("digits"), batch=16)
    rule = build_rule(name, 0.1, lg.Ball(5.0))
    trace = lg.train(problem, rule, steps=200, workers=3, engine="threads", slow={0: "uniform:0,9"}, out=tmp_path)
    loaded = lg.Trace.load(tmp_path / "trace.safetensors")
    assert torch.equal(lg.replay(loaded, problem, rule).output, trace.output)


def test_compiled_updates_replay_within_rounding():
    problem = SoftmaxRegression(load("digits"), batch=16)
    rule = lg.Anytime(lg.OGD(lr=0.1, domain=lg.Ball(5.0)))
    trace = lg.train(problem, rule, steps=200, workers=2, engine="threads", compile=True)
    torch.testing.assert_close(lg.replay(trace, problem, rule).output, trace.output, rtol=1e-4, atol=1e-6)


def test_a_module_trains_in_processes():
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    problem = ModuleProblem(mlp, load("digits"))
    trace = lg.train(problem, lg.SGD(lr=0.1), steps=400, workers=2)
    assert trace.accuracy[-1] > 0.8
    assert torch.equal(lg.replay(trace, problem, lg.SGD(lr=0.1)).output, trace.output)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_that_looks_at_shapes_gets_those_of_the_problem(engine, tmp_path):
    problem, rule = Shaped(), MatricesOnly(lr=0.1)
    lg.train(problem, rule, steps=60, workers=2, engine=engine, out=tmp_path)
    trace = lg.resume(tmp_path, problem, rule, steps=120)
    assert trace.config["rule"]["blocks"]["parts"][0]["label"] == "matrix"
    assert not torch.equal(trace.output[:4], problem.start()[:4])
    assert torch.equal(trace.output[4:], problem.start()[4:])
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_servers_state_can_be_on_a_gpu(engine, device, tmp_path):
    problem, rule = SoftmaxRegression(load("digits")), lg.SGD(lr=0.1, domain=lg.Ball(5.0))
    how = {"workers": 2, "engine": engine, "device": device, "server_device": "cuda"}
    lg.train(problem, rule, steps=200, out=tmp_path, **how)
    trace = lg.resume(tmp_path, problem, rule, steps=300, server_device="cpu")  # it may go on elsewhere
    audit(trace)
    assert trace.output.device.type == "cpu"
    assert trace.accuracy[-1] > 0.85


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gradients_can_be_computed_on_a_gpu():
    problem = SoftmaxRegression(load("digits"))
    assert lg.train(problem, lg.SGD(lr=0.1), steps=300, workers=2, device="cuda").accuracy[-1] > 0.85


def test_replay_with_another_rule_uses_the_same_delays_and_samples():
    problem = SoftmaxRegression(load("digits"), batch=16)
    trace = lg.train(problem, RULE, steps=300, workers=4, engine="threads")
    other = lg.replay(trace, problem, lg.SGD(lr=torch.tensor([[0.1], [0.3]]).double()))
    assert torch.equal(other.delays, trace.delays)
    assert other.loss.shape == (11, 2)
    with pytest.raises(ValueError, match="problem must be the one that was trained on"):
        lg.replay(trace, Quadratic(), RULE)
    with pytest.raises(ValueError, match="trace must be of a real training"):
        lg.replay(other, problem, RULE)


class _Run:
    """A training in the main thread, disturbed from another."""

    def __init__(self, problem, *, disturb, folder=None, rule=RULE, **settings):
        chosen = Settings(**{"compile": False, "progress": False, "out": folder, **settings})
        self.training = Training(problem, rule, chosen)
        self._disturb = disturb

    def __call__(self):
        failures = []

        def disturb():
            try:
                self._disturb(self.training)
            except BaseException as error:
                failures.append(error)
                self.training.stop()

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            trace = self.training.run()
        finally:
            thread.join()
        assert not failures, failures
        return trace


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:worker .* died")
@pytest.mark.parametrize("prefetch", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_killed_at_any_moment_tear_no_gradient_and_are_replaced(prefetch):
    kills = 8
    rng = random.Random(0)

    def disturb(training):
        for kill in range(kills):
            wait_until(lambda n=kill: sum(training.engine.server.config["replaced"].values()) == n)
            version = training.version
            wait_until(lambda v=version: training.version > v + 2 and len(training.workers) == 2)
            time.sleep(rng.uniform(0, 0.02))  # at any moment of a gradient
            _kill(rng.choice(list(training.workers.values())).pid)
        wait_until(lambda: sum(training.engine.server.config["replaced"].values()) == kills)
        training.stop()

    run = _Run(Marked(2_000_000), disturb=disturb, rule=lg.SGD(lr=1.0), steps=10**6, workers=2, prefetch=prefetch,
               record_every=10**6)  # fmt: skip
    with pytest.warns(UserWarning, match="stopped"):
        trace = run()
    audit(trace)
    assert sum(trace.config["replaced"].values()) == kills
    assert bool((trace.output == trace.output[0]).all()), "a torn gradient was applied"
    expected = sum(k % 7 + 1 for k in trace.sequence.tolist())
    assert trace.output[0].item() == -expected, "a gradient was lost or applied twice"


@pytest.mark.filterwarnings("ignore:worker .* not seen to end")  # in two seconds, on a busy machine
def test_all_workers_killed_at_once_are_all_replaced():
    def disturb(training):
        wait_until(lambda: training.version > 50 and len(training.workers) == 3)
        killed = {location.pid for location in training.workers.values()}
        for pid in killed:
            _kill(pid)
        wait_until(lambda: len({place.pid for place in training.workers.values()} - killed) == 3)
        version = training.version
        wait_until(lambda: training.version > version + 50)
        training.stop()

    died = pytest.warns(UserWarning, match=r"worker \d died after update \d+ \(killed by SIGKILL\) and is restarted")
    with died, pytest.warns(UserWarning, match="stopped"):
        trace = _Run(Quadratic(), disturb=disturb, steps=10**6, workers=3, slow="constant:1")()
    audit(trace)
    assert trace.config["replaced"] == {"worker 0": 1, "worker 1": 1, "worker 2": 1}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_hangs_is_replaced(engine, tmp_path):
    problem = Misbehaving("hang once", marker=tmp_path / "hung")

    def one_is_replaced(training):
        """And has delivered: one of them hangs at its first gradient."""
        return training.engine.server.config["replaced"] and min(gradients_of(training, 2)) > 0

    with pytest.warns(UserWarning, match=r"worker \d did not respond for 1 s \(after update \d+\) and is restarted"):
        trace = train_until(one_is_replaced, problem, RULE, workers=2, engine=engine, deadline=1.0, slow="constant:5")
    audit(trace)
    assert (tmp_path / "hung").exists()


def test_a_worker_a_hundred_times_slower_is_kept_and_its_late_work_used():
    def late_work_is_used(training):
        log = training.engine.server.log
        return bool((log.column("delay")[log.column("worker") == 0] > 20).any())

    slow = {0: "constant:200", 1: "constant:2", 2: "constant:2"}
    trace = train_until(late_work_is_used, Quadratic(), RULE, workers=3, slow=slow)
    audit(trace)
    assert trace.config["replaced"] == {}
    made = torch.cat([torch.zeros(1), trace.time])[trace.version]  # when there was the query that each was taken at
    assert (trace.time - made)[trace.worker == 0].min() > 0.199
    assert torch.equal(lg.replay(trace, Quadratic(), RULE).output, trace.output)


@pytest.mark.filterwarnings("ignore:refused")
@pytest.mark.parametrize(
    ("how", "reason", "engine"),
    [("nan", "not finite", "processes"), ("shape", "shape", "processes"), ("dtype", "dtype", "processes"),
     ("raise", "OSError: the data is gone", "processes"), ("nan", "not finite", "threads"),
     ("raise", "OSError: the data is gone", "threads")],
)  # fmt: skip
def test_when_all_gradients_are_bad_the_run_ends_and_says_why(how, reason, engine):
    with (
        pytest.warns(UserWarning, match="worker 0 is dropped"),
        pytest.raises(TrainingError, match=f"dropped.*{reason}"),
    ):
        lg.train(Misbehaving(how), RULE, steps=50, workers=1, engine=engine, max_refusals=3)


@pytest.mark.parametrize(
    "how",
    ["repeated", "short", "long", "started again", "from the future",
     *(pytest.param(how, marks=pytest.mark.slow) for how in ("empty", "garbage", "of no slot"))],
)  # fmt: skip
def test_a_worker_that_sends_what_no_worker_sends_is_restarted_and_no_other_is_disturbed(how, tmp_path):
    with pytest.warns(UserWarning, match=r"worker \d died after update \d+ \(.*\) and is restarted"):
        trace = train_until(
            lambda training: training.engine.server.config["replaced"] and training.version > 200,
            Babbling(how, tmp_path / "babbled"), RULE, workers=3, prefetch=1, slow="constant:1",
        )  # fmt: skip
    audit(trace)
    assert sum(trace.config["replaced"].values()) == 1
    assert trace.config["refusals"] == {}
    assert torch.equal(lg.replay(trace, Babbling(how, tmp_path / "babbled"), RULE).output, trace.output)


FAST = lg.SGD(lr=1.5)  # the longest gradients make its state infinite


def _checkpoints_are_sound(folder):
    return all(leaf.isfinite().all() for path in checkpoint_paths(folder) for leaf in read_checkpoint(path)[0].values())


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_whose_state_is_poisoned_returns_to_a_checkpoint(engine, kept, tmp_path):
    problem = Poisonous(tmp_path, doses=2)
    with pytest.warns(UserWarning, match=r"was not finite at update \d+: the run goes back to update \d+"):
        trace = lg.train(problem, FAST, steps=400, workers=2, engine=engine, record_every=20, checkpoint_every=25,
                         out=tmp_path / "run" if kept else None)  # fmt: skip
    audit(trace)
    assert trace.complete
    assert trace.config["returns"] in (1, 2)  # both doses may have come before the first was noticed
    assert trace.config["refusals"] == {}
    assert trace.output.isfinite().all()
    assert trace.loss.isfinite().all()
    assert not kept or _checkpoints_are_sound(tmp_path / "run")
    assert torch.equal(lg.replay(trace, Poisonous(tmp_path, doses=0), FAST).output, trace.output)


@pytest.mark.filterwarnings("ignore:the state was not finite")
def test_a_poisoned_run_goes_back_also_where_all_its_checkpoints_are_damaged(tmp_path):
    """The newest is in memory, too."""
    folder, dose, damaged_at = tmp_path / "run", tmp_path / "dose-0", []

    def damaged_poisoned_and_back(training):
        if training.version > 100 and not damaged_at:
            for path in folder.glob("checkpoint-*"):
                path.write_bytes(b"nothing of use")
            damaged_at.append(training.version)
            dose.unlink()  # so that a worker takes it
        return training.engine.server.config["returns"] and training.version > 100

    dose.touch()
    trace = train_until(damaged_poisoned_and_back, Poisonous(tmp_path, doses=1), FAST, out=folder, workers=2,
                        engine="threads", slow="constant:1", checkpoint_every=10**6)  # fmt: skip
    audit(trace)
    assert trace.config["returns"] == 1
    assert torch.equal(read_checkpoint(checkpoint_paths(folder)[0])[0]["output"], trace.output)


def test_a_first_state_that_is_not_finite_is_an_error(tmp_path):
    problem = Quadratic()
    problem.start = lambda: torch.full((10,), torch.nan, dtype=torch.float64)
    with pytest.raises(TrainingError, match="infinite or NaN before the first update"):
        lg.train(problem, FAST, steps=10, workers=1, engine="threads", out=tmp_path)


def test_a_run_that_is_poisoned_again_and_again_gives_up_with_a_sound_checkpoint(tmp_path):
    problem = Poisonous(tmp_path, doses=10**6)
    with (
        pytest.warns(UserWarning, match="the run goes back to update"),
        pytest.raises(TrainingError, match="infinite or NaN 4 times in a row; the last checkpoint is sound: .* clip"),
    ):
        lg.train(problem, FAST, steps=10**4, workers=2, engine="threads", record_every=10**4, out=tmp_path / "run")
    assert _checkpoints_are_sound(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:refused")
@pytest.mark.parametrize(("defence", "refused"), [({"clip": 10.0}, 0), ({"max_norm_ratio": 50.0}, 5)])
def test_long_gradients_are_shortened_or_refused_where_that_is_asked_for(defence, refused, tmp_path):
    problem, rule = Poisonous(tmp_path, doses=5), lg.SGD(lr=0.5)

    def all_have_come(training):
        refusals = sum(training.engine.server.refusals.values())
        return len(list(tmp_path.glob("dose-*"))) == 5 and refusals >= refused and min(gradients_of(training, 2)) > 100

    trace = train_until(all_have_come, problem, rule, workers=2, engine="threads", slow="constant:1", **defence)
    audit(trace)
    assert trace.config["returns"] == 0
    assert sum(trace.config["refusals"].values()) == refused
    assert trace.loss[-1] < trace.loss[0] * 10
    if refused:  # the others are the problem's own
        assert torch.equal(lg.replay(trace, Poisonous(tmp_path, doses=0), rule).output, trace.output)


def test_clipped_gradients_replay_bit_for_bit():
    problem = SoftmaxRegression(load("digits"), batch=16)
    trace = lg.train(problem, RULE, steps=200, workers=2, engine="threads", clip=0.5)
    assert torch.equal(lg.replay(trace, problem, RULE).output, trace.output)
    assert not torch.equal(lg.simulate(problem, RULE, 1, 200).output, trace.output)


@pytest.mark.filterwarnings("ignore:worker .* did not respond")
def test_a_run_without_progress_ends_with_the_reason_and_a_checkpoint(tmp_path):
    over = threading.Event()
    how = {"steps": 1000, "workers": 1, "engine": "threads", "deadline": 0.3, "stall": 2.0}
    try:
        with pytest.raises(TrainingError, match="no update for 2 s after .*; restarted so far: worker 0") as ended:
            lg.train(_Hanging(over), RULE, out=tmp_path, **how)
    finally:
        over.set()
    version = read_checkpoint(checkpoint_paths(tmp_path)[0])[1]["version"]
    assert 0 < version <= 30
    assert f"after update {version};" in str(ended.value)


class _Hanging(Quadratic):
    """After 30 gradients of all workers together, none until it is over."""

    def __init__(self, over):
        super().__init__()
        self.calls, self.over = itertools.count(), over

    def gradient(self, x, sample):
        if next(self.calls) >= 30:
            self.over.wait()
        return super().gradient(x, sample)


class _BadWorker(Quadratic):
    """Worker threads can tell who they are: one of them sends nonsense."""

    def gradient(self, x, sample):
        grad = super().gradient(x, sample)
        return grad * torch.nan if threading.current_thread().name.endswith("-1") else grad


@pytest.mark.filterwarnings("ignore:refused")
def test_one_bad_worker_is_dropped_and_the_others_go_on():
    with pytest.warns(UserWarning, match="worker 1 is dropped: 4 gradients in a row were refused"):
        trace = train_until(lambda training: 1 in training.engine.server.dropped and training.version > 300,
                            _BadWorker(), RULE, workers=3, engine="threads", max_refusals=4)  # fmt: skip
    assert trace.config["refusals"] == {"worker 1": 4}
    assert 1 not in trace.worker
    assert trace.output.isfinite().all()


def test_a_problem_that_cannot_be_pickled_is_refused_with_a_remedy():
    problem = Quadratic()
    problem.secret = lambda: None
    with pytest.raises(ValueError, match='cannot be sent to worker processes .* use engine="threads"'):
        lg.train(problem, RULE, steps=10, workers=1)
    assert lg.train(problem, RULE, steps=10, workers=1, engine="threads").complete


@pytest.fixture
def _no_backoff(monkeypatch):
    monkeypatch.setattr(supervisor, "_MIN_BACKOFF", 0.01)


@pytest.mark.usefixtures("_no_backoff")
@pytest.mark.filterwarnings("ignore:worker .* died")
def test_workers_that_die_as_soon_as_they_start_end_the_run():
    with pytest.raises(TrainingError, match="5 workers in a row died before their first gradient, .* exit code 7"):
        lg.train(Stillborn(), RULE, steps=10, workers=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_join_and_leave_while_it_runs(engine, tmp_path):
    def disturb(training):
        wait_until(lambda: training.version > 20)
        training.set_workers(4)
        wait_until(lambda: len(set(training.engine.server.log.column("worker", 50).tolist())) == 4)
        (tmp_path / "workers").write_text("1\n")
        wait_until(lambda: list(training.workers) == [0])
        wait_until(lambda: set(training.engine.server.log.column("worker", 60).tolist()) == {0})  # all have left
        training.stop()

    with pytest.warns(UserWarning, match="stopped"):
        trace = _Run(Quadratic(), disturb=disturb, folder=tmp_path, steps=10**6, workers=2, engine=engine,
                     slow="constant:3", prefetch=1)()  # fmt: skip
    audit(trace)
    assert set(trace.worker.tolist()) == {0, 1, 2, 3}
    assert set(trace.worker[-30:].tolist()) == {0}
    assert trace.config["replaced"] == {}


def test_a_bad_control_file_is_ignored_with_a_word(tmp_path):
    (tmp_path / "workers").write_text("many")
    with pytest.warns(UserWarning, match=r"must hold an integer in 1..1000, got 'many'"):
        trace = lg.train(Quadratic(), RULE, steps=30, workers=1, engine="threads", out=tmp_path)
    assert trace.complete
    assert not (tmp_path / "workers").exists()


def _put_there(path, kind):
    match kind:
        case "a fifo":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a link":
            path.symlink_to("/etc/passwd")
        case "a link to nothing":
            path.symlink_to(path.parent / "nowhere")
        case "a huge number":
            path.write_text("9" * 10_000)
        case "too many":
            path.write_text("1001")
        case "bytes":
            path.write_bytes(bytes(range(256)))
        case "a negative number":
            path.write_text("-3")


@pytest.mark.parametrize(
    "kind",
    ["a fifo", "a folder", "a link", "a link to nothing", "a huge number", "too many", "bytes", "a negative number"],
)
def test_whatever_else_lies_where_the_control_file_should_be_is_ignored_with_one_warning(kind, tmp_path):
    control = ControlFile(tmp_path)
    assert control.read() is None
    _put_there(tmp_path / "workers", kind)
    with pytest.warns(UserWarning, match="must hold an integer in 1..1000, .*: ignored") as warned:
        assert [control.read() for _ in range(3)] == [None] * 3
    assert [one.category for one in warned].count(UserWarning) == 1
    if kind == "a folder":
        (tmp_path / "workers").rmdir()
    (tmp_path / "workers").write_text(" 7\n")
    assert [control.read(), control.read()] == [7, None]


@pytest.mark.slow
def test_where_there_are_too_many_open_files_fewer_workers_go_on():
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lg.train(Quadratic(), RULE, steps=10, workers=1)  # the fork server has its own limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"worker \d+ could not be started \(.*Too many open files.*others con"):
            trace = lg.train(Quadratic(), RULE, steps=2000, workers=40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    audit(trace)
    assert trace.complete


def test_a_network_with_other_first_weights_continues_from_its_checkpoint(tmp_path):
    """As in a script that makes its module anew each time it is started."""

    def problem():
        return ModuleProblem(torch.nn.Linear(64, 10), load("digits"))

    first = problem()
    before = lg.train(first, lg.SGD(lr=0.1), steps=60, workers=2, engine="threads", out=tmp_path)
    trace = lg.resume(tmp_path, problem(), lg.SGD(lr=0.1), steps=120)
    assert torch.equal(lg.replay(trace, first, lg.SGD(lr=0.1)).output, trace.output)
    assert trace.loss[-1] < before.loss[0]
    with pytest.raises(ValueError, match="started from other parameters"):
        lg.replay(trace, problem(), lg.SGD(lr=0.1))


class _Nameless(Quadratic):
    """A user's own problem, which has no checksum of its data."""

    def __getattribute__(self, name):
        if name == "fingerprint":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_problem_without_a_fingerprint_continues_with_a_warning(tmp_path):
    lg.train(_Nameless(), RULE, steps=20, workers=1, engine="threads", out=tmp_path)
    with pytest.warns(
        UserWarning, match=r"has no fingerprint\(\): that its data are those of the checkpoint could not"
    ):
        assert lg.resume(tmp_path, _Nameless(), RULE, steps=40).complete


def test_the_lock_of_a_folder_does_not_go_with_any_file_in_it(tmp_path):
    with lock_folder(tmp_path):
        for path in tmp_path.iterdir():
            path.unlink()
        with pytest.raises(ValueError, match="another run is using"), lock_folder(tmp_path):
            pass
    with lock_folder(tmp_path):
        pass


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path):
    lg.train(Quadratic(), RULE, steps=10, workers=1, engine="threads", out=tmp_path)
    with pytest.raises(ValueError, match="holds a run already: resume it"):
        lg.train(Quadratic(), RULE, steps=10, workers=1, engine="threads", out=tmp_path)


def test_a_resumed_run_continues_with_its_streams_and_replays_as_a_whole(tmp_path, monkeypatch):
    problem = SoftmaxRegression(load("digits"), batch=16)
    lg.train(problem, RULE, steps=150, workers=2, engine="threads", out=tmp_path)
    reads = []

    def counted(path):
        tensors, description = read_checkpoint(path)
        reads.append(description["version"])
        return tensors, description

    monkeypatch.setattr("lategrad.serve.checkpoints.archive.read_checkpoint", counted)
    trace = lg.resume(tmp_path, problem, RULE, steps=300, workers=3)
    audit(trace)
    assert len(trace.delays) == 300
    assert trace.complete
    assert trace.config["settings"]["workers"] == 3
    assert torch.equal(lg.replay(trace, problem, RULE).output, trace.output)
    assert reads == [150]
    with pytest.raises(TypeError, match="unexpected keyword argument 'seed'"):
        lg.resume(tmp_path, problem, RULE, seed=3)


def test_a_module_of_many_tensors_trains_in_processes():
    layers = [layer for _ in range(150) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    problem = ModuleProblem(torch.nn.Sequential(*layers), load("digits"), batch=2)
    assert lg.train(problem, lg.SGD(lr=1e-3), steps=4, workers=1).complete


def test_two_runs_cannot_share_a_folder(tmp_path):
    def disturb(training):
        wait_until(lambda: training.version > 5)
        with pytest.raises(ValueError, match="another run is using"):
            lg.resume(tmp_path, Quadratic(), RULE)
        training.stop()

    with pytest.warns(UserWarning, match="stopped"), lock_folder(tmp_path):
        _Run(Quadratic(), disturb=disturb, folder=tmp_path, steps=10**6, workers=1, engine="threads")()


def test_many_fast_threads_do_not_keep_the_server_from_its_other_duties():
    """Workers faster than the server: there is always another gradient waiting."""

    def disturb(training):
        wait_until(lambda: training.version > 20 and len(training.workers) == 4)
        training.set_workers(1)
        wait_until(lambda: len(training.workers) == 1)
        training.stop()

    with pytest.warns(UserWarning, match="stopped"):
        _Run(Marked(500_000), disturb=disturb, rule=RULE, steps=10**6, workers=4, engine="threads",
             record_every=10**6)()  # fmt: skip


class _DyingThread(Quadratic):
    def to(self, device):
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        return self


@pytest.mark.usefixtures("_no_backoff")
@pytest.mark.filterwarnings("ignore:worker .* died")
def test_a_thread_that_dies_is_noticed():
    with pytest.raises(TrainingError, match="5 workers in a row died .* MemoryError: no room"):
        lg.train(_DyingThread(), RULE, steps=10, workers=1, engine="threads")


@pytest.mark.filterwarnings("error:worker .* did not respond")
def test_workers_are_not_hung_because_the_server_was_busy():
    """The server's thread is held up for longer than the deadline, in which every worker has answered."""
    pauses = []

    def busy(training):
        is_long = not pauses and len(training.workers) == 3 and training.version > 30
        time.sleep(2.5 if is_long else 0.02)  # in which the other workers answer
        pauses.extend([training.version] * is_long)
        return pauses and training.version > pauses[0] + 20  # in which the workers are checked

    trace = train_until(busy, Quadratic(), RULE, workers=3, engine="threads", deadline=2.0, record_every=1)
    assert trace.config["replaced"] == {}


def test_a_mistake_in_the_settings_leaves_no_half_made_run(tmp_path):
    with pytest.raises(ValueError, match="log must be one of 'tensorboard', 'wandb'"):
        lg.train(Quadratic(), RULE, steps=10, out=tmp_path, log="tensorbord")
    with pytest.raises(ValueError, match="notes must be plain JSON"):
        lg.train(Quadratic(), RULE, steps=10, out=tmp_path, notes={"a": object()})
    problem = Quadratic()
    problem.secret = lambda: None
    with pytest.raises(ValueError, match='use engine="threads"'):
        lg.train(problem, RULE, steps=10, out=tmp_path)
    assert lg.train(problem, RULE, steps=10, out=tmp_path, engine="threads").complete


@pytest.mark.filterwarnings("ignore:LogFiles is switched off", "ignore:TensorBoard is switched off")  # if it is slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in a thread of TensorBoard
def test_a_full_disk_does_not_end_a_run_with_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def disturb(training):
        wait_until(lambda: training.version > 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        wait_until(lambda: any("failed, training continues" in str(warning.message) for warning in warned))
        version = training.version
        wait_until(lambda: training.version > version + 300)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        training.stop()

    try:
        with (
            pytest.warns(UserWarning, match="stopped: the trace ends after"),
            pytest.warns(UserWarning, match="the log of updates cannot be written at update"),
            pytest.warns(UserWarning, match="failed, training continues") as warned,
        ):
            trace = _Run(Quadratic(), disturb=disturb, folder=tmp_path, steps=10**6, workers=2, engine="threads",
                         slow="constant:1", log="tensorboard", checkpoint_every=100)()  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(trace.delays) > 300
    assert torch.equal(lg.Trace.load(tmp_path / "trace.safetensors").output, trace.output)


# The command line, in a process of its own


def _reset_signals():
    """A shell may have told its background jobs to ignore them, and a run respects that."""
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)


def _start(*arguments):
    return subprocess.Popen([sys.executable, "-m", "lategrad", *map(str, arguments)], start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=_reset_signals)  # fmt: skip


def _of_session(session):
    return [pid for pid, (_, its_session) in _processes().items() if its_session == session]


def _wait_for_updates(folder, count):
    rows = folder / "updates.bin"
    wait_until(lambda: rows.exists() and rows.stat().st_size >= ROW_BYTES * count)


TRAIN = (
    "train",
    "--problem",
    "digits",
    "--batch",
    16,
    "--workers",
    2,
    "--slow",
    "constant:1",
    "--checkpoint-every",
    50,
)


def _command(capsys, *arguments):
    """The same in this process, which has imported everything already: exit code, output and errors."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return ended.value.code or 0, *capsys.readouterr()


def test_a_killed_server_leaves_no_orphans_and_is_resumed_without_loss_or_repetition(tmp_path, capsys):
    night = _start(*TRAIN, "--steps", 10**6, "--out", tmp_path)
    _wait_for_updates(tmp_path, 200)
    os.kill(night.pid, signal.SIGKILL)
    night.communicate()
    wait_until(lambda: not _of_session(night.pid))
    before = read_checkpoint(checkpoint_paths(tmp_path)[0])[1]["version"]
    kept = (tmp_path / "updates.bin").read_bytes()[: ROW_BYTES * before]
    code, out, err = _command(capsys, "resume", tmp_path, "--steps", before + 300)
    assert code == 0, err
    assert f"{before + 300:,} updates in" in out
    assert f"resuming at update {before} of {before + 300}" in err
    assert (tmp_path / "updates.bin").read_bytes()[: ROW_BYTES * before] == kept
    trace = lg.Trace.load(tmp_path / "trace.safetensors")
    audit(trace)
    problem, rule = SoftmaxRegression(load("digits", "standardise-globally"), batch=16), lg.Anytime(lg.OGD(lr=0.1))
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
    with pytest.raises(ValueError, match="has other data or another preprocessing"):
        lg.replay(trace, SoftmaxRegression(load("digits", "centre"), batch=16), rule)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_sigterm_and_sighup_leave_a_checkpoint_and_nothing_else(sent, code, tmp_path):
    run = _start(*TRAIN, "--steps", 10**6, "--out", tmp_path)
    _wait_for_updates(tmp_path, 100)
    for _ in range(2):  # a key that bounces; twice the whole group, as a terminal does
        os.killpg(run.pid, sent)
    _out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == code, err
    assert "Traceback" not in err
    assert "the trace ends after" in err
    assert err.splitlines()[-1] == f"to continue: lategrad resume {tmp_path}"
    wait_until(lambda: not _of_session(run.pid))
    trace = lg.Trace.load(tmp_path / "trace.safetensors")
    assert read_checkpoint(checkpoint_paths(tmp_path)[0])[1]["version"] == len(trace.delays) >= 100


@pytest.mark.slow
def test_ctrl_c_while_the_processes_still_import_prints_no_traceback(tmp_path):
    run = _start(*TRAIN, "--steps", 10**6, "--out", tmp_path)
    wait_until(lambda: len(_of_session(run.pid)) >= 3)  # with a resource tracker and a fork server
    os.killpg(run.pid, signal.SIGINT)
    _out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"to continue: lategrad resume {tmp_path}"
    assert len(lg.Trace.load(tmp_path / "trace.safetensors").delays) == 0
    wait_until(lambda: not _of_session(run.pid))


@pytest.mark.slow
def test_sigusr1_makes_a_checkpoint_at_once_and_the_run_continues(tmp_path):
    run = _start(*TRAIN[:-2], "--steps", 10**6, "--out", tmp_path)
    wait_until(lambda: (tmp_path / "checkpoint-000000000000.json").exists())
    wait_until(lambda: len(_of_session(run.pid)) >= 5)  # its workers are there
    time.sleep(1)
    for _ in range(2):
        newest = checkpoint_paths(tmp_path)[0]
        os.killpg(run.pid, signal.SIGUSR1)  # all processes, as batch systems do
        wait_until(lambda was=newest: checkpoint_paths(tmp_path)[0] != was)
    os.kill(run.pid, signal.SIGTERM)
    _out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 75, err
    assert "died" not in err


_STUCK = """
import ctypes, sys, lategrad as lg
from lategrad.problems import Quadratic

class Stuck(Quadratic):
    def gradient(self, x, sample):
        if type(self).__module__ == "__mp_main__":
            open(sys.argv[1], "w").close()
            ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock
        return super().gradient(x, sample)

if __name__ == "__main__":
    lg.train(Stuck(), lg.SGD(lr=0.1), steps=10, workers=2)
"""


def test_a_worker_stuck_in_c_code_dies_with_its_killed_server_and_nothing_is_left(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(_STUCK)
    temporary = Path(tempfile.mkdtemp(prefix="lg-"))  # pytest's own folders are too long for the name of a socket
    run = subprocess.Popen([sys.executable, script, tmp_path / "at it"], start_new_session=True,
                           env={**os.environ, "TMPDIR": str(temporary)})  # fmt: skip
    wait_until((tmp_path / "at it").exists)
    assert list(temporary.iterdir()), "the fork server has a socket there"
    run.kill()
    run.wait()
    wait_until(lambda: not _of_session(run.pid))
    assert not list(temporary.iterdir())
    temporary.rmdir()


def test_the_command_line_trains_replays_and_explains(tmp_path, capsys):
    folder = tmp_path / "run"
    train = ("train", "--steps", 300, "--workers", 2, "--slow", "0=constant:5", "--out", folder)
    code, out, err = _command(capsys, *train)
    assert code == 0, err
    assert "300 updates in" in out
    assert (folder / "training.png").exists()
    what_if = tmp_path / "what-if"
    replay = ("replay", folder, "--rule", "sgd", "anytime-sgd", "--lr", 0.1, 0.3, "--out", what_if)
    code, out, err = _command(capsys, *replay)
    assert code == 0, err
    assert "anytime-sgd" in out
    assert "recorded: anytime-sgd" in err
    assert (what_if / "results.csv").exists()


def test_mistakes_on_the_command_line_are_explained_in_one_line(tmp_path, capsys):
    lg.train(Quadratic(), RULE, steps=5, workers=1, engine="threads", out=tmp_path)
    for arguments, message in [
        (("train", "--slow", "cluster:workers=3"), "slow must be a distribution"),
        (
            ("train", "--slow", "constant:1", "2=constant:2"),
            "--slow takes one distribution for all workers",
        ),
        (("train", "--engine", "carrier-pigeon"), "engine must be one of 'processes', 'threads'"),
        (("train", "--workers", 0), "workers must be an integer >= 1"),
        (("train", "--log", "tensorboard"), "needs a folder to write to"),
        (("train", "--out", tmp_path), "holds a run already: resume it"),
        (("resume", tmp_path), "was not made by `lategrad train`"),
        (("resume", tmp_path / "nowhere"), "no checkpoint in"),
        (("replay", tmp_path / "nowhere"), "no trace at"),
    ]:
        with pytest.raises(SystemExit) as exit:
            cli.main([str(argument) for argument in arguments])
        assert exit.value.code == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert message in errors[0]


@pytest.mark.slow
def test_the_example_trains_and_replays():
    script = Path(__file__).parents[2] / "examples" / "real_training.py"
    done = subprocess.run([sys.executable, script, "--workers", "2", "--steps", "300"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Steady, trained  test accuracy 0." in done.stdout


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lg.train(
        Quadratic(), RULE, steps=300, workers=2, engine="threads", slow="constant:2", out=tmp_path, log="tensorboard"
    )
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "delay/mean", "delay/p95", "delay/max", "updates per second", "workers/alive"} <= set(
        events.Tags()["scalars"]
    )
    assert "delay" in events.Tags()["histograms"]
    assert events.Scalars("delay/mean")[-1].step == 300


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker .* died")
def test_soak_ten_minutes_of_random_kills():
    """100,000 updates and more, a worker killed every second: nothing lost, nothing twice, as good as undisturbed."""
    problem, rule = SoftmaxRegression(load("digits"), batch=16), lg.Anytime(lg.OGD(lr=0.3))
    rng, minutes = random.Random(1), float(os.environ.get("LATEGRAD_SOAK_MINUTES", "10"))

    def disturb(training):
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end or training.version < 10_000 * minutes:
            time.sleep(1)
            if locations := list(training.workers.values()):
                _kill(rng.choice(locations).pid)
        training.stop()

    run = _Run(problem, disturb=disturb, rule=rule, steps=10**9, workers=3, record_every=10**9, slow="constant:8")
    with pytest.warns(UserWarning, match="stopped"):
        trace = run()
    audit(trace)
    updates = len(trace.delays)
    assert updates >= 10_000 * minutes
    assert sum(trace.config["replaced"].values()) >= 30 * minutes
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output), "the audit: replayed, it is the same"
    undisturbed = lg.simulate(problem, rule, 2, updates)
    assert trace.loss[-1].item() == pytest.approx(undisturbed.loss[-1].item(), rel=0.05)
