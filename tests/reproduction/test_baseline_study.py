"""The comparison of all rules, in small: what is run, how it is tuned, and that tables hold what they claim."""

import csv
import dataclasses

import pytest
import torch

from lategrad.problems import SoftmaxRegression, load
from lategrad.registry import RULES, build_rule, parse_set
from lategrad.simulator import simulate
from reproduction.baselines.plan import CANDIDATES, SCENARIOS, both_domains, scenarios_for
from reproduction.baselines.scores import SoftmaxScores, is_ahead, mean_late, place, split_points, worst_drop
from reproduction.baselines.study import Baselines
from reproduction.deep import plan as deep
from reproduction.report import write_report
from reproduction.reproduce import NAMES as PARTS
from reproduction.study import Plan, Request, Workspace, column
from reproduction.style import ordinal

pytestmark = pytest.mark.filterwarnings("ignore:delay .* is too long for:UserWarning")  # these runs are short
SYNCHRONOUS = {candidate.rule for candidate in deep.CANDIDATES if candidate.synchronous}
NAMES = ("sgd-linear", "steady", "ringmaster")
TINY = Plan(both_domains("digits", 60, 16, rules=NAMES), CANDIDATES, seeds=2, lr_stride=4)
LEFT_OUT = {
    "sgd",
    "sgd-uniform",  # SGD is there by its linear average and its last iterate
    "strongly-convex",  # the objective is not
    "steady-short",  # for runs of a few rounds
    "centered-clipping",  # for workers that are not to be trusted
    "online-to-nonconvex",  # benchmarks/online.py measures it
    "anytime-ftrl",
    "anytime-adagrad-norm",
    "anytime-adagrad",
    "optimistic-anytime-ftrl",  # the paper runs the others
    "rotated-adam",
    "muon-prediction",  # for pipelines
    "steady-mixing",
    "nesterov",
    "delayed-nesterov",
    "momentum-look-ahead",
    "fed-buff",
    "fed-async",  # for pseudo-gradients
} | {candidate.rule for candidate in deep.CANDIDATES if candidate.rule != "staleness-aware"}  # for deep models


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, Baselines().section_of(TINY, Workspace(out))


def test_every_rule_of_the_registry_is_compared_or_left_out_knowingly():
    assert {candidate.rule for candidate in CANDIDATES} | LEFT_OUT == set(RULES) | SYNCHRONOUS
    assert "baselines" in PARTS


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.rule)
@pytest.mark.parametrize("domain", ["whole", "ball:10"])
def test_every_rule_can_be_built_with_all_its_numbers(candidate, domain):
    rule = candidate.build(column(candidate.lrs).unsqueeze(0), domain)
    shape = rule.query(rule.init(torch.zeros(3))).shape
    assert shape == (max(1, len(candidate.values)), len(candidate.lrs), 3)


def test_what_is_measured_equals_plain_simulations(ran):
    """Any delay, knob and learning rate, at the output and at the query."""
    _, section = ran
    problem = SoftmaxRegression(load("digits", "standardise-globally"), batch=16)
    checked = 0
    small = [row for row in section.rows if row["lr"] <= 1]  # larger ones are chaotic: rounding decides their end
    for row in small[::61]:
        rule = build_rule(row["rule"], row["lr"], parse_set("whole" if row["regime"] == "unconstrained" else "ball:10"))
        if row["knob"]:
            rule = dataclasses.replace(rule, **{row["knob"]: row["value"]})
        alone = simulate(problem, rule, SCENARIOS[row["delay"]], 60, seed=row["seed"])
        point = alone.output if row["point"] == "output" else alone.query
        assert row["loss"] == pytest.approx(problem.loss(point).item(), rel=1e-3)
        checked += 1
    assert checked > 10


