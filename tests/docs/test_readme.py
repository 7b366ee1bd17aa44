"""The README's programs run as they are printed."""

import re
from pathlib import Path

import pytest

import lategrad as lg

README = Path(__file__).parents[2] / "README.md"


def test_the_programs_run_one_after_another_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    loop, simulation = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 11
    exec(loop, names)
    assert names["optimizer"].updates == 300 - 8
    exec(simulation, names)
    assert names["trace"].accuracy.shape == (11, 3, 3, 3)
    assert names["trace"].accuracy[-1].max() > 0.9
    assert (tmp_path / "accuracy.png").exists()


def test_the_numbers_beside_the_simulations_are_what_they_print():
    """Other processors round differently, and a run that oscillates shows it."""
    problem = lg.problems.SoftmaxRegression(lg.problems.load("digits"))
    rules = "steady:lr=1,domain=ball:5", "anytime-sgd:lr=1,domain=ball:5"
    accuracies = [lg.simulate(problem, rule, [0, 100], steps=2000, seed=[0, 1, 2]).accuracy[-1] for rule in rules]
    steady, anytime = (accuracy.mean(0).tolist() for accuracy in accuracies)
    said = re.search(r"takes `Steady` from (\.\d+) to (\.\d+), the paper's\n.* to (\.\d+)\.", README.read_text("utf-8"))
    assert [*map(float, said.groups())] == pytest.approx([*steady, anytime[1]], abs=0.004)
    steady, anytime = (accuracy[:2].mean(0).tolist() for accuracy in accuracies)
    page = (README.parent / "docs" / "simulate.md").read_text("utf-8")
    said = re.search(r"keeps (\.\d+) of (\.\d+) there, `anytime-sgd` (\.\d+) of (\.\d+)\.", page)
    assert [*map(float, said.groups())] == pytest.approx([*reversed(steady), *reversed(anytime)], abs=0.004)
