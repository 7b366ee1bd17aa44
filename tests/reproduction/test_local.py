"""Local steps on workers of different speed, in small: what is run, how it is tuned, what tables and verdicts say."""

import csv
import dataclasses
import math

import pytest
import torch

import lategrad as lg
from lategrad.problems import ModuleProblem, load
from lategrad.registry import RULES as REGISTRY
from reproduction.deep import models
from reproduction.local.curves import Curve, LocalCurves, VirtualRuns
from reproduction.local.plan import CANDIDATES, PLANS, RULES, TUNING_SEED, LocalSetting, build_outer
from reproduction.local.study import Local, verdicts
from reproduction.report import write_report
from reproduction.study import Candidate, Plan, Workspace, column

SMALL = LocalSetting("cnn", local_steps=3, rounds=2, batch=8, inner="adamw:lr=0.003", workers=3, evaluate=50,
                     rules=("steady-muon", "sgd", "synchronous-diloco"))  # fmt: skip
TINY = Plan((SMALL,), CANDIDATES, seeds=2, lr_stride=3)


def runs_of(rule, out):
    (task,) = [t for t in TINY.tasks(Workspace(out, say=pytest.fail)) if t.candidate.rule == rule]
    return VirtualRuns(task)


@pytest.fixture(scope="module", autouse=True)
def small_data():
    """Digits instead of Fashion-MNIST."""

    def build_problem(model, batch, *, evaluate, **size):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ModuleProblem(models.cnn(side=8), load("digits"), batch=batch, evaluate=evaluate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_problem", build_problem)
        yield


@pytest.fixture(scope="module")
def ran(small_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    said = []
    return out, Local().section_of(TINY, Workspace(out, say=said.append)), said


def test_what_is_run_at_every_scale():
    assert set(PLANS) == {"quick", "paper", "full"}
    for plan in PLANS.values():
        assert all(setting.workers == 16 and set(setting.rules) <= set(RULES) for setting in plan.settings)
    for candidate in CANDIDATES:
        assert (candidate.synchronous or candidate.rule) in REGISTRY
    assert {s.local_steps for s in PLANS["paper"].settings} == {20, 100}


def test_every_rule_has_the_same_virtual_time():
    assert SMALL.seconds == 2 * 3 * 6.0
    assert SMALL.barrier().draw(SMALL.rounds, 0).time[-1] == SMALL.seconds
    for cluster in (SMALL.cluster(), SMALL.fastest_alone()):
        updates = SMALL.updates(cluster)
        time = cluster.draw(updates + 1, 0).time
        assert time[-2] <= SMALL.seconds < time[-1]
    assert SMALL.updates(SMALL.fastest_alone()) == 12


def test_delayed_nesterov_has_the_period_that_its_authors_take():
    (candidate,) = [c for c in CANDIDATES if c.rule == "delayed-nesterov"]
    assert build_outer(candidate, column([0.1]), workers=16).period == 16
    assert build_outer(candidate, 0.1, workers=1).period == 1


def test_the_section_has_a_row_for_every_rule_and_a_file_for_the_report(ran):
    out, section, said = ran
    assert {len(rows) for rows in section.tables.values()} == {3}
    assert [rows[0]["rule"] for rows in section.tables.values()] == ["synchronous DiLoCo"] * 2
    assert all(rows[0]["time to synchronous loss"] == "1.00" for rows in section.tables.values())
    assert len(said) == 3 * 3 - 1, "one worker, all workers, and what is shown; the anchor has no run with one"
    write_report([section], out, {"command": "test"})
    with open(out / "local.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert {row["protocol"] for row in rows} == {"frozen", "tuned"}
    assert len(section.verdicts) == 2


def test_the_last_record_of_a_rule_is_its_own_simulation(ran):
    out, *_ = ran
    result = runs_of("sgd", out).curves([0, 1])
    updates = SMALL.updates(SMALL.cluster())
    again = lg.simulate(SMALL.problem(), lg.SGD(lr=result.lr("frozen")), SMALL.cluster(), updates, seed=1)
    torch.testing.assert_close(result.curves["frozen"].losses[-1, 1], again.test_loss[-1], rtol=1e-3, atol=1e-4)
    assert result.curves["frozen"].seconds[-1] == again.time[-1]
    assert result.curves["frozen"].gradients[-1] == 3 * len(again.delays)


def test_learning_rates_are_chosen_with_a_seed_that_is_not_shown(ran):
    out, *_ = ran
    traces = {
        phase: lg.Trace.load(Workspace(out).path(f"local-cnn-3-sgd-{phase}")) for phase in ("all", "one", "shown")
    }
    lrs = runs_of("sgd", out).candidate.lrs
    for phase, workers in (("all", 3), ("one", 1)):
        assert traces[phase].axis("seed").values == (TUNING_SEED,)
        assert traces[phase].axes[-1].values == pytest.approx(lrs)
        assert len(set(traces[phase].worker.flatten().tolist())) == workers
    assert traces["shown"].axis("seed").values == (0, 1)
    assert PLANS["full"].seeds <= TUNING_SEED


def curve(losses, seconds=None):
    losses = torch.tensor(losses, dtype=torch.float64)
    seconds = torch.arange(len(losses), dtype=torch.float64) if seconds is None else torch.tensor(seconds)
    return Curve(seconds, 10 * seconds, losses.unsqueeze(1))


def test_when_a_loss_is_reached_is_read_between_two_records():
    falling = curve([4.0, 2.0, 1.0])
    assert falling.reaches(3.0) == 0.5
    assert falling.reaches(1.0) == 2.0
    assert falling.reaches(0.9) is None
    assert falling.reaches(5.0) == 0.0
    assert curve([4.0, math.inf, 1.0]).reaches(1.5) == 2.0
    assert curve([4.0, 1.0, 3.0, 1.0]).reaches(2.0) == 2.5, "for good"
    assert curve([4.0, 1.0, 3.0]).reaches(2.0) is None
    assert falling.at_gradients(5.0) == 3.0
    assert falling.at_gradients(20.0) == 1.0


def result(rule, losses, ours=False, synchronous=""):
    curves = dict.fromkeys(("frozen", "tuned"), curve(losses, [0.0, 18.0, 36.0]))
    candidate = Candidate(rule, (0.1,), ours=ours, synchronous=synchronous)
    return LocalCurves(candidate, {"frozen": 0, "tuned": 0}, curves)


@pytest.mark.parametrize(
    ("losses", "outcomes"),
    [
        ([4.0, 1.5, 0.8], (True, True)),
        ([4.0, 2.5, 0.8], (False, True)),
        ([4.0, 1.5, 1.3], (True, False)),
        ([4.0, 3.0, 2.5], (False, False)),
    ],
)
def test_verdicts_follow_from_the_curves(losses, outcomes):
    panel = {
        "steady-muon": result("steady-muon", losses, ours=True),
        "sgd": result("sgd", [4.0, 2.0, 1.2]),
        "synchronous-diloco": result("synchronous-diloco", [4.0, 3.0, 2.0], synchronous="nesterov"),
    }
    assert tuple(v.holds for v in verdicts(SMALL, panel)) == outcomes


def test_models_and_rules_can_be_limited_and_are_checked():
    limited = PLANS["paper"].limited(["gpt"], ["sgd"])
    assert {(s.model, s.rules) for s in limited.settings} == {("gpt", ("sgd",))}
    assert all(s.model == "cnn" for s in PLANS["quick"].limited([], []).settings), "the GPT only by name"
    with pytest.raises(ValueError, match="--rules must be one of"):
        PLANS["quick"].limited([], ["adamw"])


def test_without_targets_nothing_is_judged(ran):
    out, *_ = ran
    quiet = dataclasses.replace(TINY, judged=False)
    assert Local().section_of(quiet, Workspace(out, say=pytest.fail)).verdicts == ()
