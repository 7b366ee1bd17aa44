"""max_delay in real training: later gradients are dropped, counted and warned of."""

import pytest
import torch

import lategrad as lg
from helpers.serving import train_until
from lategrad.cli import main as cli
from lategrad.problems import Quadratic
from lategrad.serve import Settings
from lategrad.serve.server import Server

PROBLEM = Quadratic(noise=0.0)
NOISE = torch.zeros(PROBLEM.dim, dtype=torch.float64)


def hand_back(server, job):
    return server.deliver(job.worker, job.version, job.sequence, PROBLEM.gradient(job.query, NOISE))


def test_a_gradient_that_is_too_late_is_dropped_and_its_worker_continues_from_now():
    server = Server(PROBLEM, lg.SGD(lr=0.1), Settings(steps=20, max_delay=3))
    fast, slow = server.join(0), server.join(1)
    for _ in range(3):
        fast = hand_back(server, fast)
    in_time = hand_back(server, slow)  # three updates late: applied
    assert (server.version, server.too_late) == (4, {})
    for _ in range(4):
        fast = hand_back(server, fast)
    before = server.output().clone()
    fresh = hand_back(server, in_time)  # four updates late: dropped
    assert torch.equal(server.output(), before)
    assert (server.version, fresh.version, server.too_late) == (8, 8, {"worker 1": 1})
    assert server.refusals == {}
    hand_back(server, fresh)
    assert server.version == 9
    assert server.trace().config["too_late"] == {"worker 1": 1}
    again = Server(PROBLEM, lg.SGD(lr=0.1), Settings(steps=20, max_delay=3))
    again.restore(server.checkpoint())
    assert again.too_late == {"worker 1": 1}
    assert again.gate.applied == server.gate.applied


@pytest.mark.filterwarnings("ignore:worker [01] is starved")  # on a busy machine
def test_training_with_a_limit_applies_nothing_later_and_names_the_starved_worker():
    def is_starved(training):
        return any("worker 2 is starved" in str(warning.message) for warning in warned)

    with pytest.warns(UserWarning, match="worker 2 is starved") as warned:
        trace = train_until(is_starved, Quadratic(noise=0.1), lg.SGD(lr=0.05), workers=3, engine="threads",
                            max_delay=4, slow={0: "constant:1", 1: "constant:1", 2: "constant:100"})  # fmt: skip
    assert trace.delays.max() <= 4
    assert trace.config["too_late"]["worker 2"] >= 1
    replayed = lg.replay(trace, Quadratic(noise=0.1), rule=lg.SGD(lr=0.05))
    torch.testing.assert_close(replayed.output, trace.output)


def test_bad_limits_and_the_command_line(capsys):
    with pytest.raises(ValueError, match="max_delay must be an integer >= 0, or None, got -1"):
        lg.train(PROBLEM, lg.SGD(lr=0.1), steps=5, max_delay=-1)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--problem", "quadratic", "--steps", "20", "--workers", "2", "--engine", "threads",
                  "--max-delay", "5"])  # fmt: skip
    assert not ended.value.code
    assert "20 updates" in capsys.readouterr().out