def test_the_tables_hold_what_the_csv_says(ran):
    out, section = ran
    write_report([section], out, {})
    with (out / "baselines.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(section.rows)
    columns = ["data", "regime", "rule", "knob", "delay", "value", "lr", "seed", "point", "accuracy", "loss"]
    assert list(rows[0]) == columns

    def mean(column="accuracy", /, **where):
        found = [float(row[column]) for row in rows if all(row[key] == value for key, value in where.items())]
        assert len(found) == TINY.seeds
        return sum(found) / len(found)

    lrs = sorted({row["lr"] for row in rows if row["rule"] == "steady"}, key=float)
    where = {"regime": "constrained", "rule": "steady", "point": "output"}
    best = min(lrs, key=lambda lr: mean("loss", **where, lr=lr, delay="0"))
    frozen, oracle = (
        next(row for row in section.tables[f"digits, constrained (ball:10), {protocol}"] if "Steady" in row["rule"])
        for protocol in ("frozen", "oracle")
    )
    at = {delay: mean(**where, lr=best, delay=delay) for delay in SCENARIOS}
    for delay in SCENARIOS:
        assert float(frozen[delay]) == pytest.approx(at[delay], abs=6e-4)
        tuned = min(lrs, key=lambda lr, delay=delay: mean("loss", **where, lr=lr, delay=delay))
        assert float(oracle[delay]) == pytest.approx(mean(**where, lr=tuned, delay=delay), abs=6e-4)
    late = [value for delay, value in at.items() if delay != "0"]
    assert float(frozen["mean"]) == pytest.approx(sum(late) / len(late), abs=6e-4)
    assert float(frozen["worst drop"]) == pytest.approx(at["0"] - min(at.values()), abs=6e-4)
    assert float(frozen["lr"]) == pytest.approx(float(best), rel=0.05)


def test_the_report_shows_the_tables_and_the_figures(ran):
    out, section = ran
    page = write_report([section], out, {}).read_text(encoding="utf-8")
    assert page.count('<table class="numbers">') == len(section.tables) == 4
    assert page.count("<img") == len(section.figures) == 1
    assert set(section.figures) == set(section.captions)


def test_what_is_finished_is_not_run_again(ran):
    out, first = ran
    before = {path: path.stat().st_mtime_ns for path in (out / "traces").iterdir()}
    assert Baselines().section_of(TINY, Workspace(out)).tables == first.tables
    assert {path: path.stat().st_mtime_ns for path in (out / "traces").iterdir()} == before


def test_the_finding_says_where_steady_stands(ran):
    _, section = ran
    names = ("unconstrained (whole)", "constrained (ball:10)")
    for name, part in zip(names, section.finding.split(" and "), strict=True):
        order = [row["rule"] for row in section.tables[f"digits, {name}, frozen"]]
        wanted = order.index("Steady (ours)") + 1
        assert f"{ordinal(wanted)} of {len(order)} rules on digits" in part


@pytest.mark.parametrize(("device", "data"), [("cpu", ["digits"]), ("cuda", ["fashion-mnist", "digits"])])
def test_what_takes_hours_is_left_to_a_gpu_and_the_report_says_so(device, data, tmp_path):
    request = Request("paper", Workspace(tmp_path, device))
    jobs = Baselines().jobs(request)
    assert list(dict.fromkeys(job.label.split()[1].rstrip(",") for job in jobs)) == data
    assert len(jobs) == len(data) * 2 * len(CANDIDATES)
    assert {job.lane for job in jobs if "fashion" in job.label} == {"gpu" for name in data if "fashion" in name}
    assert {job.lane for job in jobs if "digits" in job.label} == {"processes"}  # small: the GPU has enough to do


def made_up(accuracy, loss=None, between_seeds=0.0, test_rows=1000, candidate=CANDIDATES[0]):
    """Accuracies and losses (delays, knobs, lrs) of two seeds; without losses, what is accurate has a small one."""
    values = torch.tensor(accuracy, dtype=torch.float64)
    losses = 1 - values if loss is None else torch.tensor(loss, dtype=torch.float64)
    values, losses = torch.stack([values, values + between_seeds]), losses.expand(2, -1, -1, -1)
    return SoftmaxScores(candidate.rule, candidate, values, values, losses, test_rows)


def test_learning_rates_are_chosen_by_the_training_loss_whatever_the_accuracy():
    result = made_up([[[0.9, 0.8]], [[0.5, 0.6]]], loss=[[[0.4, 0.2]], [[0.1, 0.3]]])
    assert result.choice == (0, 1)
    assert result.oracle.mean(0).tolist() == pytest.approx([0.8, 0.5])


def test_small_differences_are_ties():
    """Of less than the spread of the seeds, or than two rows of the test part."""
    good, near, far = (made_up([[[0.9]], [[late]]]) for late in (0.8, 0.7985, 0.797))
    shaky = made_up([[[0.9]], [[0.75]]], between_seeds=0.06)  # a mean of 0.78
    panel = [good, near, far, shaky]
    assert [place(result, panel, "frozen") for result in panel] == [1, 1, 2, 1]
    few = made_up([[[0.9]], [[0.8]]], test_rows=100)
    assert not is_ahead(few, far, "frozen")


def test_the_last_half_of_the_classes_is_late():
    assert scenarios_for(10)["by class"].by_class == SCENARIOS["by class"].by_class
    assert scenarios_for(5)["by class"].by_class == (0, 0, 0, 1000, 1000)


def test_the_learning_rate_is_frozen_from_delay_zero_and_the_knob_granted_in_hindsight():
    result = made_up([[[0.9, 0.8], [0.7, 0.9]], [[0.1, 0.6], [0.8, 0.2]], [[0.1, 0.7], [0.3, 0.4]]])
    assert result.choice == (1, 1)  # knob 0 freezes rate 0: 0.1, 0.1; knob 1 freezes rate 1: 0.2, 0.4
    assert result.frozen.mean(0).tolist() == pytest.approx([0.9, 0.2, 0.4])
    assert result.oracle.mean(0).tolist() == pytest.approx([0.9, 0.8, 0.7])
    assert mean_late(result.frozen) == pytest.approx(0.3)
    assert worst_drop(result.frozen) == pytest.approx(0.7)


def test_sgd_is_judged_by_its_average_and_by_its_last_iterate(ran):
    _, section = ran
    table = section.tables["digits, unconstrained (whole), frozen"]
    last = next(row for row in table if row["rule"] == "SGD, last iterate")
    average = next(row for row in table if row["rule"] == "SGD, average")
    assert last["mean at query"] == ""  # is its output
    assert average["mean at query"] != average["mean"]


def test_what_diverged_counts_as_zero():
    loss, accuracy = torch.ones(2, 3, 1, 2, 2), torch.full((2, 3, 1, 2, 2), 0.5)
    loss[..., 0, :] = torch.nan  # the first learning rate
    for scores in split_points(CANDIDATES[0], loss, accuracy, test_rows=360):
        assert (scores.accuracy[..., 0] == 0).all()
        assert (scores.accuracy[..., 1] > 0).all()
        assert scores.choice == (0, 1)


def test_a_projection_outside_the_theory_is_marked_where_there_is_one(ran):
    _, section = ran
    marked = {name: {row["rule"] for row in table} for name, table in section.tables.items()}
    assert "Steady (ours)" in marked["digits, constrained (ball:10), frozen"]
    assert "Ringmaster †" in marked["digits, constrained (ball:10), oracle"]
    assert not any("†" in rule for rule in marked["digits, unconstrained (whole), frozen"])
