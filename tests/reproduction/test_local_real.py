"""Local steps on real workers of different speed: rounds that wait, the same time for every rule, what tables say."""

import csv
import math

import pytest
import torch

import lategrad as lg
from helpers.serving import Misbehaving
from lategrad.problems import LocalSteps, ModuleProblem, SoftmaxRegression, load
from lategrad.serve import Settings
from lategrad.serve.engines.engine import TrainingError
from lategrad.serve.messages import Job
from lategrad.serve.worker import Oracle, Streams
from lategrad.support.threads import torch_threads
from reproduction.deep import models
from reproduction.local.plan import ANCHOR, CANDIDATES, RULES
from reproduction.local.real import PLANS, LocalReal, TwoSpeeds, real_curves, real_table
from reproduction.local.rounds import train_in_rounds
from reproduction.report import write_report
from reproduction.study import Plan, Workspace

SMALL = TwoSpeeds("cnn", local_steps=3, rounds=4, batch=8, inner="adamw:lr=0.003", evaluate=50, slowest=0.03,
                  rules=("steady-muon", "fed-async", ANCHOR))  # fmt: skip
BY_NAME = {candidate.rule: candidate for candidate in CANDIDATES}


def test_every_rule_is_trained_at_every_scale():
    for plan in PLANS.values():
        assert all(s.rules == RULES and s.workers == 4 and s.local_steps == 20 for s in plan.settings)


def test_pauses_are_the_times_of_the_clocks_that_learning_rates_are_chosen_by():
    assert SMALL.pauses() == {0: "constant:30", 1: "constant:30", 2: "constant:90", 3: "constant:90"}
    assert SMALL.seconds == pytest.approx(4 * 3 * 0.03)
    assert SMALL.barrier().draw(SMALL.rounds, 0).time[-1] == pytest.approx(SMALL.seconds)
    assert SMALL.updates(SMALL.fastest_alone()) == 12
    assert SMALL.updates(SMALL.cluster()) == 12 + 12 + 4 + 4


def test_a_round_is_one_update_with_the_mean_of_all_who_waited():
    problem = LocalSteps(SoftmaxRegression(load("digits"), batch=16), local_steps=4, inner="adamw:lr=0.01")
    rule = lg.baselines.SGDMomentum(0.5, nesterov=True)
    settings = Settings(steps=100, workers=2, slow={1: "constant:20"}, seed=3)
    trace = train_in_rounds(problem, rule, settings, seconds=0.2)
    rounds = len(trace.time)
    assert torch.all(trace.time.diff(prepend=torch.zeros(1)) >= 0.02), "the slow one is waited for"
    oracles = [Oracle(problem, Streams(3), {}, torch.device("cpu")) for _ in range(2)]
    state = rule.init(problem.start())
    with torch_threads(1):  # as a worker has it
        for k in range(rounds):
            sent = [oracle.answer(Job(w, k, k, rule.query(state))).message for w, oracle in enumerate(oracles)]
            state = rule.update(state, torch.stack(sent).mean(0), 0)
    assert torch.equal(trace.output, rule.output(state))
    assert trace.loss[-1].item() == pytest.approx(problem.loss(trace.output).item())
    assert trace.steps.tolist() == list(range(rounds + 1))
    assert trace.local_steps.tolist() == [8] * rounds


def test_a_worker_that_fails_ends_the_rounds_with_its_reason():
    problem = LocalSteps(Misbehaving("raise"), local_steps=2)
    with pytest.raises(TrainingError, match="worker . has failed, and the others wait: OSError: the data is gone"):
        train_in_rounds(problem, lg.SGD(0.1), Settings(steps=100, workers=2), seconds=60.0)


def recorded(times, workers, losses, every=2):
    """A trace of a real training whose workers started after 5 seconds, as far as it is looked at."""
    updates = len(times)
    return lg.Trace(
        steps=torch.arange(0, updates + 1, every), loss=torch.zeros(len(losses)),
        test_loss=torch.tensor(losses).double(), accuracy=torch.linspace(0, 1, len(losses)).double(),
        delays=torch.arange(updates, dtype=torch.int32), output=torch.zeros(1), query=torch.zeros(1),
        time=5 + torch.tensor(times).double(), worker=torch.tensor(workers), local_steps=torch.full((updates,), 3),
    )  # fmt: skip


def test_the_clock_starts_with_the_first_job_and_ends_between_two_records():
    """0.36 seconds; the first job of worker 0 pauses for 0.03."""
    trace = recorded([0.03, 0.06, 0.18, 0.30, 0.33, 0.42], [0, 1, 0, 2, 0, 0], [8.0, 6.0, 4.0, 3.0])
    result = real_curves(SMALL, BY_NAME["sgd"], 0, [trace])
    curve = result.curves["frozen"]
    assert curve.seconds[[0, -1]].tolist() == [0.0, pytest.approx(0.36)]
    assert curve.losses[[0, -1], 0].tolist() == [8.0, pytest.approx(3.5)], "half-way from 0.30 to 0.42"
    assert curve.gradients[-1].item() == pytest.approx(16.0), "of five jobs, and a third of the sixth"
    assert result.accuracy == pytest.approx(2.5 / 3)
    assert result.updates == 5
    assert result.delays.tolist() == [0, 1, 2, 3, 4]


def test_a_run_that_is_not_finite_has_diverged():
    trace = recorded([0.03, 0.06, 0.18, 0.30, 0.33, 0.42], [0, 1, 0, 2, 0, 0], [8.0, 6.0, math.nan, math.inf])
    panel = {"sgd": real_curves(SMALL, BY_NAME["sgd"], 3, [trace])}
    (row,) = real_table(SMALL, panel)
    assert row["equal time"] == "diverged"
    assert (row["updates"], row["mean delay"], row["longest delay"]) == ("5", "2.0", "4")


@pytest.mark.slow  # three real trainings
def test_everything_in_small_is_recorded_replays_and_is_not_run_again(monkeypatch, tmp_path):
    def build_problem(model, batch, *, evaluate, **size):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ModuleProblem(models.cnn(side=8), load("digits"), batch=batch, evaluate=evaluate)

    monkeypatch.setattr(models, "build_problem", build_problem)
    plan, space = Plan((SMALL,), CANDIDATES, seeds=1, lr_stride=4, judged=False), Workspace(tmp_path)
    section = LocalReal().section_of(plan, space)
    (rows,) = section.tables.values()
    assert {row["rule"] for row in rows} == {"SteadyMuon (ours)", "FedAsync", "synchronous DiLoCo"}
    assert (rows[0]["rule"], rows[0]["longest delay"]) == ("synchronous DiLoCo", "0")
    write_report([section], tmp_path, {"command": "test"})
    with open(tmp_path / "local-real.csv") as file:
        assert {row["rule"] for row in csv.DictReader(file)} == set(SMALL.rules)
    (path,) = tmp_path.glob("runs/local-real-cnn-3-fed-async-0/trace.safetensors")
    trace = lg.Trace.load(path)
    (lr,) = {row["lr"] for row in section.rows if row["rule"] == "fed-async"}
    assert torch.equal(lg.replay(trace, SMALL.problem(), lg.baselines.FedAsync(lr)).output, trace.output)
    again = LocalReal().section_of(plan, space)
    assert again.tables == section.tables, "to the last digit: nothing was trained again"
