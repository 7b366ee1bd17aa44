"""Real training with local steps: what a worker keeps lives with it, is lost with it, and replays with it."""

import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lategrad as lg
from helpers.examples import example
from helpers.serving import audit, gradients_of, train_until, wait_until
from lategrad.cli.main import main
from lategrad.problems import LocalSteps, ModuleProblem, Quadratic, SoftmaxRegression, load
from lategrad.problems.problem import init_worker_state, run_job
from lategrad.rules.rule import first_query
from lategrad.serve import Settings, Training
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths, version_of
from lategrad.serve.messages import Job, JobInfo
from lategrad.serve.server import Server
from lategrad.serve.worker import Oracle, Pace, Streams, stream_seed
from lategrad.support.runs import tensors

CPU = torch.device("cpu")


def local(steps=4, **options):
    return LocalSteps(SoftmaxRegression(load("digits"), batch=16), local_steps=steps, inner="adamw:lr=0.01", **options)


def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    return LocalSteps(ModuleProblem(module, load("digits"), batch=16), local_steps=3, inner="muon:lr=0.02")


def test_a_worker_keeps_its_optimizers_state_from_job_to_job():
    """The real worker does what the pure functions say, three jobs in a row."""
    problem, oracle = local(), Oracle(local(), Streams(0), {}, CPU)
    x = problem.start()
    memory = init_worker_state(problem, x.view(1, 1, -1))
    for k in range(3):
        answer = oracle.answer(Job(7, k, 0, x))
        sample = problem.samples(stream_seed(0, 7), k, 1)
        with torch.no_grad():
            grad, memory = run_job(problem, x.view(1, 1, -1), sample, memory)
        assert torch.equal(answer.message, grad.view(-1))
        assert answer.info == JobInfo(local_steps=4, parent_job=k - 1)
        x = x - 0.5 * answer.message
    assert any(leaf.abs().sum() > 0 for leaf in tensors(memory))


@pytest.mark.parametrize(
    ("engine", "rule"),
    [
        ("processes", "nesterov:lr=0.1"),
        ("threads", "delayed-nesterov:lr=0.3"),
        ("threads", "fed-buff:size=3"),
        ("threads", "fed-async"),
        ("threads", "steady-mixing"),
    ],
)
def test_a_run_learns_and_replays_bit_for_bit(engine, rule):
    problem = local()
    trace = lg.train(problem, rule, steps=60, workers=3, engine=engine)
    audit(trace)
    assert trace.accuracy[-1] > 0.5 > 0.3 > trace.accuracy[0]  # usually .9; who comes how late is different each time
    assert trace.local_steps.tolist() == [4] * 60
    assert trace.config["memories_lost"] == {}
    replayed = lg.replay(trace, problem, rule)
    assert torch.equal(replayed.output, trace.output)
    assert torch.equal(replayed.worker, trace.worker)


def test_a_network_with_muon_inside_and_steady_muon_outside_replays():
    problem, rule = network(), "steady-muon:lr=0.5"
    trace = lg.train(problem, rule, steps=30, workers=2, engine="processes", compression="int8")
    torch.testing.assert_close(lg.replay(trace, problem, rule).output, trace.output, rtol=0, atol=0)
    assert trace.accuracy[-1] > trace.accuracy[0]


def test_a_killed_worker_loses_its_inner_steps_and_nothing_else():
    problem, rule = local(), "nesterov:lr=0.1"
    deaths = []

    def kill(telemetry, output):
        if min(gradients_of(training, 2)) > 10 and not deaths:
            deaths.append(telemetry.version)
            os.kill(training.workers[1].pid, signal.SIGKILL)
        return "stop" if telemetry.memories_lost else None

    settings = Settings(steps=100_000, workers=2, slow="constant:2", record_every=20, on_record=kill, compile=False)
    training = Training(problem, lg.registry.parse_rule(rule), settings)
    with (
        pytest.warns(UserWarning, match="worker 1 died"),
        pytest.warns(UserWarning, match="worker 1 starts fresh: the local state of the process before it is lost"),
        pytest.warns(UserWarning, match="stopped by on_record"),
    ):
        trace = training.run()
    audit(trace)
    assert trace.config["memories_lost"] == trace.config["replaced"] == {"worker 1": 1}
    assert (trace.parent_job[trace.worker == 1] == -1).sum() == 2
    assert (trace.parent_job[trace.worker == 0] == -1).sum() == 1
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)


def in_both_parts(trace, first):
    """The workers that delivered something before and after a run was resumed: on a busy machine, not all may have."""
    return sorted(set(trace.worker[:first].tolist()) & set(trace.worker[first:].tolist()))


