"""Training on Ray: the server's actor by itself, then real clusters of several nodes on this machine, with real deaths.

Nothing is asserted about times: every wait is for something to happen, and what happened is audited in the trace.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Settings, TrainingError

ray = pytest.importorskip("ray")

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from lategrad.serve.cluster import ClusterTraining  # noqa: E402
from lategrad.serve.engines.ray import Header, Place, ServerActor, pack, unpack  # noqa: E402

PROBLEM = Quadratic(dim=6, noise=0.1)
RULE = lg.Anytime(lg.OGD(lr=1.0))
HERE = Place(0, "here")


def audit(trace):
    """Nothing was applied twice, and every delay belongs to a query that had been handed out."""
    pairs = list(zip(trace.worker.tolist(), trace.sequence.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == len(trace.delays)
    assert bool((trace.version >= 0).all())
    assert bool((trace.delays >= 0).all())
    for worker in trace.worker.unique():
        mine = trace.worker == worker
        order = trace.sequence[mine].argsort()
        assert bool((trace.version[mine][order].diff() >= 0).all())  # later jobs have later queries


# ---- The actor, without Ray


@pytest.fixture
def actor(monkeypatch, tmp_path):
    monkeypatch.setattr(Place, "here", staticmethod(lambda: HERE))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr("lategrad.serve.engines.ray.Metrics.__init__", lambda self, run: None)
    monkeypatch.setattr("lategrad.serve.engines.ray.Metrics.note", lambda self, *_: None)
    with warnings.catch_warnings():
        yield ServerActor("test")


def begin(actor, steps=100, files=None, **settings):
    return actor.begin(PROBLEM, RULE, Settings(steps=steps, engine="ray", **settings), files)


def gradient_at(reply):
    header, query = unpack(reply)
    return pack(header, query - 1)


def test_a_vector_travels_inside_the_call_or_beside_it():
    header = Header(1, 2, 3, 4, 5)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for length in (1, 7, 100_000):
            vector = torch.arange(length).to(dtype)
            parts = pack(header, vector)
            assert len(parts) == (1 if length < 1000 else 2)
            back, same = unpack(*parts)
            assert back == header
            assert same.dtype == dtype
            assert torch.equal(same, vector)


def test_workers_wait_until_the_server_knows_where_to_begin(actor):
    assert actor.join(0, 0, HERE) == b""
    assert actor.status(0) is None
    begin(actor)
    header, query = unpack(actor.join(0, 0, HERE))
    assert (header.worker, header.sequence, header.version) == (0, 0, 0)
    assert torch.equal(query, PROBLEM.start())


def test_a_gradient_of_an_earlier_life_is_void_even_if_its_numbers_fit(actor):
    begin(actor)
    reply = actor.join(0, 0, HERE)
    header, query = unpack(reply)
    stale = pack(header._replace(life=header.life + 1), query)
    again, _ = unpack(actor.exchange(*stale))
    assert actor.status(0).telemetry.version == 0
    assert actor.status(0).telemetry.refused == 0
    assert again.sequence == 1  # it got work at once


def test_a_gradient_that_was_sent_twice_is_applied_once(actor):
    begin(actor)
    message = gradient_at(actor.join(0, 0, HERE))
    actor.exchange(*message)
    actor.exchange(*message)
    status = actor.status(0)
    assert (status.telemetry.version, status.telemetry.refused) == (1, 1)
    assert "used before" in status.messages[0]


def test_a_member_that_is_let_go_hands_back_its_gradient_first(actor):
    begin(actor)
    message = gradient_at(actor.join(0, 0, HERE))
    actor.let_go(0)
    assert actor.exchange(*message) is None
    assert actor.status(0).telemetry.version == 1


def test_a_late_gradient_of_a_dead_member_is_used_until_the_deadline(actor):
    begin(actor, deadline=0.05)
    late, too_late = (gradient_at(actor.join(member, member, HERE)) for member in (0, 1))
    for member in (0, 1):
        actor.bury(member)
    assert actor.exchange(*late) is None
    assert actor.status(0).telemetry.version == 1
    time.sleep(0.1)
    actor.status(0)
    actor.exchange(*too_late)
    status = actor.status(0)
    assert (status.telemetry.version, status.telemetry.refused) == (1, 1)


def test_nothing_is_applied_after_the_last_update(actor):
    begin(actor, steps=1)
    first, second = (gradient_at(actor.join(member, member, HERE)) for member in (0, 1))
    assert actor.exchange(*first) is None
    assert actor.exchange(*second) is None
    trace, files = actor.finish({})
    assert trace.complete
    assert len(trace.delays) == 1
    assert "checkpoint-000000000001.json" in files


def test_a_server_goes_on_from_the_files_of_another(actor, tmp_path):
    begin(actor)
    reply = actor.join(0, 0, HERE)
    for _ in range(5):
        reply = actor.exchange(*gradient_at(reply))
    expected = actor._server.output().clone()
    _, files = actor.finish({})
    actor.close()
    other = ServerActor("other")
    assert begin(other, files=files) == 5
    assert torch.equal(other._server.output(), expected)
    header, _ = unpack(other.join(0, 0, HERE))
    assert header.sequence == 6  # 0, ..., 4 were used and 5 was out: a sample is never used twice
    assert header.version == 5


def test_failures_are_refusals_and_drop_a_worker(actor):
    begin(actor, max_refusals=2)
    reply = actor.join(0, 3, HERE)
    for _ in range(2):
        header, _ = unpack(reply)
        reply = actor.fail(header, "OSError: the data is gone")
    assert reply is None
    status = actor.status(0)
    assert status.dropped == [3]
    assert "the data is gone" in status.last_refusal


@pytest.mark.parametrize("workers", ["0:2", "3:2", "2:", "a", 0, -1, "1:2:3", True])
def test_a_bad_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match="workers must be"):
        Settings(steps=1, engine="ray", workers=workers)


def test_what_only_ray_can_do_is_refused_elsewhere():
    for bad in ({"workers": "2:8"}, {"address": "auto"}, {"shards": 2}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Settings(steps=1, engine="threads", **bad)


def test_without_ray_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "lategrad.serve.cluster", None)
    with pytest.raises(ImportError, match="pip install 'lategrad\\[ray\\]'"):
        lg.train(PROBLEM, RULE, steps=1, engine="ray")


# ---- Real clusters


def processes_of_ray(*names):
    """The ids of Ray's processes, or of those with these names, that descend from this one."""
    import psutil  # Ray brings it along

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and any(
                name in command for name in names or ("ray::", "raylet")
            ):
                found.append(process.pid)
    return found


