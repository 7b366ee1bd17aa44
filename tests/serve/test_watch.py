"""What happens at every record of a run: callbacks, early stops, the best output; logs; learning-rate schedules."""

import csv
import json
import math
import re

import pytest
import torch
from safetensors import safe_open
from torch import nn

import lategrad as lg
from helpers.modules import top_two
from lategrad.problems import ModuleProblem, Quadratic, load
from lategrad.rules.rule import first_state
from lategrad.serve.observe import monitor
from lategrad.serve.observe.records import Telemetry

ENGINES = ["threads", "processes"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_callback_sees_every_record_and_can_end_the_run(engine):
    problem, seen = Quadratic(noise=0.1), []

    def on_record(telemetry, output):
        seen.append((telemetry.record, telemetry.loss, problem.loss(output).item()))
        return "stop" if telemetry.version >= 60 else None

    with pytest.warns(UserWarning, match="stopped by on_record: the trace ends after"):
        trace = lg.train(
            problem, lg.SGD(0.1), steps=5000, workers=2, engine=engine, record_every=20, on_record=on_record
        )
    assert not trace.complete
    assert [step for step, _, _ in seen][:3] == [20, 40, 60]
    assert all(recorded == at_output for _, recorded, at_output in seen)
    assert trace.loss[1] == seen[0][1]
    assert 60 <= len(trace.delays) < 100  # where evaluations take long, the record of 60 is known at 80


def test_a_callback_that_returns_something_else_is_an_error():
    with pytest.raises(ValueError, match="the return value of on_record must be None or 'stop', got True"):
        lg.train(Quadratic(), lg.SGD(0.1), steps=50, workers=1, engine="threads", on_record=lambda *_: True)


def diverging(steps, out, **options):
    """A learning rate that is too large: the loss is best early and grows from then on."""
    problem = Quadratic(dim=4, smoothness=1.0, strong_convexity=1.0, noise=0.0, optimum=torch.ones(4))
    how = {"workers": 1, "engine": "threads", "record_every": 1, "compile": False}
    return problem, lg.train(problem, lg.SGD(lr=2.2), steps=steps, out=out, **how, **options)


def test_patience_ends_a_run_without_improvement_and_the_best_output_is_saved(tmp_path):
    with pytest.warns(UserWarning, match="stopped early: loss was best after 0 updates"):
        problem, trace = diverging(1000, tmp_path, monitor="loss", patience=5)
    assert 5 <= len(trace.delays) < 10
    assert trace.loss.argmin() == 0
    with pytest.warns(UserWarning, match="stopped early"):
        lg.resume(tmp_path, problem, lg.SGD(lr=2.2), steps=2000)


def test_the_best_output_is_that_of_the_best_record(tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), metrics={"top 2": top_two}, validation=0.2)
    trace = lg.train(problem, lg.SGD(lr=1.0), steps=200, workers=2, record_every=10, monitor="+top 2", out=tmp_path)
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        output, record = file.get_tensor("output"), json.loads(file.metadata()["record"])
    assert record["top 2"] == trace.metrics["top 2"].max() == problem.measure(output).metrics["top 2"]
    assert record["step"] == trace.steps[trace.metrics["top 2"].argmax()]


