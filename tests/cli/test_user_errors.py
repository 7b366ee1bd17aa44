"""What users write first, and what they are told: classes, loaders, scripts without a guard."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lategrad as lg
from lategrad.problems import ModuleProblem, Quadratic, load

DIGITS = load("digits")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Quadratic, r"problem must be a problem, got the class Quadratic: call it, Quadratic\(\.\.\.\)"),
        (DataLoader([1, 2]), r"got a DataLoader: lategrad.problems.ModuleProblem\(module, data\) makes"),
        (nn.Linear(2, 2), "got a Linear: lategrad.problems.ModuleProblem"),
        (DIGITS, "got Dataset, which has no dim, start, samples, gradient, loss, accuracy; lategrad.problems.Mod"),
        (None, "got NoneType, which has no dim"),
    ],
)
@pytest.mark.parametrize("call", ["simulate", "train", "replay"])
def test_what_is_no_problem_is_told_so(problem, message, call):
    how = {"steps": 2, "workers": 1, "engine": "threads"}
    calls = {
        "simulate": lambda: lg.simulate(problem, lg.SGD(0.1), 0, 10),
        "train": lambda: lg.train(problem, lg.SGD(0.1), **how),
        "replay": lambda: lg.replay(lg.train(Quadratic(), lg.SGD(0.1), **how), problem, lg.SGD(0.1)),
    }
    with pytest.raises(ValueError, match=message):
        calls[call]()


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (torch.optim.AdamW, "adamw"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "sgd"),
        (lg.optim.SteadyMuon, "steady-muon"),
        (torch.optim.RMSprop, "steady-adam"),
    ],
)
def test_an_optimizer_is_no_rule_and_its_rule_is_named(rule, named):
    name = (rule if isinstance(rule, type) else type(rule)).__name__
    with pytest.raises(ValueError, match=f"such as '{named}', got {name}, an optimizer for a loop of your own"):
        lg.train(Quadratic(), rule, steps=2, workers=1)


SCRIPT = """
import lategrad as lg
from lategrad.problems import Quadratic

def main():
    return lg.train(Quadratic(), lg.SGD(0.1), steps=5, workers=1, engine={engine!r})

