"""Training on Ray: the server's actor by itself, then real clusters of several nodes on this machine, with real deaths.

Nothing is asserted about times: every wait is for something to happen, and what happened is audited in the trace.
"""

import contextlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lategrad as lg
from lategrad.problems import LocalSteps, Quadratic
from lategrad.serve import Settings, Training, TrainingError
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths, version_of
from lategrad.serve.compression import Compression
from lategrad.serve.jobs import ForeignMessageError, Location

ray = pytest.importorskip("ray")

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from helpers.serving import Misbehaving, Poisonous, SlowToEvaluate, audit, wait_until  # noqa: E402
from lategrad.serve.engines.ray import actors as ray_actors  # noqa: E402
from lategrad.serve.engines.ray.actors import ServerActor  # noqa: E402
from lategrad.serve.engines.ray.messages import REJOIN, WAIT, pack, unpack  # noqa: E402
from lategrad.serve.engines.segment import FAILED, Header, Segment  # noqa: E402

PROBLEM = Quadratic(dim=6, noise=0.1)
RULE = lg.Anytime(lg.OGD(lr=1.0))
HERE = Location(0, "here")


# ---- The actor, without Ray


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setattr(ray_actors, "here", lambda: HERE)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(ray_actors.Metrics, "__init__", lambda self, run: None)
    monkeypatch.setattr(ray_actors.Metrics, "record", lambda self, *_: None)
    with warnings.catch_warnings():
        yield ServerActor("test")


def begin(actor, steps=100, checkpoint=None, **settings):
    return actor.begin(PROBLEM, RULE, Settings(steps=steps, engine="ray", **settings), checkpoint).version


def status_of(actor):
    return actor.status(0, {})


def gradient_at(reply):
    header, query = unpack(reply)
    return pack(header, query - 1)


def header_alone(header):
    """The message of a gradient that lies in the segment."""
    return header._replace(dtype=-1).pack()


def failure(header):
    return header._replace(kind=FAILED, dtype=-1).pack()


def test_a_vector_travels_inside_the_call_or_beside_it():
    header = Header(kind=2, sequence=4, version=5, member=1)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for length in (1, 7, 100_000):
            vector = torch.arange(length).to(dtype)
            parts = pack(header, vector)
            assert len(parts) == (1 if length < 1000 else 2)
            back, same = unpack(*parts)
            assert back._replace(dtype=-1) == header
            assert same.dtype == dtype
            assert torch.equal(same, vector)


def test_workers_wait_until_the_server_knows_where_to_begin(actor):
    assert actor.join(0, 0, HERE) == WAIT
    assert status_of(actor) is None
    begin(actor)
    header, query = unpack(actor.join(0, 0, HERE))
    assert (header.member, header.sequence, header.version) == (0, 0, 0)
    assert torch.equal(query, PROBLEM.start())


def test_a_gradient_for_an_earlier_server_is_void_even_if_its_numbers_fit(actor):
    begin(actor)
    header, query = unpack(actor.join(0, 0, HERE))
    stale = header._replace(server_start=header.server_start + 1)
    assert actor.exchange(*pack(stale, query)) == REJOIN
    assert actor.exchange(failure(stale), reason="too late") == REJOIN
    assert status_of(actor).telemetry.version == 0
    assert status_of(actor).telemetry.refused == 0
    again, _ = unpack(actor.join(0, 0, HERE))
    assert again.sequence == 1  # it gets work at once


def test_a_worker_that_a_restarted_server_does_not_know_joins_again(actor):
    """As after a gradient that took longer than the restart."""
    begin(actor)
    message = gradient_at(actor.join(0, 0, HERE))
    other = ServerActor("restarted")
    assert other.exchange(*message) == WAIT
    begin(other)
    assert other.exchange(*message) == REJOIN
    assert status_of(other).report.activities == {}
    other.exchange(*gradient_at(other.join(0, 0, HERE)))
    assert status_of(other).report.version == 1