def test_a_loss_on_validation_rows_is_called_so_and_can_be_monitored(tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), validation=0.2)
    training = {"steps": 30, "workers": 1, "record_every": 10, "engine": "threads", "out": tmp_path}
    trace = lg.train(problem, lg.SGD(lr=1.0), **training, monitor="val_loss")
    assert trace.test_loss is None
    assert trace.val_loss[-1] == problem.measure(trace.output).val_loss
    with safe_open(tmp_path / "best.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["record"])["val_loss"] == trace.val_loss.min()
    longer = lg.resume(tmp_path, problem, lg.SGD(lr=1.0), steps=40)
    assert torch.equal(longer.val_loss[:4], trace.val_loss)
    assert torch.equal(lg.Trace.load(tmp_path / "trace.safetensors").val_loss, longer.val_loss)
    for name in ("log.csv", "records.csv"):
        rows = list(csv.DictReader((tmp_path / name).read_text().splitlines()))
        assert float(rows[-1]["val_loss"]) == longer.val_loss[-1]
    replayed = lg.replay(longer, problem, lg.SGD(lr=1.0))
    assert torch.equal(replayed.val_loss[-1], longer.val_loss[-1])
    with pytest.raises(ValueError, match="monitor must be one of the recorded values, loss, accuracy, val_loss, got"):
        lg.train(problem, lg.SGD(lr=1.0), **(training | {"out": None}), monitor="test_loss")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "los"}, "monitor must be one of the recorded values, loss, got 'los'"),
        ({"patience": 3}, "monitor must be given with patience"),
        ({"patience": 0, "monitor": "loss"}, "patience must be an integer >= 1, or None, got 0"),
        ({"on_record": "print"}, "on_record must be a function of telemetry and output, got 'print'"),
    ],
)
def test_what_cannot_be_watched_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        lg.train(Quadratic(), lg.SGD(0.1), **({"steps": 5, "workers": 1, "engine": "threads"} | options))


# ---- Logs


def test_a_run_with_a_folder_keeps_its_numbers_as_csv_and_as_lines_of_json(tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), metrics={"top 2": top_two})
    trace = lg.train(problem, lg.SGD(0.1), steps=50, workers=2, engine="threads", out=tmp_path)
    lg.resume(tmp_path, problem, lg.SGD(0.1), steps=80)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 80
    assert 50 in [line["step"] for line in lines]
    at_50 = next(line for line in lines if line["step"] == 50)
    assert (at_50["loss"], at_50["test_loss"]) == (trace.loss[-1], trace.test_loss[-1])
    assert at_50["top 2"] == trace.metrics["top 2"][-1]
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines]
    assert float(rows[-1]["accuracy"]) == lines[-1]["accuracy"]
    with open(tmp_path / "records.csv", newline="") as file:
        records = list(csv.DictReader(file))
    assert [int(row["step"]) for row in records][-1] == 80
    assert float(records[0]["top 2"]) == trace.metrics["top 2"][0]


def test_off_a_terminal_a_line_is_printed_now_and_then(capsys):
    telemetry = Telemetry(10, 100, 1.0, 10.0, 0.5, None, 1.0, 2.0, 3, 0, 10, None, {})
    lines = monitor.Lines(every=0.0)
    lines.show(telemetry, 2, torch.empty(0))
    assert "update 10 of 100: 10 updates/s, loss 0.5" in capsys.readouterr().err
    late = monitor.Lines(every=3600.0)
    late.show(telemetry, 2, torch.empty(0))
    assert capsys.readouterr().err == ""


# ---- Schedules


@pytest.mark.parametrize(
    "rule",
    [lg.SGD(0.3), lg.Steady(1.0), lg.Anytime(lg.OGD(0.5)), lg.baselines.DCASGD(0.1)],
    ids=lambda r: type(r).__name__,
)
def test_without_warm_up_and_decay_a_scheduled_rule_is_the_rule(rule):
    plain, same = (lg.simulate(Quadratic(), r, 3, 40, compile=False) for r in (rule, lg.Scheduled(rule)))
    torch.testing.assert_close(same.output, plain.output, rtol=1e-12, atol=1e-14)


def test_the_learning_rate_follows_its_schedule():
    rule = lg.Scheduled(lg.SGD(lr=2.0), warmup=4, shape="cosine", total=12, floor=0.1)
    state, steps = first_state(rule, torch.zeros(1, dtype=torch.float64)), []
    for _ in range(15):
        before = rule.query(state)
        state = rule.update(state, -torch.ones(1, dtype=torch.float64), 0)
        steps.append((rule.query(state) - before).item())
    decay = [0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, max(0, t - 4) / 8))) / 2 for t in range(1, 16)]
    assert steps == pytest.approx([2 * min(1.0, t / 4) * decay[t - 1] for t in range(1, 16)])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduled_rule_trains_resumes_and_replays(engine, tmp_path):
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"))
    rule = lg.Scheduled(lg.SteadyMuon(0.02), warmup=10, shape="linear", total=120)  # a rule that gets blocks
    lg.train(problem, rule, steps=40, workers=2, engine=engine, out=tmp_path)
    trace = lg.resume(tmp_path, problem, rule, steps=80)
    assert trace.config["rule"]["rule"]["blocks"]["parts"][0]["label"] == "matrix"
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)


