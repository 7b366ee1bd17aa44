"""Local steps: a worker's own optimizer is torch's, its state is carried from job to job, and runs are batched."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lategrad as lg
from lategrad.problems import LocalSteps, ModuleProblem, Quadratic, SoftmaxRegression, load
from lategrad.problems.problem import init_worker_state, is_stateful, run_job
from lategrad.support.runs import tensors


def digits_mlp():
    torch.manual_seed(0)
    return ModuleProblem(nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)), load("digits"), batch=16)


class Torch:
    """H steps of a torch optimizer on the module itself: an independent form of the same worker."""

    def __init__(self, problem, make):
        self.problem, self.module = problem, problem.module_at(problem.start())
        self.optimizer = make(self.module)

    def job(self, x, minibatches):
        with torch.no_grad():
            nn.utils.vector_to_parameters(x.clone(), self.module.parameters())
        for rows in minibatches:
            self.optimizer.zero_grad()
            inputs, targets = self.problem.splits.train.rows(rows)
            nn.functional.cross_entropy(self.module(inputs), targets).backward()
            self.optimizer.step()
        return x - nn.utils.parameters_to_vector(self.module.parameters()).detach()


OPTIMIZERS = {
    "sgd:lr=0.1": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-momentum:lr=0.05": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adamw:lr=0.01": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_a_worker_does_what_torch_does_and_carries_its_moments_from_job_to_job(inner):
    plain = digits_mlp()
    problem, reference = LocalSteps(plain, local_steps=5, inner=inner), Torch(plain, OPTIMIZERS[inner])
    x = problem.start()
    state = problem.init_worker_state(x)
    for k in range(4):
        sample = problem.samples(seed=3, first=k, count=1)[0]
        assert torch.equal(sample, plain.samples(3, 5 * k, 5))
        grad, state = problem.run_job(x, sample, state)
        torch.testing.assert_close(grad, reference.job(x, sample), rtol=1e-5, atol=1e-7)
        x = x - 0.7 * grad


def test_muon_steps_along_matrices_because_the_worker_knows_the_shapes():
    plain = digits_mlp()
    problem = LocalSteps(plain, local_steps=1, inner="muon:lr=0.02,weight_decay=0")
    step = problem.gradient(problem.start(), problem.samples(0, 0, 1)[0])
    hidden = problem.blocks.split(step)[2]  # the 10 x 12 matrix
    values = torch.linalg.svdvals(hidden) / (0.02 * 0.2 * 12**0.5)
    assert (values > 0.5).sum() == len(values) - 1, "all but one: the gradients of cross-entropy sum to 0"
    assert values.max() < 1.3


def test_scaled_by_its_steps_an_sgd_worker_sends_the_mean_of_the_gradients_on_its_way():
    plain = Quadratic(noise=0.3)
    problem = LocalSteps(plain, local_steps=4, inner="sgd:lr=0.2", scaled=True)
    x = y = torch.linspace(-1, 1, 10, dtype=torch.float64)
    sample, seen = problem.samples(0, 7, 1)[0], []
    for z in sample:
        seen.append(plain.gradient(y, z))
        y = y - 0.2 * seen[-1]
    torch.testing.assert_close(problem.gradient(x, sample), torch.stack(seen).mean(0))
    fewer = problem.run_job(x, sample, problem.init_worker_state(x), 2).grad
    torch.testing.assert_close(fewer, torch.stack(seen[:2]).mean(0))


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 100))
def test_runs_with_counts_of_their_own_are_the_same_as_each_by_itself(counts, seed):
    problem = LocalSteps(Quadratic(dim=3, noise=0.5), local_steps=6, inner="adamw:lr=0.1")
    xs = torch.randn(len(counts), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sample = problem.samples(seed, 2, 1)[0]
    warm = problem.run_job(xs, problem.samples(seed, 0, 1)[0], problem.init_worker_state(xs)).state
    together = problem.run_job(xs, sample, warm, torch.tensor(counts).unsqueeze(-1))
    for i, count in enumerate(counts):
        state = problem.run_job(xs[i], problem.samples(seed, 0, 1)[0], problem.init_worker_state(xs[i])).state
        alone = problem.run_job(xs[i], sample, state, count)
        torch.testing.assert_close(together.grad[i], alone.grad, rtol=1e-12, atol=1e-14)
        for batched, single in zip(tensors(together.state), tensors(alone.state), strict=True):
            torch.testing.assert_close(batched[i], single, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_one_large_vector_is_updated_in_place_with_the_same_result():
    plain = Quadratic(dim=200_000, noise=0.3, dtype=torch.float32)
    problem = LocalSteps(plain, local_steps=3, inner="adamw:lr=0.01")
    samples, x = problem.samples(0, 0, 2), problem.start().view(1, 1, -1) + 0.1
    query = x.clone()
    assert problem.optimizer.backend is None
    first = problem.run_job(x, samples[:1], problem.init_worker_state(x))
    before = [leaf.clone() for leaf in tensors(first.state)]
    second = problem.run_job(x, samples[1:], first.state)
    assert problem.optimizer.backend == "loops"
    assert torch.equal(x, query), "the query is the server's"
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(first.state), strict=True))
    twice, out_of_place = x.expand(1, 2, -1), LocalSteps(plain, local_steps=3, inner="adamw:lr=0.01")
    state = out_of_place.run_job(twice, samples[:1], out_of_place.init_worker_state(twice)).state
    expected = out_of_place.run_job(twice, samples[1:], state)
    assert out_of_place.optimizer.backend is None, "several runs at once are updated out of place"
    torch.testing.assert_close(second.grad, expected.grad[:, :1], rtol=1e-4, atol=1e-6)
    for got, wanted in zip(tensors(second.state), tensors(expected.state), strict=True):
        torch.testing.assert_close(got, wanted[:, :1], rtol=1e-4, atol=1e-6)
    pickle.dumps(problem)


def test_a_job_does_not_change_its_arguments():
    problem = LocalSteps(Quadratic(), local_steps=3, inner="sgd-momentum:lr=0.1")
    x, sample = problem.start(), problem.samples(0, 0, 1)[0]
    state = problem.run_job(x, sample, problem.init_worker_state(x)).state
    before = [leaf.clone() for leaf in (x, sample, *tensors(state))]
    problem.run_job(x, sample, state)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, sample, *tensors(state)), strict=True))


def test_streams_and_runs_are_batched_as_those_of_a_gradient_are():
    problem = LocalSteps(SoftmaxRegression(load("digits"), batch=8), local_steps=3, inner="sgd:lr=0.05")
    samples = torch.stack([problem.samples(seed, 0, 1)[0] for seed in (0, 1)])
    x = torch.randn(2, 4, problem.dim, generator=torch.Generator().manual_seed(0))
    together = problem.gradient(x, samples)
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(together[i, j], problem.gradient(x[i, j], samples[i]), rtol=1e-4, atol=1e-5)


def test_an_inner_lr_for_each_run_is_a_sweep():
    swept = LocalSteps(Quadratic(noise=0.0), local_steps=2, inner="sgd:lr=0.1|0.5")
    assert swept.start().shape == (2, 10)
    sample = swept.samples(0, 0, 1)[0]
    single = LocalSteps(Quadratic(noise=0.0), local_steps=2, inner="sgd:lr=0.5")
    torch.testing.assert_close(swept.gradient(swept.start(), sample)[1], single.gradient(single.start(), sample))


def test_the_measures_are_the_problems_own():
    plain = digits_mlp()
    problem = LocalSteps(plain, local_steps=2, inner="adamw:lr=0.01")
    x = problem.start()
    assert torch.equal(problem.measure(x).loss, plain.loss(x))
    assert torch.equal(problem.accuracy(x), plain.accuracy(x))
    assert problem.blocks is plain.blocks
    assert problem.fingerprint() == plain.fingerprint()
    assert problem.labels(problem.samples(0, 0, 3)).shape == (3, 2 * 16)
    assert not hasattr(problem, "gradient_of_one"), "hosts would take plain gradients"
    assert "local_steps=2" in repr(problem)
    copied = pickle.loads(pickle.dumps(problem))
    sample = problem.samples(0, 0, 1)[0]
    assert torch.equal(copied.gradient(x, sample), problem.gradient(x, sample))


def test_a_plain_problem_is_hosted_with_the_same_lines():
    plain = Quadratic()
    x, sample = plain.start(), plain.samples(0, 0, 1)[0]
    grad, state = run_job(plain, x, sample, init_worker_state(plain, x))
    assert torch.equal(grad, plain.gradient(x, sample))
    assert state == ()
    assert not is_stateful(plain)
    assert is_stateful(LocalSteps(plain, local_steps=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_steps": 0}, "local_steps must be an integer >= 1, got 0"),
        ({"local_steps": True}, "local_steps must be an integer >= 1, got True"),
        ({"inner": "steady"}, "inner must be a rule whose query and output are its iterate"),
        ({"inner": "sgd-uniform:lr=0.1"}, "inner must be a rule whose query and output are its iterate"),
        ({"inner": "gap-aware:lr=0.1"}, "inner must be a rule without tickets"),
        ({"inner": "adamww:lr=0.1"}, "did you mean 'adamw'?"),
        ({"scaled": 1}, "scaled must be True or False, got 1"),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        LocalSteps(Quadratic(), **{"local_steps": 5, **arguments})


def test_local_steps_of_local_steps_are_refused():
    with pytest.raises(ValueError, match="problem must be a plain problem"):
        LocalSteps(LocalSteps(Quadratic(), local_steps=2), local_steps=3)


def test_more_steps_than_a_job_has_are_refused():
    problem = LocalSteps(Quadratic(), local_steps=3)
    x = problem.start()
    with pytest.raises(ValueError, match="local_steps must be from 1 to 3, got 4"):
        problem.run_job(x, problem.samples(0, 0, 1)[0], problem.init_worker_state(x), 4)


def test_an_outer_step_of_one_without_delay_is_the_worker_alone():
    plain = Quadratic(noise=0.2)
    problem = LocalSteps(plain, local_steps=10, inner="adamw:lr=0.02")
    outer = lg.simulate(problem, lg.SGD(lr=1.0), delays=0, steps=8)
    alone = lg.simulate(plain, lg.baselines.AdamW(lr=0.02), delays=0, steps=80)
    torch.testing.assert_close(outer.output, alone.output, rtol=1e-9, atol=1e-12)


def test_a_shard_is_that_of_the_problem_for_every_step():
    plain = SoftmaxRegression(load("digits"), batch=4)
    jobs = LocalSteps(plain, local_steps=3).samples_of_shard(7, 2, 5, 1, 4)
    assert torch.equal(jobs.flatten(0, 1), plain.samples_of_shard(7, 6, 15, 1, 4))
    assert not hasattr(LocalSteps(Quadratic(), local_steps=3), "samples_of_shard")
