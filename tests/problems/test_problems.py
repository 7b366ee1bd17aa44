"""Problems: gradients against autograd, batches against singles, constants against their definitions."""

import copy

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from lategrad.problems import Dataset, LeastSquares, ModuleProblem, Quadratic, SmoothedSVM, SoftmaxRegression, load
from lategrad.problems.minibatches import Minibatches


def small_data(classes=3, rows=40, features=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    y = torch.randint(classes, (rows,), generator=generator) if classes else x.sum(-1)
    return Dataset("small", x, y, x[:10], y[:10], classes)


def in_float64(data):
    return data._replace(x_train=data.x_train.double(), x_test=data.x_test.double())


def problems(dtype=torch.float64):
    return {
        "softmax": SoftmaxRegression(small_data(), batch=5, l2=0.1, dtype=dtype),
        "least-squares": LeastSquares(small_data(classes=None), batch=5, dtype=dtype),
        "least-squares-classes": LeastSquares(small_data(), batch=5, l2=0.2, dtype=dtype),
        "svm": SmoothedSVM(small_data(), batch=5, dtype=dtype),
        "quadratic": Quadratic(dim=6, noise=0.5, dtype=dtype),
        "module": ModuleProblem(mlp().double(), in_float64(small_data()), batch=5),
    }


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def points(problem, *runs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    start = problem.start()
    return start + torch.randn(*runs, problem.dim, generator=generator, dtype=start.dtype)


NAMES = list(problems())


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_all_single_row_gradients_is_the_gradient_of_the_loss(name):
    """The oracle is unbiased for exactly the objective that `loss` reports."""
    problem = problems()[name]
    x = points(problem)
    if name == "quadratic":
        mean = problem.gradient(x, torch.zeros(problem.dim, dtype=x.dtype))
        expected = problem.curvatures * (x - problem.optimum)
    else:
        rows = torch.arange(40).unsqueeze(-1)
        mean = torch.stack([problem.gradient(x, row) for row in rows]).mean(0)
        h = 1e-6
        basis = torch.eye(problem.dim, dtype=x.dtype) * h
        expected = ((problem.loss(x + basis) - problem.loss(x - basis)) / (2 * h)).squeeze(-1)
    torch.testing.assert_close(mean, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_batched_runs_and_streams_equal_singles(name):
    problem = problems()[name]
    x = points(problem, 2, 3, 2)
    samples = torch.stack([problem.samples(seed, 0, 1)[0] for seed in (0, 1)])
    batched = problem.gradient(x, samples)
    assert batched.shape == x.shape
    for stream in range(2):
        for i in range(3):
            for j in range(2):
                alone = problem.gradient(x[stream, i, j], samples[stream])
                torch.testing.assert_close(batched[stream, i, j], alone, rtol=1e-12, atol=1e-12)
    for value in (problem.loss, problem.accuracy):
        if value(x) is not None:
            assert value(x).shape == (2, 3, 2, 1)
            torch.testing.assert_close(value(x)[1, 2, 0], value(x[1, 2, 0]), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_the_same_however_it_is_cut(name):
    problem = problems()[name]
    whole = problem.samples(7, 0, 700)
    torch.testing.assert_close(torch.cat([problem.samples(7, 0, 250), problem.samples(7, 250, 450)]), whole)
    torch.testing.assert_close(problem.samples(7, 600, 3), whole[600:603])
    assert not torch.equal(problem.samples(8, 0, 700), whole)


def test_softmax_gradient_is_cross_entropys():
    data = small_data()
    problem = SoftmaxRegression(data, batch=8, dtype=torch.float64)
    x, rows = points(problem), torch.arange(8)
    linear = nn.Linear(4, 3, dtype=torch.float64)
    matrix = x.view(3, 5)
    linear.weight.data, linear.bias.data = matrix[:, :-1].clone(), matrix[:, -1].clone()
    nn.functional.cross_entropy(linear(data.x_train[rows].double()), data.y_train[rows]).backward()
    expected = torch.cat([linear.weight.grad, linear.bias.grad.unsqueeze(-1)], dim=-1).flatten()
    torch.testing.assert_close(problem.gradient(x, rows), expected, rtol=1e-12, atol=1e-12)


def test_smoothed_hinge_is_smooth_where_its_pieces_meet():
    problem = SmoothedSVM(small_data(), dtype=torch.float64)
    scores = torch.linspace(-3, 3, 601, dtype=torch.float64).unsqueeze(0).requires_grad_()
    for target in (0.0, 1.0):
        loss = problem.row_loss(scores, torch.tensor(target, dtype=torch.float64))
        (derivative,) = torch.autograd.grad(loss.sum(), scores)
        torch.testing.assert_close(derivative, problem.residual(scores, torch.tensor(target)).detach())
        assert (derivative.diff().abs() <= 0.01 * problem.curvature + 1e-9).all()


@pytest.mark.parametrize("name", ["softmax", "least-squares", "least-squares-classes", "svm", "quadratic"])
def test_smoothness_and_strong_convexity_bound_the_gradients_change(name):
    problem = problems()[name]
    a, b = points(problem, 200, seed=1), points(problem, 200, seed=2)
    full = torch.arange(40) if name != "quadratic" else torch.zeros(problem.dim, dtype=torch.float64)
    change = problem.gradient(a, full) - problem.gradient(b, full)
    distance = (a - b).norm(dim=-1)
    assert (change.norm(dim=-1) <= problem.smoothness * distance * (1 + 1e-9)).all()
    assert ((change * (a - b)).sum(-1) >= problem.strong_convexity * distance**2 * (1 - 1e-9)).all()


def test_least_squares_constants_are_reached():
    problem = LeastSquares(small_data(classes=None), dtype=torch.float64)
    hessian = problem.train.mT @ problem.train / 40
    values, vectors = torch.linalg.eigh(hessian)
    rows = torch.arange(40)
    for value, vector, constant in (
        (values[-1], vectors[:, -1], problem.smoothness),
        (values[0], vectors[:, 0], problem.strong_convexity),
    ):
        change = problem.gradient(vector, rows) - problem.gradient(torch.zeros_like(vector), rows)
        torch.testing.assert_close(change.norm().item(), value.item(), rtol=1e-9, atol=1e-12)
        assert constant == pytest.approx(value.item(), rel=1e-9)


def test_quadratic_noise_has_the_stated_variance():
    problem = Quadratic(dim=8, noise=3.0)
    samples = problem.samples(0, 0, 20_000)
    xi = torch.stack([problem.gradient(problem.optimum, s) for s in samples[:5000]])
    assert xi.square().sum(-1).mean().item() == pytest.approx(9.0, rel=0.05)
    assert xi.mean(0).abs().max().item() < 0.1


def test_softmax_on_digits_reaches_scikit_learns_accuracy():
    """A sanity check against an independent implementation on real data."""
    data = load("digits")
    problem = SoftmaxRegression(data, dtype=torch.float64, l2=1e-3)
    model = LogisticRegression(C=1 / (1e-3 * len(data.x_train)), max_iter=2000, tol=1e-8)
    model.fit(data.x_train.double().numpy(), data.y_train.numpy())
    x = torch.from_numpy(model.coef_).double()
    x = torch.cat([x, torch.from_numpy(model.intercept_).unsqueeze(-1)], dim=-1).flatten()
    assert problem.accuracy(x).item() == pytest.approx(model.score(data.x_test.numpy(), data.y_test.numpy()))
    bias = x.view(10, 65)[:, -1]  # scikit-learn does not penalise the bias
    expected = model_loss(model, data) + 0.5e-3 * (x.square().sum() - bias.square().sum() + bias.square().sum())
    assert problem.loss(x).item() == pytest.approx(expected.item(), rel=1e-9)


def model_loss(model, data):
    log_probabilities = torch.from_numpy(model.predict_log_proba(data.x_train.double().numpy()))
    return -log_probabilities[torch.arange(len(data.y_train)), data.y_train].mean()


@pytest.mark.parametrize("sampling", ["iid", "epochs"])
def test_minibatches_cover_the_data(sampling):
    draws = Minibatches(rows=30, batch=7, sampling=sampling).draw(0, 0, 3000)
    counts = torch.bincount(draws.flatten(), minlength=30)
    spread = 1 if sampling == "epochs" else 5 * (21_000 / 30) ** 0.5
    assert (counts - 700).abs().max() <= spread


def test_an_epoch_has_every_row_once():
    draws = Minibatches(rows=30, batch=5, sampling="epochs").draw(3, 6, 12)
    for epoch in draws.reshape(2, 30):
        assert sorted(epoch.tolist()) == list(range(30))


def test_module_at_writes_the_vector_into_a_copy():
    module = mlp()
    before = copy.deepcopy(module.state_dict())
    problem = ModuleProblem(module, small_data())
    x = points(problem)
    trained = problem.module_at(x)
    torch.testing.assert_close(torch.cat([p.flatten() for p in trained.parameters()]), x)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SoftmaxRegression(small_data(), batch=0), "batch must be an integer >= 1, got 0"),
        (lambda: SoftmaxRegression(small_data(), l2=-1.0), "l2 must be a finite number >= 0, got -1.0"),
        (lambda: SoftmaxRegression(small_data(), sampling="sorted"), "sampling must be one of 'iid', 'epochs'"),
        (lambda: SoftmaxRegression(small_data(), dtype=torch.int64), "dtype must be torch.float32 or torch.float64"),
        (lambda: SoftmaxRegression(small_data(classes=None)), "data must be a data set with classes"),
        (lambda: ModuleProblem(nn.ReLU(), small_data()), "a module with parameters to train"),
        (lambda: Quadratic(dim=0), "dim must be an integer >= 1, got 0"),
        (lambda: Quadratic(smoothness=1.0, strong_convexity=2.0), "strong_convexity must be <= smoothness = 1.0"),
        (lambda: Quadratic(dim=3, optimum=torch.zeros(4)), "optimum must be a vector of length 3"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_module_is_judged_in_evaluation_mode_and_keeps_its_frozen_parameters():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    problem = ModuleProblem(module, small_data())
    assert problem.dim == 5 * 3 + 3
    x = problem.start() + 1
    assert problem.loss(x).item() == problem.loss(x).item()
    assert torch.equal(problem.module_at(x)[0].weight, module[0].weight)
    assert torch.equal(problem.module_at(x)[2].weight, module[2].weight + 1)