def half_life(t):
    return 0.5 ** (t / 20)


@pytest.mark.parametrize(
    ("schedule", "same"),
    [
        ("cosine", {"shape": "cosine", "total": 40}),
        ("linear:warmup=10,floor=0.1", {"shape": "linear", "warmup": 10, "floor": 0.1, "total": 40}),
        ("constant:warmup=10", {"warmup": 10}),
        ("linear:total=30", {"shape": "linear", "total": 30}),
        (half_life, {"shape": half_life}),
    ],
)
def test_a_run_takes_a_schedule_keeps_it_when_resumed_and_replays_with_it(schedule, same, tmp_path):
    problem, rule = Quadratic(), lg.Anytime(lg.OGD(0.5))
    how = {"workers": 2, "engine": "threads", "compile": False}
    trace = lg.train(problem, rule, steps=40, out=tmp_path, schedule=schedule, **how)
    by_hand = lg.Scheduled(rule, **same)
    assert torch.equal(lg.replay(trace, problem, by_hand).output, trace.output)
    again = {"schedule": schedule} if callable(schedule) else {}
    longer = lg.resume(tmp_path, problem, rule, steps=60, **again)
    assert torch.equal(lg.replay(longer, problem, by_hand).output, longer.output)
    if not callable(schedule):
        assert torch.equal(lg.replay(longer, problem, rule).output, longer.output)
        assert len(lg.replay(longer, problem, "sgd:lr=0.1|1").output) == 2
        assert lg.replay(longer, problem, lg.StronglyConvexOGD(0.1)).complete  # which has no lr to multiply


def test_a_schedule_that_is_a_function_is_asked_for_again(tmp_path):
    problem, rule = Quadratic(), lg.SGD(0.1)
    trace = lg.train(problem, rule, steps=20, workers=1, engine="threads", out=tmp_path, schedule=half_life)
    with pytest.raises(ValueError, match="schedule must be passed again, as the function that it was, got 'function"):
        lg.resume(tmp_path, problem, rule, steps=40)
    with pytest.raises(ValueError, match="the run's schedule was a function half_life"):
        lg.replay(trace, problem, rule)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("cosin", "schedule must be one of 'constant', 'linear', 'cosine', got 'cosin'; did you mean 'cosine'?"),
        ("cosine:warm=3", "schedule 'cosine' has no option 'warm'; did you mean 'warmup'?"),
        ("cosine:warmup=100", "total must be an integer > warmup = 100, got 40"),
        (lambda t: 1.0, "what schedule returns must be a tensor of the shape of t"),
        (lambda t: t if t < 3 else 1 / t, "without branches"),
        (lambda t: math.cos(t), "with torch's functions"),
        (3, "schedule must be 'constant', 'linear', 'cosine' or a function"),
    ],
)
def test_a_schedule_of_a_run_that_makes_no_sense_is_refused(schedule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lg.train(Quadratic(), lg.SGD(0.1), steps=40, workers=1, engine="threads", schedule=schedule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lg.Scheduled(lg.StronglyConvexOGD(1.0)), "rule must be a rule with an lr, got 'StronglyConvexOGD'"),
        (lambda: lg.Scheduled(lg.SGD(0.1), shape="linear"), "total must be an integer > warmup = 0, got None"),
        (lambda: lg.Scheduled(lg.SGD(0.1), total=9), "total must be None unless the learning rate decays, got 9"),
        (lambda: lg.Scheduled(lg.SGD(0.1), shape="cosin"), "did you mean 'cosine'?"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
