"""Random layers draw from a seed in the sample: workers, simulator, replay and resumed runs draw the same."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.problems import LocalSteps, ModuleProblem, load
from lategrad.support.seeds import seeded

DIGITS = load("digits")
RULE = lg.SGD(lr=0.1)


class Encoder(nn.Module):
    """Dropout by default, also within its attention."""

    def __init__(self):
        super().__init__()
        self.layer, self.scores = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.scores(self.layer(x.view(-1, 8, 8)).flatten(1))


class Recurrent(nn.Module):
    """Which ``torch.func`` cannot take many runs of."""

    def __init__(self):
        super().__init__()
        self.layer, self.scores = nn.GRU(8, 4, 2, dropout=0.5, batch_first=True), nn.Linear(32, 10)

    def forward(self, x):
        return self.scores(self.layer(x.view(-1, 8, 8))[0].flatten(1))


class Noisy(nn.Linear):
    """Random without any layer that says so."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Skipping(nn.Linear):
    """Which draws from Python's and numpy's generators."""

    def forward(self, x):
        return super().forward(x) * (random.random() + np.random.rand())


class Augmented:
    """Rows that differ on every access."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return DIGITS.x_train[number] + 0.1 * torch.randn(64) * random.random(), DIGITS.y_train[number]


def perceptron(p=0.5):
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 10))


def problem_of(module, **options):
    return ModuleProblem(module, DIGITS, batch=8, evaluate=64, evaluate_held_out=64, **options)


@pytest.mark.parametrize(
    ("module", "engine"),
    [(perceptron(), "threads"), (Encoder(), "threads"), (Recurrent(), "threads"), (Noisy(64, 10), "threads"),
     (Skipping(64, 10), "threads"), pytest.param(Encoder(), "processes", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_run_replays_bit_for_bit_also_after_it_was_resumed(module, engine, tmp_path):
    problem = problem_of(module)
    first = lg.train(problem, RULE, steps=20, workers=2, engine=engine, out=tmp_path, progress=False)
    assert torch.equal(lg.replay(first, problem, RULE).output, first.output)
    resumed = lg.resume(tmp_path, problem, RULE, steps=40)
    assert torch.equal(resumed.sequence[:20], first.sequence)
    assert torch.equal(lg.replay(resumed, problem, RULE).output, resumed.output)


def test_rows_that_are_augmented_at_random_replay_bit_for_bit_also_after_a_resume(tmp_path):
    problem = ModuleProblem(nn.Linear(64, 10), Augmented(), batch=8)
    how = {"workers": 2, "engine": "threads", "progress": False}
    lg.train(problem, RULE, steps=20, out=tmp_path, **how)
    again = ModuleProblem(problem.module, Augmented(), batch=8)
    trace = lg.resume(tmp_path, again, RULE, steps=40)
    assert torch.equal(lg.replay(trace, again, RULE).output, trace.output)
    assert problem.loss(problem.start()) == problem.loss(problem.start())


def test_local_steps_shards_and_pieces_replay_too():
    problem = LocalSteps(problem_of(perceptron(), micro_batch=3), local_steps=3, inner="sgd:lr=0.1")
    trace = lg.train(problem, RULE, steps=20, workers=2, engine="threads", data_shards=2, progress=False)
    assert torch.equal(lg.replay(trace, problem, RULE).output, trace.output)


@pytest.mark.parametrize("make", [perceptron, Encoder, Recurrent])
def test_gradients_of_many_runs_are_those_of_single_ones(make):
    torch.manual_seed(0)
    problem = problem_of(make(), micro_batch=5)
    samples = problem.samples(0, 3, 2)
    points = problem.start() + 0.1 * torch.randn(2, 3, problem.dim)  # two streams, of three runs each
    single = [[problem.gradient_of_one(x, sample) for x in xs] for xs, sample in zip(points, samples, strict=True)]
    assert torch.equal(problem.gradient(points, samples), torch.stack([torch.stack(row) for row in single]))


def test_a_batch_of_simulations_equals_single_ones_and_each_seed_draws_its_own():
    problem = problem_of(perceptron())
    many = lg.simulate(problem, lg.SGD(torch.tensor([[0.1], [0.3]])), [0, 3], 20, seed=[0, 1])
    one = lg.simulate(problem, lg.SGD(0.3), 3, 20, seed=1)
    assert torch.equal(many.output[1, 1, 1], one.output)
    assert not torch.equal(problem.samples(0, 0, 4)[:, -1], problem.samples(1, 0, 4)[:, -1])
    assert len(problem.samples(0, 0, 50)[:, -1].unique()) == 50


@pytest.mark.slow
def test_a_random_module_is_not_compiled_and_says_so_where_that_was_asked_for():
    problem = problem_of(perceptron())
    with pytest.warns(UserWarning, match="running eagerly"):
        asked = lg.simulate(problem, RULE, 1, 10, compile=True)
    assert torch.equal(asked.output, lg.simulate(problem, RULE, 1, 10).output)


def test_the_global_generator_continues_as_if_nothing_had_been_drawn():
    problem = problem_of(perceptron())
    torch.manual_seed(5)
    expected = torch.rand(3)
    random.seed(5), np.random.seed(5)
    others = random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    lg.simulate(problem, RULE, 0, 3)
    assert torch.equal(torch.rand(3), expected)
    assert (random.random(), np.random.rand()) == others
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="size"), seeded(1):
        torch.rand(3).view(2)
    assert torch.equal(torch.rand(3), expected)


def test_the_loss_is_a_function_of_the_vector_also_where_evaluation_draws():
    problem = problem_of(Noisy(64, 10))
    assert problem.loss(problem.start()) == problem.loss(problem.start())


@pytest.mark.parametrize("module", [perceptron(p=0.0), perceptron().eval(), nn.Linear(64, 10)])
def test_a_module_that_draws_nothing_has_samples_of_rows_alone(module):
    problem = problem_of(module)
    assert not problem.is_random
    assert problem.samples(0, 0, 3).shape == (3, 8)
    assert problem.on_device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_simulation_repeats_itself_and_a_run_replays():
    problem = problem_of(Encoder())
    first, second = (lg.simulate(problem, RULE, 2, 20, device="cuda").output for _ in range(2))
    assert torch.equal(first, second)
    trace = lg.train(problem, RULE, steps=20, workers=2, engine="threads", device="cuda", progress=False)
    torch.testing.assert_close(lg.replay(trace, problem, RULE, device="cuda").output, trace.output)
