"""Local steps on workers of different speed, in small: what is run, how it is tuned, what tables and verdicts say."""

import csv
import dataclasses
import math

import pytest
import torch

import lategrad as lg
from lategrad.delays.clocks import Barrier
from lategrad.problems import ModuleProblem, load
from lategrad.registry import RULES as REGISTRY
from reproduction import local
from reproduction.deep import setup as deep
from reproduction.local import measuring, summary
from reproduction.local.measuring import Curve, Result, measure
from reproduction.local.setup import CONTENDERS, RULES, TUNING_SEED, Config, Contender, Setting
from reproduction.report import write_report
from reproduction.reproduce import PARTS, reproduce

SMALL = Setting("cnn", local_steps=3, rounds=2, batch=8, inner="adamw:lr=0.003", workers=3, evaluate=50)
TINY = Config((SMALL,), rules=("steady-muon", "sgd", "synchronous-diloco"), seeds=2, every_step=3)


@pytest.fixture(scope="module", autouse=True)
def small_data():
    """Digits instead of Fashion-MNIST."""

    def problem(self, batch):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ModuleProblem(deep.cnn(side=8), load("digits"), batch=batch, evaluate=self.evaluate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep.Setting, "problem", problem)
        yield


@pytest.fixture(scope="module")
def ran(small_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    said = []
    return out, local.section_of(TINY, out, device="cpu", say=said.append), said


def test_it_is_a_part_of_its_own_that_all_leaves_out():
    (part,) = [part for part in PARTS if part.name == "local"]
    assert part.only_by_name
    assert set(local.CONFIGS) == {"quick", "paper", "full"}
    for config in local.CONFIGS.values():
        assert set(config.rules) <= set(RULES)
        assert all(setting.workers == 16 for setting in config.settings)
    for contender in CONTENDERS:
        assert (contender.synchronous or contender.rule) in REGISTRY
    assert {s.local_steps for s in local.CONFIGS["paper"].settings} == {20, 100}


def test_everybody_has_the_same_virtual_time():
    assert SMALL.seconds == 2 * 3 * 6.0
    assert SMALL.together().draw(SMALL.rounds, 0).time[-1] == SMALL.seconds
    for cluster in (SMALL.cluster(), SMALL.alone()):
        updates = SMALL.updates(cluster)
        time = cluster.draw(updates + 1, 0).time
        assert time[-2] <= SMALL.seconds < time[-1]
    assert SMALL.updates(SMALL.alone()) == 12


def test_delayed_nesterov_has_the_period_that_its_authors_take():
    (contender,) = [c for c in CONTENDERS if c.rule == "delayed-nesterov"]
    assert contender.build((0.1,), workers=16).period == 16
    assert contender.build((0.1,), workers=1).period == 1


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
    (contender,) = [c for c in TINY.contenders if c.rule == "sgd"]
    result = measure(TINY, SMALL, contender, out, device="cpu", say=pytest.fail)
    updates = SMALL.updates(SMALL.cluster())
    again = lg.simulate(SMALL.problem(), lg.SGD(lr=result.step["frozen"]), SMALL.cluster(), updates, seed=1)
    torch.testing.assert_close(result.curves["frozen"].losses[-1, 1], again.test_loss[-1], rtol=1e-3, atol=1e-4)
    assert result.curves["frozen"].seconds[-1] == again.time[-1]
    assert result.curves["frozen"].gradients[-1] == 3 * len(again.delays)


def test_steps_are_chosen_with_a_seed_that_is_not_shown(monkeypatch, tmp_path):
    seen = []

    def simulate(problem, rule, clock, updates, **options):
        seen.append((len(clock.workers), isinstance(clock, Barrier), options["seed"], rule.lr.numel()))
        return real(problem, rule, clock, updates, **options)

    real = measuring.simulate
    monkeypatch.setattr(measuring, "simulate", simulate)
    contenders = {c.rule: c for c in TINY.contenders}
    measure(TINY, SMALL, contenders["sgd"], tmp_path, device="cpu", say=lambda line: None)
    grid = len(contenders["sgd"].steps)
    assert seen[0] == (3, False, [TUNING_SEED], grid)
    assert seen[1] == (1, False, [TUNING_SEED], grid)
    assert seen[2][:3] == (3, False, [0, 1])
    assert TUNING_SEED not in TINY.all_seeds
    assert TUNING_SEED not in local.CONFIGS["full"].all_seeds


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
    contender = Contender(rule, (0.1,), ours=ours, synchronous=synchronous)
    return Result(contender, {"frozen": 0.1, "tuned": 0.1}, curves, {"frozen": False, "tuned": False})


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
    assert tuple(v.reproduced for v in summary.verdicts(SMALL, panel)) == outcomes


def test_models_and_rules_can_be_limited_and_are_checked(tmp_path):
    limited = local.CONFIGS["paper"].limited(["gpt"], ["sgd"])
    assert {s.model for s in limited.settings} == {"gpt"}
    assert [c.rule for c in limited.contenders] == ["sgd"]
    assert all(s.model == "cnn" for s in local.CONFIGS["quick"].limited([], []).settings), "the GPT only by name"
    with pytest.raises(ValueError, match="--rules must be one of"):
        reproduce("local", "quick", tmp_path, rules=["adamw"])


def test_without_targets_nothing_is_judged(ran):
    out, *_ = ran
    quiet = dataclasses.replace(TINY, targets=False)
    assert local.section_of(quiet, out, device="cpu", say=pytest.fail).verdicts == ()
