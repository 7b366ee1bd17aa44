"""Drift on real servers: what a replay of the same run measures."""

import math

import pytest
import torch

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.problems import LocalSteps, Quadratic
from lategrad.serve import Server, Settings
from lategrad.trace import Trace

PROBLEM = Quadratic(dim=6, noise=0.2)
RULE = lg.Anytime(lg.OGD(lr=0.5), interpolation=0.8)


def same_drift(trace, problem=PROBLEM, rule=RULE):
    every = int(trace.steps[1])
    replayed = lg.replay(trace, problem, rule, record_every=every, drift=True)
    torch.testing.assert_close(replayed.metrics["drift"], trace.metrics["drift"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(replayed.certificate().drift, trace.certificate().drift)
    assert trace.certificate().drift > 0


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", [RULE, lg.SGD(lr=0.3)])
def test_a_server_measures_from_the_query_of_each_job(rule, in_place):
    server = Server(PROBLEM, rule, Settings(steps=40, drift=True, compile=False), query_in_place=in_place)
    order = torch.randint(4, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    jobs = {worker: server.join(worker) for worker in range(4)}
    queries, expected = {worker: job.query.clone() for worker, job in jobs.items()}, []
    for worker in order:
        now = server.rule.query(server.state).clone()
        expected.append((queries[worker] - now).norm().item())
        grad = PROBLEM.gradient(queries[worker], torch.randn(6, dtype=torch.float64))
        jobs[worker] = server.deliver(worker, jobs[worker].version, jobs[worker].sequence, grad)
        queries[worker] = None if jobs[worker] is None else jobs[worker].query.clone()
    trace = server.trace()
    assert server.log.column("drift").tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert trace.certificate().drift.item() == pytest.approx(sum(expected) / 40)
    assert trace.certificate().max_outstanding <= 4


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_replay_measures_the_drift_of_the_run(engine):
    trace = lg.train(PROBLEM, RULE, steps=120, workers=3, engine=engine, prefetch=1, compile=False, drift=True)
    same_drift(trace)


def test_one_worker_without_prefetched_jobs_has_no_drift():
    trace = lg.train(PROBLEM, RULE, steps=40, workers=1, engine="threads", drift=True)
    assert trace.certificate() == (0.0, 0.0, 1.0, 1)


def test_with_local_steps_and_compression():
    problem = LocalSteps(PROBLEM, 2, "sgd:lr=0.05")
    options = {"workers": 2, "engine": "threads", "compression": "int8", "compile": False, "prefetch": 1}
    trace = lg.train(problem, RULE, steps=40, drift=True, **options)
    same_drift(trace, problem)


def test_a_resumed_run_continues_the_measurement(tmp_path):
    options = {"workers": 2, "engine": "threads", "compile": False, "record_every": 30}
    lg.train(PROBLEM, RULE, steps=45, out=tmp_path / "run", drift=True, **options)  # ends between two records
    resumed = lg.resume(tmp_path / "run", PROBLEM, RULE, steps=100, progress=False)
    assert resumed.steps.tolist() == [0, 30, 45, 60, 90, 100]
    replayed = lg.replay(resumed, PROBLEM, RULE, record_every=5, drift=True)
    weighted = (resumed.metrics["drift"][1:] * resumed.steps.diff()).cumsum(0)
    at = [int(step) // 5 for step in resumed.steps[1:]]
    torch.testing.assert_close(weighted, (5 * replayed.metrics["drift"]).cumsum(0)[at], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(Trace.load(tmp_path / "run" / "trace.safetensors").certificate(), resumed.certificate())


def test_a_run_that_was_measured_in_part_has_no_mean_of_the_whole(tmp_path):
    options = {"workers": 2, "engine": "threads", "compile": False, "record_every": 20}
    lg.train(PROBLEM, RULE, steps=40, out=tmp_path / "run", **options)
    resumed = lg.resume(tmp_path / "run", PROBLEM, RULE, steps=80, drift=True, progress=False)
    assert [math.isnan(value) for value in resumed.metrics["drift"]] == [True, True, True, False, False]
    assert resumed.certificate().drift.isnan()


def test_drift_must_be_a_switch():
    for value in (0.5, None):
        with pytest.raises(ValueError, match="drift must be True or False"):
            Settings(steps=1, drift=value)


def test_on_the_command_line(capsys, tmp_path):
    words = f"train --problem quadratic --rule sgd --lr 0.1 --steps 60 --engine threads --drift --out {tmp_path}/run"
    for command in (words, f"replay {tmp_path}/run --drift"):
        with pytest.raises(SystemExit) as ended:
            cli.main(command.split())
        assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    trace = Trace.load(tmp_path / "run" / "trace.safetensors")
    drift, _, outstanding, most = trace.certificate()
    assert f"drift {drift:.4g}, {outstanding:.1f} gradients outstanding, {most} at most" in printed
    assert float(printed[-2].split()[-2]) == pytest.approx(drift.item(), rel=1e-3)