@pytest.fixture(scope="module", autouse=True)
def _environment():
    """Workers import the tests' problems; no process of Ray may be left at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        yield
    assert wait_for(lambda: not processes_of_ray(), 20), processes_of_ray()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_run_with_a_ray_of_its_own(tmp_path):
    out = tmp_path / "run"
    trace = lg.train(
        PROBLEM, RULE, steps=300, workers=2, engine="ray", out=out, checkpoint_every=100, log="tensorboard"
    )
    assert not ray.is_initialized()
    assert trace.complete
    assert len(trace.delays) == 300
    assert trace.loss[-1] < trace.loss[0] / 10
    audit(trace)
    again = lg.replay(trace, PROBLEM, RULE)
    assert torch.equal(again.output, trace.output)
    assert list((out / "tensorboard").iterdir())
    assert lg.Trace.load(out / "trace.safetensors").complete
    longer = lg.resume(out, PROBLEM, RULE, engine="threads", steps=400)  # one format of checkpoints for all engines
    assert torch.equal(longer.delays[:300], trace.delays)
    audit(longer)


@pytest.fixture(scope="module")
def cluster(_environment):
    """A head without CPUs, to which tests add nodes."""
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Run(contextlib.AbstractContextManager):
    """A training in a thread, its server on a given node as long as that lives."""

    def __init__(self, home, problem=PROBLEM, rule=RULE, **settings):
        self.training = ClusterTraining(problem, rule, Settings(engine="ray", **settings), None, progress=False)
        self.training._home = lambda: NodeAffinitySchedulingStrategy(home.node_id, soft=True)
        self._rule, self.trace, self.error = rule, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.trace = self.training.run()
        except Exception as error:
            self.error = error

    def wait_for(self, condition, seconds=60):
        assert wait_for(lambda: self.error or condition(), seconds), (self.training.workers, self.training.server)
        assert self.error is None

    def wait_for_progress(self, updates=20):
        self.wait_for(lambda: self.training.server is not None)
        goal = self.training._seen + updates
        self.wait_for(lambda: self.training._seen >= goal)

    def __exit__(self, *_):
        self.training.stop()
        self._thread.join(60)

    def end(self):
        self.__exit__()
        assert self.error is None
        audit(self.trace)
        again = lg.replay(self.trace, PROBLEM, self._rule)
        torch.testing.assert_close(again.output, self.trace.output, rtol=1e-12, atol=1e-14)
        return self.trace


@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped")
def test_workers_come_and_go_with_their_machines(cluster):
    home = cluster.add_node(num_cpus=1)
    with Run(home, steps=10**6, workers="1:3", slow="constant:10") as run:
        workers = lambda: run.training.workers  # noqa: E731
        run.wait_for_progress()
        assert list(workers()) == [0]

        guest = cluster.add_node(num_cpus=2)
        run.wait_for(lambda: len(workers()) == 3)
        assert [place.node for place in workers().values()].count(guest.node_id) == 2

        victim = workers()[2]
        os.kill(victim.pid, signal.SIGKILL)
        run.wait_for(lambda: len(workers()) == 3 and victim not in workers().values())

        cluster.remove_node(guest, allow_graceful=False)
        run.wait_for(lambda: workers() and all(place.node == home.node_id for place in workers().values()))
        run.wait_for_progress()
        trace = run.end()
    assert trace.loss[-1] < trace.loss[0] / 10
    assert trace.config["replaced"]["worker 2"] >= 1
    assert len(trace.worker.unique()) == 3
    cluster.remove_node(home)


@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped", "ignore:the server")
def test_a_lost_server_goes_on_elsewhere_from_its_checkpoint(cluster):
    home, other = (cluster.add_node(num_cpus=1) for _ in range(2))
    with Run(home, steps=10**6, workers="1:2", slow="constant:10", checkpoint_every=10) as run:
        run.wait_for(lambda: len(run.training.workers) == 2)
        run.wait_for_progress()

        lost = run.training.server
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_for(lambda: run.training.server not in (None, lost))
        run.wait_for_progress()

        kept = run.training._status.checkpointed
        cluster.remove_node(home, allow_graceful=False)
        run.wait_for(lambda: run.training.server is not None and run.training.server.node != home.node_id)
        assert run.training._seen >= kept > 0
        run.wait_for_progress()
        trace = run.end()
    assert trace.loss[-1] < trace.loss[0] / 10
    cluster.remove_node(other)


BALL = lg.Anytime(lg.OGD(lr=1.0, domain=lg.Ball(0.8)))  # active: the optimum has length 1


@pytest.mark.slow
def test_two_shards_make_the_updates_of_one_server(cluster, tmp_path):
    home = cluster.add_node(num_cpus=2)
    settings = {"workers": 2, "engine": "ray", "shards": 2, "checkpoint_every": 100}
    trace = lg.train(PROBLEM, BALL, steps=200, out=tmp_path, **settings)
    assert trace.complete
    audit(trace)
    alone = lg.replay(trace, PROBLEM, BALL)
    torch.testing.assert_close(trace.output, alone.output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(trace.query, alone.query, rtol=1e-12, atol=1e-14)
    assert abs(trace.output.norm().item() - 0.8) < 0.05
    longer = lg.resume(tmp_path, PROBLEM, BALL, engine="threads", shards=1, steps=300)
    audit(longer)
    cluster.remove_node(home)


def test_what_cannot_be_split_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="domain must be WholeSpace, Box, Ball"):
        lg.train(PROBLEM, lg.SGD(lr=0.1, domain=lg.Simplex()), steps=10, engine="ray", shards=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped", "ignore:the server")
def test_a_lost_shard_takes_all_back_to_the_checkpoint(cluster):
    home = cluster.add_node(num_cpus=2)
    with Run(home, rule=BALL, steps=10**6, workers=2, shards=2, slow="constant:10", checkpoint_every=20) as run:
        run.wait_for_progress(50)
        before, (shard, *_) = run.training._life, processes_of_ray("ray::ShardActor")
        os.kill(shard, signal.SIGKILL)
        run.wait_for(lambda: run.training._life != before and run.training.server is not None)
        run.wait_for_progress()
        trace = run.end()
    assert abs(trace.output.norm().item() - 0.8) < 0.05
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped")
def test_a_worker_that_is_cut_off_is_late_and_lost_only_after_the_deadline(cluster):
    home = cluster.add_node(num_cpus=2)
    with Run(home, steps=10**6, workers=2, slow="constant:10", deadline=15.0) as run:
        run.wait_for(lambda: len(run.training.workers) == 2)
        run.wait_for_progress()
        silent = run.training.workers[1]
        os.kill(silent.pid, signal.SIGSTOP)
        run.wait_for_progress(60)
        assert run.training.workers[1] == silent
        os.kill(silent.pid, signal.SIGCONT)
        run.wait_for_progress()

        os.kill(silent.pid, signal.SIGSTOP)  # and now for good
        run.wait_for(lambda: run.training.workers.get(1, silent) != silent)
        trace = run.end()
    assert trace.delays[trace.worker == 1].max() >= 50
    assert not trace.config["refusals"]
    assert trace.config["replaced"] == {"worker 1": 1}
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:refused")
def test_a_run_without_a_usable_worker_ends_with_the_reason(cluster):
    from serve_problems import Misbehaving

    home = cluster.add_node(num_cpus=1)
    settings = Settings(steps=10, engine="ray", workers=1, max_refusals=2)
    with pytest.raises(TrainingError, match="the data is gone"):
        ClusterTraining(Misbehaving("raise"), RULE, settings, progress=False).run()
    cluster.remove_node(home)