def test_vectors_of_one_machine_travel_through_shared_memory(actor):
    begin(actor)
    header, query = unpack(actor.join(0, 0, HERE))
    segment = Segment.create(Compression("none", len(query), query.dtype))
    assert not actor.attach(0, "elsewhere", segment.address)
    assert actor.attach(0, HERE.node, segment.address)
    for version in range(3):
        segment.grads[0].copy_(query - 1)
        again, nothing = unpack(actor.exchange(header_alone(header)))
        assert nothing is None
        assert again.version == version + 1
        header, query = again, segment.queries[0].clone()
        assert torch.equal(query, actor.server.rule.query(actor.server.state))
    actor.remove(0)
    status_of(actor)
    assert 0 in actor.segments  # a gradient may still be on its way
    assert actor.exchange(header_alone(header)) is None
    status_of(actor)
    assert not actor.segments  # its last gradient has arrived
    assert actor.exchange(header_alone(header._replace(member=7))) == REJOIN


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "in the call"])
def test_gradients_travel_in_fewer_bits(actor, shared):
    begin(actor, compression="int8")
    header, query = unpack(actor.join(0, 0, HERE))
    compression = Compression("int8", len(query), query.dtype)
    message = compression.encode(query - 1)
    segment = Segment.create(compression)
    if shared:
        assert actor.attach(0, HERE.node, segment.address)
        segment.grads[0].copy_(message)
    reply = actor.exchange(header_alone(header)) if shared else actor.exchange(*pack(header, message))
    assert unpack(reply)[0].version == 1
    assert actor.trace().config["bytes"] == {"up": len(message), "down": 2 * query.nbytes}


def test_a_worker_says_on_ray_too_what_it_has_kept(actor):
    begin(actor, compression="bfloat16")
    header, query = unpack(actor.join(0, 0, HERE))
    for parent_job in (-1, 0, 1):
        answer = header._replace(parent_job=parent_job)
        header, query = unpack(actor.exchange(*pack(answer, (query - 1).bfloat16())))
    assert actor.trace().parent_job.tolist() == [-1, 0, 1]


def test_a_server_on_ray_measures_the_drift(actor):
    begin(actor, drift=True, compile=False)
    jobs = {member: actor.join(member, member, HERE) for member in (0, 1)}
    expected = []
    for member in (0, 0, 1, 0):
        now = actor.server.rule.query(actor.server.state)
        expected.append(float((unpack(jobs[member])[1] - now).norm()))
        jobs[member] = actor.exchange(*gradient_at(jobs[member]))
    assert actor.trace().delays.tolist() == [0, 0, 2, 1]
    assert actor.trace().certificate().drift.item() == pytest.approx(sum(expected) / 4)
    assert expected[2] > 0


def test_a_segment_that_cannot_be_opened_is_told(actor):
    begin(actor)
    actor.join(0, 0, HERE)
    segment = Segment.create(Compression("none", 6, torch.float64))
    assert not actor.attach(0, HERE.node, segment.address._replace(descriptor=9999))
    assert "go through the object store" in status_of(actor).messages[0]


def test_a_gradient_that_was_sent_twice_is_applied_once(actor):
    begin(actor)
    message = gradient_at(actor.join(0, 0, HERE))
    actor.exchange(*message)
    with pytest.raises(ForeignMessageError, match="answers job 0"):  # which ends the worker
        actor.exchange(*message)
    status = status_of(actor)
    assert (status.telemetry.version, status.telemetry.refused) == (1, 0)


def test_a_poisoned_server_gives_no_checkpoint_and_goes_back(actor):
    begin(actor)
    reply = actor.exchange(*gradient_at(actor.join(0, 0, HERE)))
    sound = actor.checkpoint(0)
    actor.server.state.x.fill_(torch.inf)
    assert actor.checkpoint(0) is None
    assert status_of(actor).poisoned
    assert actor.go_back(sound) == 1
    assert not status_of(actor).poisoned
    header, _ = unpack(reply)
    reply = actor.exchange(*pack(header, torch.ones(6, dtype=torch.float64)))  # taken at a state that was given up
    assert status_of(actor).telemetry.version == 1
    actor.exchange(*gradient_at(reply))
    assert status_of(actor).telemetry.version == 2


