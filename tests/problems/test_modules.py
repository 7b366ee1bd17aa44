"""Any module: what torch.func cannot batch, narrow dtypes, batch norm, metrics, and data of every kind."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.modules import Branching, Named, Pairs, Rows, Scaled, loader, top_two, with_batch_norm
from lategrad.problems import ModuleProblem, NpyRows, load
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths, read_checkpoint
from lategrad.serve.observe.records import Telemetry
from lategrad.support.torch_private import gradients


def by_hand(problem, x, sample):
    """The gradient as anybody would write it."""
    module = copy.deepcopy(problem.module)
    nn.utils.vector_to_parameters(x, module.parameters())
    inputs, targets = problem.splits.train.rows(sample)
    nn.functional.cross_entropy(module(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


# ---- Gradients


@pytest.mark.parametrize("make", [Rows, lambda: Branching(64, 10), with_batch_norm])
def test_the_gradient_of_any_module_is_that_of_plain_autograd(make):
    torch.manual_seed(0)
    problem = ModuleProblem(make(), load("digits"), batch=16)
    sample = problem.samples(0, 0, 1)[0]
    x = problem.start() + 0.1 * torch.randn(problem.dim)
    assert torch.equal(problem.gradient(x, sample), by_hand(problem, x, sample))
    room = torch.empty(problem.dim)
    assert problem.gradient_of_one(x, sample, room).data_ptr() == room.data_ptr()
    assert torch.equal(room, problem.gradient(x, sample))


def test_a_vector_that_changes_where_it_lies_is_seen():
    """The module keeps views of the last vector: new numbers there, or another vector, must both be noticed."""
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"))
    sample, x = problem.samples(0, 0, 1)[0], problem.start()
    for change in range(4):
        x = x + 1 if change == 2 else x.mul_(0.5)
        assert torch.equal(problem.gradient(x, sample), by_hand(problem, x, sample))


def test_a_recurrent_network_trains_in_processes_and_replays():
    torch.manual_seed(0)
    problem = ModuleProblem(Rows(), load("digits"), batch=32)
    trace = lg.train(problem, lg.SGD(lr=0.3), steps=300, workers=2)
    assert trace.accuracy[-1] > trace.accuracy[0] + 0.1
    assert torch.equal(lg.replay(trace, problem, lg.SGD(lr=0.3)).output, trace.output)


@pytest.mark.parametrize("make", [Rows, lambda: Branching(64, 10)], ids=["recurrent", "branching"])
def test_runs_that_cannot_be_batched_are_simulated_one_by_one_and_that_is_said_once(make):
    torch.manual_seed(0)
    problem = ModuleProblem(make(), load("digits"), batch=16, evaluate=100, evaluate_held_out=100)
    sweep = lg.SGD(lr=torch.tensor([[0.05], [0.2]]))
    with pytest.warns(UserWarning, match="cannot take 4 runs of (Rows|Branching) at once") as caught:
        trace = lg.simulate(problem, sweep, [0, 3], 20, seed=5, compile=False)
    assert [one.category for one in caught].count(UserWarning) == 1
    alone = lg.simulate(problem, lg.SGD(lr=0.2), 3, 20, seed=5, compile=False)
    assert torch.equal(trace.output[1, 1], alone.output)


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.huber_loss, nn.functional.smooth_l1_loss])
def test_runs_of_a_regression_are_taken_at_once(loss):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    problem = ModuleProblem(nn.Linear(3, 1), torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), loss, batch=8)
    rule = lg.SGD(lr=torch.tensor([[0.1], [0.05]]))
    runs = lg.simulate(problem, rule, [0, 3], 20, seed=[0, 1])  # a warning, an error here, if one by one
    alone = lg.simulate(problem, lg.SGD(lr=0.05), 3, 20, seed=1)
    torch.testing.assert_close(runs.loss[-1, 1, 1, 1], alone.loss[-1])


def test_an_error_of_the_module_itself_is_not_taken_for_one_of_torch_func():
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), loss=lambda output, target: output[:, 77].mean())
    with pytest.raises(IndexError, match="index 77 is out of bounds"):
        problem.gradient(problem.start().expand(2, -1), problem.samples(0, 0, 1)[0])
    wrong = ModuleProblem(nn.Linear(63, 10), load("digits"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        wrong.gradient(wrong.start().expand(2, -1), wrong.samples(0, 0, 1)[0])


def test_a_bfloat16_module_is_trained_from_a_float32_vector():
    problem = ModuleProblem(Scaled().bfloat16(), load("digits"), batch=64)
    assert (
        problem.start().dtype == problem.gradient(problem.start(), problem.samples(0, 0, 1)[0]).dtype == torch.float32
    )
    trace = lg.train(problem, lg.SGD(lr=0.1), steps=200, workers=2, engine="threads")
    assert trace.output.dtype == torch.float32
    assert trace.accuracy[-1] > 0.8
    assert problem.module_at(trace.output).weight.dtype == torch.bfloat16
    swept = lg.simulate(problem, lg.SGD(lr=torch.tensor([[0.1], [0.05]])), 0, 50, compile=False)
    assert (swept.loss[-1] < swept.loss[0]).all()


# ---- Batch norm


def test_batch_norm_trains_and_its_statistics_are_those_of_the_output():
    torch.manual_seed(0)
    problem = ModuleProblem(with_batch_norm(), load("digits"))
    trace = lg.train(problem, lg.SGD(lr=0.1), steps=300, workers=2)
    assert trace.accuracy[-1] > 0.9
    module = problem.module_at(trace.output)
    assert not module.training
    digits = load("digits")
    hidden = module[0](digits.x_train)
    torch.testing.assert_close(module[1].running_mean, hidden.mean(0), rtol=0.05, atol=0.05)
    accuracy = (module(digits.x_test).argmax(-1) == digits.y_test).double().mean()
    assert accuracy == trace.accuracy[-1]
    assert torch.equal(lg.replay(trace, problem, lg.SGD(lr=0.1)).output, trace.output)


def test_batch_norm_statistics_are_a_function_of_the_point():
    torch.manual_seed(0)
    problem = ModuleProblem(with_batch_norm(), load("digits"))
    x, y = problem.start(), problem.start() + 0.3
    first = problem.loss(x)
    many = problem.loss(torch.stack([y, x]))
    assert torch.equal(many[1], first)
    assert not torch.equal(many[0], first)
    sweep = lg.simulate(problem, lg.SGD(lr=torch.tensor([[0.1], [0.01]])), 2, 20, compile=False)
    assert (sweep.loss[-1] < sweep.loss[0]).all()


def test_frozen_batch_norm_keeps_its_statistics():
    module = with_batch_norm()
    module(torch.randn(32, 64))
    module[1].eval()
    problem = ModuleProblem(module, load("digits"))
    assert torch.equal(problem.module_at(problem.start() + 0.1)[1].running_mean, module[1].running_mean)


# ---- Metrics and parts of the data


def test_metrics_of_the_user_are_recorded_and_kept(tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), metrics={"top 2": top_two})
    trace = lg.train(problem, lg.SGD(lr=0.3), steps=100, workers=2, record_every=20, out=tmp_path)
    assert trace.metrics["top 2"].shape == trace.loss.shape == trace.test_loss.shape == (6,)
    assert (trace.metrics["top 2"] >= trace.accuracy).all()
    assert trace.metrics["top 2"][-1] > trace.accuracy[0]
    longer = lg.resume(tmp_path, problem, lg.SGD(lr=0.3), steps=140)
    assert longer.metrics["top 2"].shape == (8,)
    assert torch.equal(longer.metrics["top 2"][:6], trace.metrics["top 2"])
    loaded = lg.Trace.load(tmp_path / "trace.safetensors")
    assert torch.equal(loaded.metrics["top 2"], longer.metrics["top 2"])
    assert next(iter(loaded.rows()))["top 2"] == trace.metrics["top 2"][0]
    more = ModuleProblem(problem.module, load("digits"), metrics={"top two": top_two})
    # The last checkpoint is written before the last outputs are evaluated: the run that resumes evaluates those.
    known = len(read_checkpoint(checkpoint_paths(tmp_path)[0])[1]["records"]["steps"])
    assert 6 <= known <= 8
    changed = lg.resume(tmp_path, more, lg.SGD(lr=0.3), steps=160)
    before, now = changed.metrics["top 2"], changed.metrics["top two"]
    assert torch.equal(before[:known], longer.metrics["top 2"][:known])
    assert torch.equal(now[known:8], longer.metrics["top 2"][known:])
    assert before[known:].isnan().all()  # what was not measured is not a number
    assert now[:known].isnan().all()
    assert not now[known:].isnan().any()
    assert len(now) == len(before) == 9
    swept = lg.simulate(problem, lg.SGD(lr=torch.tensor([[0.1], [0.3]])), [0, 5], 50)
    assert swept.metrics["top 2"].shape == swept.loss.shape == (11, 2, 2)


@pytest.mark.parametrize("name", ["loss", "rule", *sorted({*Telemetry._fields} - {"version", "metrics"})])
def test_a_metric_may_not_take_a_name_that_is_recorded_already(name):
    with pytest.raises(ValueError, match="the name of a metric must be a text other than loss"):
        ModuleProblem(nn.Linear(64, 10), load("digits"), metrics={name: top_two})


def test_a_metric_may_not_take_the_name_of_an_axis():
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), metrics={"lr": top_two})
    assert lg.simulate(problem, lg.SGD(lr=0.1), 0, 1).metrics.keys() == {"lr"}
    with pytest.raises(ValueError, match="the name of a metric must be that of no axis, got 'lr'"):
        lg.simulate(problem, lg.SGD(lr=torch.tensor([[0.1], [0.3]])), 0, 1)


def test_a_validation_part_is_held_out_of_training_and_judges_it():
    digits = load("digits")
    problem = ModuleProblem(nn.Linear(64, 10), digits, validation=0.25, sampling="epochs", batch=49)
    validation, train = problem.splits.validation.numbers, problem.splits.train.numbers
    assert len(validation) == 359
    assert sorted(torch.cat([validation, train]).tolist()) == list(range(len(digits.y_train)))
    x = problem.start()
    outputs = problem.module(digits.x_train[validation])
    want = nn.functional.cross_entropy(outputs, digits.y_train[validation])
    measured = problem.measure(x)
    assert measured.val_loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert measured.test_loss is None
    samples = problem.samples(0, 0, 22)
    assert torch.equal(problem.splits.train.rows(samples[0])[1], problem.labels(samples)[0])
    assert set(train[samples.flatten()].tolist()) == set(train.tolist())
    whole = ModuleProblem(problem.module, digits)
    assert torch.equal(problem.measure(x, part="test").accuracy, whole.accuracy(x))
    assert torch.equal(problem.measure(x, part="test").test_loss, whole.test_loss(x))
    assert torch.equal(problem.test_loss(x), whole.test_loss(x))
    with pytest.raises(ValueError, match="part must be None or among test, got 'validation'"):
        whole.measure(x, part="validation")


def test_held_out_data_can_be_looked_at_in_part():
    digits = load("digits")
    some = ModuleProblem(nn.Linear(64, 10), digits, evaluate_held_out=50)
    shorter = digits._replace(x_test=digits.x_test[:50], y_test=digits.y_test[:50])
    assert torch.equal(some.test_loss(some.start()), ModuleProblem(some.module, shorter).test_loss(some.start()))


# ---- Data of every kind


def npy_rows(folder, train):
    digits = load("digits")
    part = "train" if train else "test"
    for name in ("x", "y"):
        np.save(folder / f"{name}_{part}.npy", getattr(digits, f"{name}_{part}").numpy())
    return NpyRows(folder / f"x_{part}.npy", folder / f"y_{part}.npy")


@pytest.mark.parametrize("kind", ["pairs", "dicts", "named", "npy", "list"])
def test_indexable_data_trains_as_tensors_do(kind, tmp_path):
    torch.manual_seed(0)
    module = Named(64, 10)
    columns = {"dicts": ("image", "label"), "named": (("image",), "label")}.get(kind)
    if kind == "npy":
        train, test = npy_rows(tmp_path, True), npy_rows(tmp_path, False)
    else:
        train, test = (Pairs(part, as_dicts=columns is not None) for part in (True, False))
        if kind == "list":
            train, test = [train[i] for i in range(len(train))], [test[i] for i in range(len(test))]
    problem = ModuleProblem(module, train, test=test, columns=columns, batch=16)
    rule = lg.SGD(lr=0.1)
    trace = lg.train(problem, rule, steps=60, workers=2)
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
    in_memory = ModuleProblem(module, load("digits"), batch=16)
    torch.testing.assert_close(problem.measure(trace.output), in_memory.measure(trace.output))
    sweep, memory = (lg.simulate(p, lg.SGD(lr=torch.tensor([[0.1], [0.3]])), 2, 20, seed=[0, 1], compile=False)
                     for p in (problem, in_memory))  # fmt: skip
    torch.testing.assert_close(sweep.output, memory.output)


def test_a_stream_of_batches_trains_and_replays_if_it_depends_on_its_seed_alone():
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), loader, test=Pairs(train=False))
    trace = lg.train(problem, lg.SGD(lr=0.3), steps=120, workers=2)  # an epoch has 44 batches
    assert trace.accuracy[-1] > 0.8
    assert torch.equal(lg.replay(trace, problem, lg.SGD(lr=0.3)).output, trace.output)
    train = problem.splits.train
    again = train.batch(7, 50)[1]
    assert torch.equal(pickle.loads(pickle.dumps(train)).batch(7, 50)[1], again)
    assert not torch.equal(train.batch(7, 50 - 44)[1], again)  # another epoch, in another order


def test_files_on_disk_are_not_pickled(tmp_path):
    rows = npy_rows(tmp_path, True)
    assert len(pickle.dumps(rows)) < 1000
    assert torch.equal(pickle.loads(pickle.dumps(rows)).rows(torch.tensor([3]))[0], load("digits").x_train[3:4])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModuleProblem(Rows, load("digits")), r"got the class Rows: call it, Rows\(\.\.\.\)"),
        (lambda: ModuleProblem(nn.Linear(64, 10), Pairs), r"data must be a data set, got the class Pairs: call it"),
        (lambda: ModuleProblem(nn.Linear(64, 10), loader(0)), "data must not be a DataLoader, .*loader.dataset"),
        (lambda: ModuleProblem(nn.Linear(64, 10), Pairs(as_dicts=True)), "columns must name .* dicts of image, label"),
        (lambda: ModuleProblem(nn.Linear(64, 10), Pairs(as_dicts=True), columns=("x", "label")), "among those of the"),
        (lambda: ModuleProblem(nn.Linear(64, 10), loader, validation=0.1), "validation must be 0 for a stream"),
        (lambda: ModuleProblem(nn.Linear(64, 10), 3), "data must be a data set of lategrad.problems.load, .* got int"),
        (lambda: ModuleProblem(nn.Linear(64, 10), load("digits"), test=[]), "test must be None: the data set has"),
        (lambda: ModuleProblem("mlp", load("digits")), "module must be a torch.nn.Module, got 'str'"),
    ],
)
def test_what_cannot_be_trained_on_is_told_so(build, message):
    with pytest.raises(ValueError, match=message):
        build()


class Wrapped(torch.Tensor):
    """A user-defined kind of tensor."""


def test_gradients_are_those_of_autograd_whatever_the_value_is():
    """The short way to torch's engine is for plain tensors; all others, and mistakes, go through autograd.grad."""
    used, unused = (torch.ones(3, requires_grad=True) for _ in range(2))
    for value in ((used**3).sum(), (used**3).sum().reshape(1, 1), (used**3).sum().as_subclass(Wrapped)):
        parts = gradients(value, (used, unused))
        assert torch.equal(parts[0].as_subclass(torch.Tensor), torch.full((3,), 3.0))
        assert torch.equal(parts[1].as_subclass(torch.Tensor), torch.zeros(3))
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        gradients(used**3, (used,))
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients(used.detach().sum(), (used,))


def test_a_problem_and_its_copies_hold_the_parameters_once():
    module = nn.Sequential(nn.Linear(64, 10), nn.Linear(10, 10))
    module[1].weight = nn.Parameter(module[1].weight.detach())
    module.tied = module[1]
    problem = ModuleProblem(module, load("digits"))
    first = problem.module[0].weight.data_ptr()
    for one in (problem, problem.to("cpu")):
        parts = (one.module, one.training.module, one.evaluated.module)
        assert {part[0].weight.data_ptr() for part in parts} == {first}
        assert all(part.tied is part[1] for part in parts)
    x = problem.start()
    problem.loss(x + 1)
    problem.gradient(x + 2, problem.samples(0, 0, 1)[0])
    assert torch.equal(problem.start(), x)  # what is written into one is not in the others
    assert module[0].weight.data_ptr() != first