def test_a_run_that_is_resumed_begins_with_fresh_workers_and_says_so(tmp_path):
    problem, rule = local(), "nesterov:lr=0.1"
    lg.train(problem, rule, steps=20, workers=2, engine="threads", out=tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trace = lg.resume(tmp_path, problem, rule, steps=60)
    audit(trace)
    assert trace.config["memories_lost"] == {f"worker {worker}": 1 for worker in in_both_parts(trace, 20)}
    lost = [warning for warning in said if "starts fresh: the local state" in str(warning.message)]
    assert len(lost) == len(in_both_parts(trace, 20))
    assert trace.config["bytes"]["up"] == 60 * 4 * problem.dim
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
    assert torch.equal(lg.Trace.load(tmp_path / "trace.safetensors").parent_job, trace.parent_job)


@pytest.mark.slow
def test_a_run_whose_server_is_killed_goes_on_with_fresh_workers_and_replays(tmp_path):
    """``kill -9`` of the process that has the server: its workers die with it."""
    options = "--batch 16 --local-steps 4 --inner adamw:lr=0.01 --rule nesterov:lr=0.1 --workers 2 --steps 1000000"
    server = subprocess.Popen([sys.executable, "-m", "lategrad", "train", *options.split(), "--slow", "constant:2",
                               "--checkpoint-every", "20", "--out", str(tmp_path)])  # fmt: skip
    try:
        wait_until(lambda: any(version_of(path) >= 60 for path in checkpoint_paths(tmp_path)), 180)
    finally:
        server.kill()
        server.wait()
    problem = LocalSteps(SoftmaxRegression(load("digits", "standardise-globally"), batch=16), 4, "adamw:lr=0.01")
    made = version_of(checkpoint_paths(tmp_path)[0])
    with pytest.warns(UserWarning, match="starts fresh: the local state"):
        trace = lg.resume(tmp_path, problem, "nesterov:lr=0.1", steps=made + 60)
    assert trace.complete
    audit(trace)
    assert trace.config["memories_lost"] == {"worker 0": 1, "worker 1": 1}
    assert [(trace.parent_job[trace.worker == worker] == -1).sum().item() for worker in (0, 1)] == [2, 2]
    assert torch.equal(lg.replay(trace, problem, "nesterov:lr=0.1").output, trace.output)


class Sick(Quadratic):
    """The gradients of one sample in twenty are not finite."""

    def gradient(self, x, sample):
        grad = super().gradient(x, sample)
        return torch.where(sample[..., :1] > 1.6, torch.nan, grad)


def test_a_bad_pseudo_gradient_is_refused_and_what_led_to_it_is_not_kept():
    problem = LocalSteps(Sick(), local_steps=2, inner="adamw:lr=0.01")
    with pytest.warns(UserWarning, match="refused a gradient of worker . at update .*: ValueError: not finite"):
        trace = lg.train(problem, "sgd:lr=0.5", steps=150, workers=2, engine="threads", max_refusals=None)
    assert trace.complete
    assert trace.config["refusals"]
    assert trace.loss[-1] < trace.loss[0]
    assert torch.equal(lg.replay(trace, problem, "sgd:lr=0.5").output, trace.output)


def test_a_server_refuses_more_steps_than_a_job_has():
    problem = local()
    server = Server(problem, lg.SGD(0.1), Settings(steps=5))
    job = server.join(0)
    for steps in (0, 5):
        with pytest.warns(UserWarning, match=f"{steps} local steps instead of 1 to 4"):
            job = server.deliver(0, job.version, job.sequence, problem.start(), info=JobInfo(steps, -1))
    server.deliver(0, job.version, job.sequence, problem.start(), info=JobInfo(2, -1))
    assert server.version == 1


# ---- As many steps as fit


def test_a_worker_takes_as_many_steps_as_its_last_job_had_time_for():
    pace = Pace(most=50, seconds=2.0)
    taken = []
    for per_step in (0.5, 0.1, 0.1, 0.01, 5.0, 5.0):
        taken.append(pace.local_steps)
        pace.adapt(per_step * pace.local_steps)
    assert taken == [1, 4, 20, 20, 50, 1]
    assert Pace(most=50, seconds=None).local_steps == 50


def test_slow_workers_take_fewer_steps_and_the_run_replays():
    problem, rule = local(steps=30, seconds=0.06), "nesterov:lr=0.1"

    def both_are_seen(training):
        log = training.engine.server.log
        return min(gradients_of(training, 2)) > 2 and log.column("local_steps").max() > 1

    trace = train_until(both_are_seen, problem, rule, workers=2, engine="threads", slow={0: "constant:50"})
    slow, fast = (trace.local_steps[trace.worker == worker] for worker in (0, 1))
    assert slow.max() == 1  # in 60 milliseconds, of which each job waits for 50
    assert fast.max() > 1
    assert trace.local_steps.min() >= 1
    assert trace.local_steps.max() <= 30
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
    assert "seconds=0.06" in trace.config["problem"]


class ByWorkState(NamedTuple):
    x: Tensor


@dataclass(frozen=True, eq=False)
class ByWork:
    """A step as long as the job had steps: a rule that wants to know."""

    lr: float
    domain: lg.WholeSpace = lg.WholeSpace()

    def init(self, x0):
        return ByWorkState(first_query(self, x0))

    def query(self, state):
        return state.x

    def output(self, state):
        return state.x

    def ticket(self, state):
        return torch.ones_like(state.x[..., :1])

    def weigh(self, ticket, weight):
        return weight

    def update(self, state, grad, delay, ticket):
        return ByWorkState(state.x - self.lr * ticket * grad)


def test_a_rule_that_wants_to_know_is_told_the_share_of_the_steps():
    problem = local()
    server = Server(problem, ByWork(1.0), Settings(steps=3))
    x = problem.start()
    for steps, weight in ((1, 0.25), (4, 1.0), (3, 0.75)):
        job = server.join(0)
        server.deliver(0, job.version, job.sequence, torch.ones_like(x), info=JobInfo(steps, job.sequence - 1))
        x = x - weight
        torch.testing.assert_close(server.output(), x)


def test_a_rule_that_wants_to_know_replays():
    problem, rule = local(steps=20, seconds=0.02, scaled=True), ByWork(0.05)
    trace = lg.train(problem, rule, steps=60, workers=2, engine="threads", slow={0: "constant:15"})
    assert trace.local_steps.min() < 20
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)