def test_a_member_that_is_released_hands_back_its_gradient_first(actor):
    begin(actor)
    message = gradient_at(actor.join(0, 0, HERE))
    actor.release(0)
    assert actor.exchange(*message) is None
    assert status_of(actor).telemetry.version == 1


@pytest.mark.parametrize(("deadline", "used"), [(3600.0, True), (1e-9, False)])
def test_a_late_gradient_of_a_dead_member_is_used_until_the_deadline(actor, deadline, used):
    begin(actor, deadline=deadline)
    late = gradient_at(actor.join(0, 0, HERE))
    actor.remove(0)
    status_of(actor)
    assert actor.exchange(*late) is None
    status = status_of(actor)
    assert (status.telemetry.version, status.telemetry.refused) == ((1, 0) if used else (0, 1))


def test_nothing_is_applied_after_the_last_update(actor):
    begin(actor, steps=1)
    first, second = (gradient_at(actor.join(member, member, HERE)) for member in (0, 1))
    assert actor.exchange(*first) is None
    assert actor.exchange(*second) is None
    trace = actor.trace()
    assert trace.complete
    assert len(trace.delays) == 1
    assert actor.checkpoint(0).version == 1


def test_a_server_goes_on_from_the_checkpoint_of_another(actor):
    begin(actor)
    reply = actor.join(0, 0, HERE)
    for _ in range(5):
        reply = actor.exchange(*gradient_at(reply))
    expected = actor.server.output().clone()
    other = ServerActor("other")
    assert begin(other, checkpoint=actor.checkpoint(0)) == 5
    assert torch.equal(other.server.output(), expected)
    header, _ = unpack(other.join(0, 0, HERE))
    assert header.sequence == 6  # 0, ..., 4 were used and 5 was out: a sample is never used twice
    assert header.version == 5


def test_failures_are_refusals_and_drop_a_worker(actor):
    begin(actor, max_refusals=2)
    reply = actor.join(0, 3, HERE)
    for _ in range(2):
        header, _ = unpack(reply)
        reply = actor.exchange(failure(header), reason="OSError: the data is gone")
    assert reply is None
    status = status_of(actor)
    assert status.report.dropped == {3}
    assert "the data is gone" in status.report.last_refusal


@pytest.mark.parametrize("workers", ["0:2", "3:2", "2:", "a", 0, -1, "1:2:3", True])
def test_a_bad_number_of_workers_is_refused(workers):
    with pytest.raises(ValueError, match="workers must be"):
        Settings(steps=1, engine="ray", workers=workers)


