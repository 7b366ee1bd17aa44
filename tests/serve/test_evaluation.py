"""Evaluation in a thread: updates do not wait for it, and every record is made, in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lategrad as lg
from helpers.serving import SlowToEvaluate, audit
from lategrad.problems import ModuleProblem, load
from lategrad.serve import Server, Settings
from lategrad.serve.observe.records import BEST_FILE

RULE = lg.SGD(lr=0.1)


def exchange(server, times):
    """As one worker would, with a gradient of ones."""
    for _ in range(times):
        job = server.join(0)
        server.deliver(0, job.version, job.sequence, torch.ones(server.dim, dtype=server.dtype))


@pytest.fixture
def held(tmp_path):
    """Evaluations take as long as this file exists."""
    path = tmp_path / "hold"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_updates_continue_while_an_output_is_evaluated(held):
    problem = SlowToEvaluate(hold=held)
    server = Server(problem, RULE, Settings(steps=100, record_every=10))
    exchange(server, 15)
    assert server.version == 15
    assert server.records.steps == [0]
    held.unlink()
    trace = server.trace()
    assert trace.steps.tolist() == [0, 10, 15]
    assert trace.loss[1] == problem.loss(problem.start() - 1.0)  # ten steps of 0.1: not where the server was by then


def test_a_checkpoint_takes_outputs_along_that_are_not_evaluated_yet(held):
    problem, settings = SlowToEvaluate(hold=held), Settings(steps=100, record_every=10)
    server = Server(problem, RULE, settings)
    exchange(server, 25)
    checkpoint = server.checkpoint()
    assert checkpoint.description["records"]["steps"] == [0]
    other = Server(problem, RULE, settings)
    other.restore(checkpoint)
    exchange(other, 3)
    held.unlink()
    exchange(server, 3)
    assert other.trace().steps.tolist() == [0, 10, 20, 28]
    assert torch.equal(other.trace().loss, server.trace().loss)


def test_returning_to_a_checkpoint_discards_the_evaluations_after_it(held):
    server = Server(SlowToEvaluate(hold=held), RULE, Settings(steps=100, record_every=10))
    exchange(server, 5)
    checkpoint = server.checkpoint()
    exchange(server, 10)
    with pytest.warns(UserWarning, match="goes back to update 5"):
        server.go_back(checkpoint)
    held.unlink()
    exchange(server, 2)
    assert server.trace().steps.tolist() == [0, 7]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_no_record_is_missing_and_each_is_of_its_own_update(engine):
    problem, seen = SlowToEvaluate(seconds=0.005), []
    trace = lg.train(
        problem, RULE, steps=60, workers=2, engine=engine, record_every=3, compile=False,
        on_record=lambda telemetry, output: seen.append((telemetry.record, telemetry.loss, output)),
    )  # fmt: skip
    audit(trace)
    assert trace.steps.tolist() == list(range(0, 61, 3))
    again = lg.replay(trace, problem, RULE, record_every=3)
    assert torch.equal(again.loss, trace.loss)
    assert [step for step, _, _ in seen] == trace.steps.tolist()[1:]
    assert [loss for _, loss, _ in seen] == trace.loss[1:].tolist()
    assert all(problem.loss(output).item() == loss for _, loss, output in seen)


def test_a_late_evaluation_ends_the_run_and_the_best_output_is_that_of_its_record(tmp_path):
    problem = SlowToEvaluate(seconds=0.005)
    with pytest.warns(UserWarning, match="stopped early"):
        trace = lg.train(problem, RULE, steps=10_000, workers=1, engine="threads", record_every=2,
                         monitor="loss", patience=3, out=tmp_path, compile=False)  # fmt: skip
    best = load_file(tmp_path / BEST_FILE)["output"]
    assert problem.loss(best).item() == trace.loss.min()
    assert len(trace.delays) < 1000


class RaisesLater(SlowToEvaluate):
    """Its loss cannot be computed anywhere but at the start."""

    def loss(self, x):
        if not torch.equal(x, self.start()):
            raise ZeroDivisionError("no rows")
        return super().loss(x)


def test_what_an_evaluation_raises_ends_the_run_and_is_not_lost():
    with pytest.raises(ZeroDivisionError, match="no rows"):
        lg.train(RaisesLater(), RULE, steps=10_000, workers=1, engine="threads", record_every=5)


def test_a_callback_may_use_the_problem_while_a_thread_evaluates_it():
    """A module has one set of parameters in it at a time: each evaluation needs a copy of its own."""
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)), load("digits"))
    wrong = []

    def on_record(telemetry, output):
        if problem.loss(output).item() != telemetry.loss:
            wrong.append(telemetry.record)

    lg.train(problem, RULE, steps=40, workers=1, engine="threads", record_every=1, on_record=on_record)
    assert not wrong


SCRIPT = """
import sys, threading, time
from pathlib import Path
import lategrad as lg
from helpers.serving import SlowToEvaluate
from lategrad.serve import Settings, Training

def tell():
    while training.version < 20:
        time.sleep(0.01)
    print("at update 20", flush=True)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = Settings(steps=int(sys.argv[2]), workers=1, record_every=10, out=folder / "run", compile=False)
    training = Training(SlowToEvaluate(hold=folder / "hold"), lg.SGD(lr=0.1), settings)
    threading.Thread(target=tell, daemon=True).start()
    print(training.run().steps.tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10**9, 20], ids=["on its way", "after its last update"])
def test_an_interrupted_run_does_not_wait_for_long_evaluations_and_makes_up_for_them(steps, held, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    run = subprocess.Popen([sys.executable, script, tmp_path, str(steps)], start_new_session=True, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    try:
        assert run.stdout.readline() == "at update 20\n"
        run.send_signal(signal.SIGINT)
        output, errors = run.communicate(timeout=60)  # the evaluations never end
    finally:
        run.kill()
    assert run.returncode == 0, errors
    assert output.strip() == "[0]"
    assert "the trace has no record after 10 and 20" in errors
    held.unlink()
    trace = lg.resume(tmp_path / "run", SlowToEvaluate(hold=held), RULE, steps=40)
    assert trace.steps.tolist() == [0, 10, 20, 30, 40]