def test_the_simulator_refuses_seconds():
    with pytest.raises(ValueError, match="problem must be one without seconds: simulated workers have clocks"):
        lg.simulate(local(seconds=1.0), "sgd:lr=0.1", 2, 10)
    with pytest.raises(ValueError, match="seconds must be a finite number > 0, got 0"):
        local(seconds=0)


@pytest.mark.parametrize("how", [{}, {"compression": "int8", "seconds": 0.05}], ids=["plain", "timed, int8"])
def test_the_example_trains_with_two_slow_workers_and_replays(how):
    trace = example("local_training").train("delayed-nesterov", 40, **how)
    assert trace.complete
    assert trace.loss[-1] < trace.loss[0]
    assert how or trace.accuracy[-1] > 0.5 > trace.accuracy[0]  # how many steps fit into a time, the machine decides
    made = torch.cat([torch.zeros(1), trace.time])[trace.version]  # when there was the query that each was taken at
    for worker, pause in ((2, 0.15), (3, 0.3)):
        assert ((trace.time - made)[trace.worker == worker] > pause - 1e-3).all(), "two are slow"


# ---- The command line


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code, *capsys.readouterr()


def test_the_command_line_trains_resumes_and_replays_local_steps(capsys, tmp_path):
    out = tmp_path / "run"
    options = (
        "--local-steps 4 --inner adamw:lr=0.01 --rule nesterov:lr=0.1 --workers 2 --engine threads --compression int8"
    )
    code, said, _ = run(capsys, "train", *options.split(), "--steps", 40, "--out", out)
    assert not code
    assert "sent: 0.0 MB of gradients" in said
    trace = lg.Trace.load(out / "trace.safetensors")
    assert trace.local_steps.tolist() == [4] * 40
    assert "LocalSteps(" in trace.config["problem"]
    code, said, _ = run(capsys, "resume", out, "--steps", 50)
    assert not code
    lost = in_both_parts(lg.Trace.load(out / "trace.safetensors"), 40)
    listed = re.findall(r"worker (\d) 1", said.partition("memories_lost: ")[2].partition("\n")[0])
    assert sorted(map(int, listed)) == lost
    code, said, _ = run(capsys, "replay", out)
    assert not code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inner", "adamw"], "--inner, --scaled and --local-seconds need --local-steps"),
        (["--local-steps", "3", "--inner", "adamv"], "--inner must be a rule of `lategrad list`, got 'adamv'; did you"),
        (["--local-steps", "0"], "steps must be an integer >= 1, got 0"),
        (["--local-steps", "3", "--local-seconds", "0"], "seconds must be a finite number > 0"),
        (["--local-steps", "3", "--inner", "schedule-free:lr=1"], "inner must be a rule whose query and output are"),
    ],
)
def test_wrong_options_of_the_command_line_are_named(capsys, options, message):
    code, _, said = run(capsys, "train", *options)
    assert code == 2
    assert message in said