{call}
print("done")
"""


def run_script(tmp_path, call, engine="processes"):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.format(call=call, engine=engine))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600, check=False)


LOOP = "for _ in range(2):\n    trace = main()"


@pytest.mark.parametrize("call", ["main()", pytest.param(LOOP, marks=pytest.mark.slow)])
def test_a_script_without_its_guard_is_told_so_before_any_process_starts(tmp_path, call):
    result = run_script(tmp_path, call)
    assert result.returncode == 1
    assert "of mine.py starts worker processes: worker processes import it" in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr
    assert result.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("call", "engine"),
    [
        ('if __name__ == "__main__":\n    main()', "processes"),
        pytest.param("main()", "threads", marks=pytest.mark.slow),
    ],
)
def test_a_script_with_its_guard_or_with_threads_runs(tmp_path, call, engine):
    result = run_script(tmp_path, call, engine)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["done"]), result.stderr


@pytest.mark.slow
def test_a_script_from_standard_input_is_told_that_workers_cannot_import_it():
    script = SCRIPT.format(call="main()", engine="processes")
    result = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert 'save it as a file, or use engine="threads"' in result.stderr


def test_a_module_that_is_no_module_and_a_vector_of_another_length_are_named():
    with pytest.raises(ValueError, match="module must be a torch.nn.Module, got 'function'"):
        lg.problems.ModuleProblem(lambda x: x, DIGITS)
    problem = lg.problems.ModuleProblem(nn.Linear(64, 10), DIGITS)
    with pytest.raises(ValueError, match=r"x must be a vector of shape \(650,\), got \(3,\)"):
        problem.module_at(torch.zeros(3))


# ---- Modules and data of one's own


def rows(inputs, targets):
    return list(zip(inputs, targets, strict=True))


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
CLASSES = X[:, :3].argmax(1)


@pytest.mark.parametrize("targets", [X[:, 0], X[:, :1]], ids=["numbers", "vectors of one number"])
def test_targets_with_and_without_a_dimension_of_one_are_the_same_regression(targets):
    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    problem = ModuleProblem(module, rows(X, targets), batch=8)
    expected = 0.5 * (module(X)[:, 0] - X[:, 0]).square().mean()
    assert problem.loss(problem.start()).item() == pytest.approx(expected.item(), rel=1e-6)
    sample = problem.samples(0, 0, 1)[0]
    by_hand = torch.autograd.grad(0.5 * (module(X[sample])[:, 0] - X[sample][:, 0]).square().mean(), module.weight)[0]
    torch.testing.assert_close(problem.gradient(problem.start(), sample)[:4], by_hand.flatten())


def test_rows_that_are_lists_of_numbers_are_vectors():
    problem = ModuleProblem(nn.Linear(4, 3), rows(X.tolist(), CLASSES.tolist()), batch=8)
    same = ModuleProblem(problem.module, rows(X, CLASSES), batch=8)
    sample = problem.samples(0, 0, 1)[0]
    assert torch.equal(problem.gradient(problem.start(), sample), same.gradient(problem.start(), sample))
    assert torch.equal(problem.loss(problem.start()), same.loss(problem.start()))


@pytest.mark.parametrize(
    ("outputs", "data", "options", "message"),
    [
        (3, rows(X, CLASSES), {"loss": nn.CrossEntropyLoss(reduction="none")},
         r"loss must return one number, the mean over the batch, got a tensor of shape \(40,\)"),
        (3, rows(X, CLASSES), {"metrics": {"mine": lambda output, target: output}, "validation": 0.5},
         r"metric mine must return one number, the mean over the batch, got a tensor of shape \(20, 3\)"),
        (3, rows(X, CLASSES), {"metrics": {"mine": lambda output, target: output.mean()}},
         "metrics must be None without held-out data, on which they are taken: give test= or validation="),
        (2, rows(X, X[:, :3]), {},
         r"output must have the shape of a batch's targets, \(40, 3\), or one dimension .* got \(40, 2\)"),
        (3, (X, CLASSES), {}, r"use torch.utils.data.TensorDataset\(x, y\), got 'rows of type Tensor'"),
        (3, [(x, y, 1) for x, y in rows(X, CLASSES)], {}, "or dicts; .* got 'rows of 3 parts'"),
        (3, rows(rows(X, X), CLASSES), {}, r"several inputs are given by name: rows that are dicts, and columns="),
    ],
)  # fmt: skip
def test_what_a_module_cannot_be_trained_with_is_told(outputs, data, options, message):
    def begin():
        problem = ModuleProblem(nn.Linear(4, outputs), data, **options)
        return problem.measure(problem.start())

    with pytest.raises(ValueError, match=message):
        begin()


def test_options_that_a_run_does_not_have_or_lacks_are_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        lg.train(Quadratic(), lg.SGD(0.1), steps=5, worker=2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'steps'"):
        lg.train(Quadratic(), lg.SGD(0.1), workers=2)


def test_steps_that_are_too_long_are_named_where_no_gradient_is_finite():
    problem = ModuleProblem(nn.Linear(4, 1), rows(100 * X, X[:, 0]), batch=8)
    refused = pytest.warns(UserWarning, match="refused a gradient")
    dropped = pytest.warns(UserWarning, match="worker 0 is dropped")
    with refused, dropped, pytest.raises(lg.serve.TrainingError, match="lower the learning rate or set clip"):
        lg.train(problem, lg.SGD(lr=10.0), steps=400, workers=1, engine="threads", compile=False)


def test_a_trace_prints_in_a_line():
    trace = lg.simulate(Quadratic(), lg.SGD(torch.tensor([[0.1], [0.2]])), [0, 3], 50)
    assert repr(trace).startswith("Trace(50 updates of 4 runs, 11 records; loss ")
    assert repr(trace).endswith(", delay up to 3)")
    single = lg.train(Quadratic(noise=0.0), lg.SGD(0.1), steps=5, workers=1, engine="threads")
    assert repr(single) == f"Trace(5 updates, 6 records; loss {single.loss[-1]:.4g}, delay up to 0)"
