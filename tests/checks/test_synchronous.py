"""Staleness 0 must be synchronous, and the first update that differs is named."""

import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.optim import Delayed
from lategrad.problems import Quadratic
from lategrad.serve import Settings
from lategrad.serve.server import Server


def train(watch, delays=None, steps=12, lr=0.1):
    model = nn.Linear(3, 1)
    optimizer = watch(torch.optim.Adam(model.parameters(), lr=lr))
    if delays is not None:
        optimizer = Delayed(optimizer, delays)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def test_no_delay_is_synchronous_to_the_bit():
    assert lg.check_synchronous(train, lambda watch: train(watch, delays=0)) == 12
    assert lg.check_synchronous(train, lambda watch: train(watch, delays="uniform:0,0"), updates=5) == 5


def test_a_delay_of_one_differs_from_the_second_update_on():
    """The first two gradients come from the start; the second update is the first whose gradient should not."""
    with pytest.raises(AssertionError, match=r"update 2 is the first that differs: tensor 0 by .* 3 of its 3 entries"):
        lg.check_synchronous(train, lambda watch: train(watch, delays=1))


def test_a_tolerance_lets_rounding_pass_and_nothing_else():
    def nearly(watch):
        train(watch, lr=0.1 + 1e-6)

    with pytest.raises(AssertionError, match="update 1 is the first that differs"):
        lg.check_synchronous(train, nearly)
    assert lg.check_synchronous(train, nearly, tolerance=1e-3) == 12
    with pytest.raises(AssertionError, match="update 1"):
        lg.check_synchronous(train, lambda watch: train(watch, lr=0.11), tolerance=1e-3)


def test_a_server_with_one_worker_is_synchronous_sgd():
    """Two loops of one's own, which yield what they have after each update."""
    problem = Quadratic(noise=0.0)
    noise = torch.zeros(problem.dim, dtype=torch.float64)

    def served():
        server = Server(problem, lg.SGD(lr=0.5), Settings(steps=10))
        job = server.join(0)
        while job is not None:
            job = server.deliver(0, job.version, job.sequence, problem.gradient(job.query, noise))
            yield {"parameters": server.output(), "version": server.version}

    def plain():
        x = problem.start()
        for t in range(10):
            x = x - 0.5 * problem.gradient(x, noise)
            yield {"parameters": x, "version": t + 1}

    assert lg.check_synchronous(plain, served, tolerance=1e-12) == 10


def test_different_lengths_shapes_and_names_differ():
    with pytest.raises(AssertionError, match="the first 12 updates are the same, but the trainings make 12 and 20"):
        lg.check_synchronous(train, lambda watch: train(watch, steps=20))
    with pytest.raises(AssertionError, match="update 2 is the first that differs: tensor 1 by 1"):
        lg.check_synchronous(lambda: iter([[1.0, 2.0]] * 2), lambda: iter([[1.0, 2.0], [1.0, 3.0]]))
    with pytest.raises(AssertionError, match="of shape"):
        lg.check_synchronous(lambda: iter([torch.zeros(2)]), lambda: iter([torch.zeros(3)]))
    with pytest.raises(AssertionError, match="a on one side, b on the other"):
        lg.check_synchronous(lambda: iter([{"a": 1.0}]), lambda: iter([{"b": 1.0}]))
    with pytest.raises(AssertionError, match="neither training made an update"):
        lg.check_synchronous(lambda watch: None, lambda watch: None)
    nan = torch.tensor([float("nan"), 1.0])
    assert lg.check_synchronous(lambda: iter([nan]), lambda: iter([nan.clone()])) == 1
    with pytest.raises(AssertionError, match="1 of its 2 entries"):
        lg.check_synchronous(lambda: iter([nan]), lambda: iter([torch.tensor([0.0, 1.0])]))


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(TypeError, match="watch takes a torch.optim.Optimizer, got Linear"):
        lg.check_synchronous(lambda watch: watch(nn.Linear(1, 1)), train)
    with pytest.raises(TypeError, match="a training must yield modules"):
        lg.check_synchronous(lambda: iter(["text"]), train)
    with pytest.raises(ValueError, match="updates must be an integer >= 1"):
        lg.check_synchronous(train, train, updates=0)