def test_what_only_ray_can_do_is_refused_elsewhere():
    for bad in ({"workers": "2:8"}, {"address": "auto"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Settings(steps=1, engine="threads", **bad)


def test_without_ray_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "lategrad.serve.engines.ray.driver", None)
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
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join(
                [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        )
        yield
    wait_until(lambda: not processes_of_ray())


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


@pytest.mark.slow
def test_records_are_looked_at_where_the_driver_is(tmp_path):
    problem, seen = SlowToEvaluate(seconds=0.003), []

    def on_record(telemetry, output):
        seen.append((telemetry.record, telemetry.loss, problem.loss(output).item()))
        return "stop" if len(seen) == 20 else None

    with pytest.warns(UserWarning, match="stopped by on_record"):
        trace = lg.train(problem, RULE, steps=100_000, workers=2, engine="ray", record_every=5, compile=False,
                         on_record=on_record, monitor="loss", out=tmp_path)  # fmt: skip
    audit(trace)
    assert [step for step, _, _ in seen] == trace.steps.tolist()[1:] == sorted({*range(5, len(trace.delays), 5),
                                                                                len(trace.delays)})  # fmt: skip
    assert all(recorded == at_output for _, recorded, at_output in seen)
    assert problem.loss(load_file(tmp_path / "best.safetensors")["output"]).item() == trace.loss.min()


def test_a_server_on_ray_makes_no_update_after_its_trace(actor):
    """A run that was told to stop has workers that still send: they would be in its records, and not in its trace."""
    begin(actor)
    reply = actor.exchange(*gradient_at(actor.join(0, 0, HERE)))
    trace = actor.trace()
    assert actor.exchange(*gradient_at(reply)) is None
    assert actor.join(1, 1, HERE) is None
    assert status_of(actor).report.version == len(trace.delays) == 1


def test_a_server_on_ray_waits_for_evaluations_and_answers_meanwhile(actor, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    actor.begin(SlowToEvaluate(hold=hold), RULE, Settings(steps=100, engine="ray", record_every=1), None, True)
    reply = actor.join(0, 0, HERE)
    for _ in range(2):
        reply = actor.exchange(*gradient_at(reply))
    assert reply == WAIT  # two outputs are to be evaluated
    assert actor.join(0, 0, HERE) == WAIT
    assert (status_of(actor).report.version, status_of(actor).evaluating) == (2, True)
    hold.unlink()
    wait_until(lambda: not status_of(actor).evaluating)
    assert [recorded.step for recorded in status_of(actor).recorded] == [1, 2]
    assert [recorded.step for recorded in actor.status(2, {}, records_seen=2).recorded] == [2]
    assert actor.join(0, 0, HERE) != WAIT


@pytest.mark.slow
def test_local_steps_on_ray_replay_bit_for_bit():
    """Vectors of more than INLINE bytes: after its first job a worker shares memory with the server."""
    problem = LocalSteps(Quadratic(dim=20_000, noise=0.1), local_steps=3, inner="adamw:lr=0.01")
    rule = "delayed-nesterov:lr=0.3,period=2"
    trace = lg.train(problem, rule, steps=30, workers=2, engine="ray", compression="int8", compile=False)
    assert trace.complete
    audit(trace)
    assert trace.local_steps.tolist() == [3] * 30
    assert trace.config["memories_lost"] == {}
    assert trace.config["bytes"]["up"] < 0.14 * trace.config["bytes"]["down"]  # of float64
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)


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

    def __init__(self, node, problem=PROBLEM, rule=RULE, **settings):
        self.training = Training(problem, rule, Settings(engine="ray", progress=False, **settings))
        self.engine = self.training.engine
        self.engine.server_node = lambda: NodeAffinitySchedulingStrategy(node.node_id, soft=True)
        self._problem, self._rule, self.trace, self.error = problem, rule, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.trace = self.training.run()
        except Exception as error:
            self.error = error

    def wait_for(self, condition, seconds=180):
        wait_until(lambda: self.error or condition(), seconds)
        assert self.error is None

    def wait_for_progress(self, updates=20):
        self.wait_for(lambda: self.engine.server is not None)
        goal = self.training.version + updates
        self.wait_for(lambda: self.training.version >= goal)

    def __exit__(self, *_):
        self.training.stop()
        self._thread.join(60)

    def end(self):
        self.__exit__()
        assert self.error is None
        audit(self.trace)
        return self.trace

    def end_and_replay(self):
        trace = self.end()
        again = lg.replay(trace, self._problem, self._rule)
        torch.testing.assert_close(again.output, trace.output, rtol=1e-12, atol=1e-14)
        return trace


@pytest.mark.slow
def test_workers_come_and_go_with_their_machines(cluster):
    home = cluster.add_node(num_cpus=1)
    with (
        warnings.catch_warnings(record=True) as said,
        Run(home, steps=10**6, workers="1:3", slow="constant:10") as run,
    ):
        warnings.simplefilter("always")
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
        trace = run.end_and_replay()
    assert trace.loss[-1] < trace.loss[0] / 10
    assert trace.config["replaced"]["worker 2"] >= 1
    assert len(trace.worker.unique()) == 3
    deaths = [str(one.message) for one in said if " died after update" in str(one.message)]
    assert "worker 2 died" in deaths[0]
    assert "its process ended" in deaths[0]
    assert all("its machine is gone" in death or "it cannot be reached" in death for death in deaths[1:]), deaths
    assert len(deaths) > 1
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stopped")
def test_workers_share_gpus(cluster):
    """Those that Ray is told of: to it a GPU is a number."""
    home = cluster.add_node(num_cpus=4, num_gpus=1)
    with Run(home, steps=10**6, workers="1:4", num_gpus=0.5, slow="constant:10") as run:
        run.wait_for(lambda: len(run.training.workers) == 2)
        run.wait_for_progress()
        assert ray.available_resources().get("GPU", 0) == 0
        assert len(run.training.workers) == 2  # there are CPUs for four
        run.end_and_replay()
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_workers_of_other_machines_stay_when_one_is_lost(cluster):
    home, guest = (cluster.add_node(num_cpus=2) for _ in range(2))
    with Run(home, steps=10**6, workers="1:4", slow="constant:10") as run:
        run.wait_for(lambda: len(run.training.workers) == 4)
        stay = {worker: place for worker, place in run.training.workers.items() if place.node == home.node_id}
        assert len(stay) == 2
        cluster.remove_node(guest, allow_graceful=False)
        run.wait_for(lambda: run.training.workers == stay)
        for _ in range(3):
            run.wait_for_progress()
            assert run.training.workers == stay
        trace = run.end_and_replay()
    assert not {f"worker {worker}" for worker in stay} & trace.config["replaced"].keys()
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped", "ignore:the server")
def test_a_lost_server_goes_on_elsewhere_from_its_checkpoint(cluster):
    home, other = (cluster.add_node(num_cpus=1) for _ in range(2))
    with Run(home, steps=10**6, workers="1:2", slow="constant:10") as run:
        run.wait_for(lambda: len(run.training.workers) == 2)
        run.wait_for(lambda: run.engine.mirror.logged > 0)

        lost = run.engine.server
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_for(lambda: run.engine.server not in (None, lost))
        run.wait_for_progress()

        kept = run.engine.mirror.logged
        cluster.remove_node(home, allow_graceful=False)
        run.wait_for(lambda: run.engine.server is not None and run.engine.server.node != home.node_id)
        assert run.training.version >= kept > 0
        run.wait_for_progress()
        trace = run.end_and_replay()
    assert trace.loss[-1] < trace.loss[0] / 10
    cluster.remove_node(other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped", "ignore:the server")
def test_a_lost_server_costs_a_few_seconds_and_a_gradient_that_outlasts_its_restart_nothing_else(cluster):
    home = cluster.add_node(num_cpus=2)
    with Run(home, steps=10**6, workers=2, slow={0: "constant:10", 1: "constant:20000"}) as run:
        run.wait_for(lambda: len(run.training.workers) == 2)
        run.wait_for(lambda: run.engine.mirror.logged > 50)
        kept, lost, worker = run.engine.mirror.logged, run.engine.server, run.training.workers[1]
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_for(lambda: run.engine.server not in (None, lost))
        assert run.training.version >= kept
        run.wait_for(lambda: run.engine.location(1) is not None)  # it has joined again
        assert run.training.workers[1] == worker
        run.wait_for_progress()
        trace = run.end_and_replay()
    assert trace.config["replaced"] == {}
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped")
def test_a_run_ends_on_demand_while_its_server_does_not_answer(cluster, tmp_path):
    home = cluster.add_node(num_cpus=1)
    with Run(home, steps=10**6, workers=1, slow="constant:10", out=tmp_path) as run:
        run.wait_for(lambda: run.engine.mirror.logged > 20)
        os.kill(run.engine.server.pid, signal.SIGSTOP)
        with pytest.warns(UserWarning, match=r"did not give one \(it does not answer\); the newest is that of update"):
            trace = run.end_and_replay()
    assert len(trace.delays) == run.engine.mirror.logged > 20
    assert lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=len(trace.delays) + 10).complete
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:stopped", "ignore:the state was not finite")
def test_a_poisoned_run_goes_back_and_on(cluster, tmp_path):
    home = cluster.add_node(num_cpus=2)
    poisonous = Poisonous(tmp_path, doses=1)
    with Run(home, problem=poisonous, rule=lg.SGD(lr=1.5), steps=10**6, workers=2, slow="constant:5") as run:
        run.wait_for((tmp_path / "dose-0").exists)
        poisoned = run.training.version
        run.wait_for(lambda: run.engine.mirror.logged > poisoned + 100)  # what is not finite is never mirrored
        trace = run.end()
    assert trace.config["returns"] == 1
    assert trace.output.isfinite().all()
    assert torch.equal(lg.replay(trace, Poisonous(tmp_path, doses=0), lg.SGD(lr=1.5)).output, trace.output)
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
        trace = run.end_and_replay()
    assert trace.delays[trace.worker == 1].max() >= 50
    assert not trace.config["refusals"]
    assert trace.config["replaced"] == {"worker 1": 1}
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:refused")
def test_a_run_without_a_usable_worker_ends_with_the_reason(cluster):
    home = cluster.add_node(num_cpus=1)
    with pytest.raises(TrainingError, match="the data is gone"):
        lg.train(Misbehaving("raise"), RULE, steps=10, engine="ray", workers=1, max_refusals=2, progress=False)
    cluster.remove_node(home)


# ---- Local steps: what workers keep is theirs


LOCAL = LocalSteps(Quadratic(dim=6, noise=0.1), local_steps=3, inner="adamw:lr=0.01")
OUTER = lg.registry.parse_rule("nesterov:lr=0.1")


def delivered(run, worker):
    """Gradients of those who serve under a number now."""
    report, place = run.engine.report(0.0, dict(run.training.supervisor.replaced)), run.training.workers.get(worker)
    activities = {} if report is None else report.activities
    return sum(activity.delivered for activity in activities.values() if activity.location == place)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped")
def test_a_killed_worker_loses_its_inner_steps_and_nothing_else(cluster):
    home = cluster.add_node(num_cpus=2)
    with Run(home, LOCAL, OUTER, steps=10**6, workers=2, slow="constant:10", compile=False) as run:
        run.wait_for(lambda: min(delivered(run, worker) for worker in (0, 1)) > 5)
        os.kill(run.training.workers[1].pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="worker 1 starts fresh: the local state of the process before it is lost"):
            run.wait_for(lambda: run.engine.telemetry()[0].memories_lost == 1)
        run.wait_for_progress()
        trace = run.end_and_replay()
    assert trace.config["memories_lost"] == trace.config["replaced"] == {"worker 1": 1}
    assert [(trace.parent_job[trace.worker == worker] == -1).sum().item() for worker in (0, 1)] == [1, 2]
    assert trace.loss[-1] < trace.loss[0]
    cluster.remove_node(home)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:worker", "ignore:stopped", "ignore:the server")
def test_workers_keep_their_inner_state_when_the_server_is_killed(cluster, tmp_path):
    home = cluster.add_node(num_cpus=2)
    with Run(home, LOCAL, OUTER, steps=10**6, workers=2, slow="constant:10", compile=False, out=tmp_path) as run:
        run.wait_for(lambda: min(delivered(run, worker) for worker in (0, 1)) > 5 and run.engine.mirror.logged > 20)
        kept, lost, workers = run.engine.mirror.logged, run.engine.server, run.training.workers
        os.kill(lost.pid, signal.SIGKILL)
        run.wait_for(lambda: run.engine.server not in (None, lost))
        assert run.training.version >= kept
        run.wait_for_progress(40)
        assert run.training.workers == workers
        trace = run.end()
    assert trace.config["replaced"] == trace.config["memories_lost"] == {}
    assert [(trace.parent_job[trace.worker == worker] == -1).sum().item() for worker in (0, 1)] == [1, 1]
    assert trace.loss[-1] < trace.loss[0]
    # What a worker kept is from a job that was lost with the server: nobody can compute it again, and that is said.
    with pytest.raises(ValueError, match=r"update \d+ builds on job \d+ of worker \d, which was not applied"):
        lg.replay(trace, LOCAL, OUTER)
    saved = version_of(checkpoint_paths(tmp_path)[0])
    with pytest.warns(UserWarning, match="starts fresh: the local state"):
        resumed = lg.resume(tmp_path, LOCAL, OUTER, engine="threads", steps=len(trace.delays) + 20, slow=None)
    assert resumed.complete
    audit(resumed)
    assert torch.equal(resumed.delays[:saved], trace.delays[:saved])
    cluster.remove_node(home)
