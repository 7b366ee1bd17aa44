"""What users write first, and what they are told: classes, loaders, scripts without a guard."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lategrad as lg
from lategrad.problems import Quadratic, load

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
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("call", ["main()", "for _ in range(2):\n    trace = main()"])
def test_a_script_without_its_guard_is_told_so_before_any_process_starts(tmp_path, call):
    result = run_script(tmp_path, call)
    assert result.returncode == 1
    assert "of mine.py starts worker processes: worker processes import it" in result.stderr
    assert 'if __name__ == "__main__":' in result.stderr
    assert result.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("call", "engine"), [('if __name__ == "__main__":\n    main()', "processes"), ("main()", "threads")]
)
def test_a_script_with_its_guard_or_with_threads_runs(tmp_path, call, engine):
    result = run_script(tmp_path, call, engine)
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["done"]), result.stderr


def test_a_module_that_is_no_module_and_a_vector_of_another_length_are_named():
    with pytest.raises(ValueError, match="module must be a torch.nn.Module, got 'function'"):
        lg.problems.ModuleProblem(lambda x: x, DIGITS)
    problem = lg.problems.ModuleProblem(nn.Linear(64, 10), DIGITS)
    with pytest.raises(ValueError, match=r"x must be a vector of shape \(650,\), got \(3,\)"):
        problem.module_at(torch.zeros(3))
