"""The README's programs run as they are printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def programs():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_ten_lines_and_the_simulation_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    ten_lines, simulation, _ = programs()
    exec(ten_lines, names)
    assert names["rule"].output(names["state"]).tolist() == pytest.approx([1, 0, 0], abs=1e-3)
    exec(simulation, names)
    assert names["trace"].accuracy.shape == (11, 3, 3, 3)
    assert names["trace"].accuracy[-1].max() > 0.9
    assert (tmp_path / "accuracy.png").exists()


def test_the_optimizer_lines_run_as_written():
    import torch

    import lategrad as lg

    names = {"lg": lg, "model": torch.nn.Linear(3, 2)}
    exec(programs()[2], names)
    names["model"](torch.ones(1, 3)).sum().backward()
    names["optimizer"].step()


def test_links_lead_somewhere():
    for page in [README, *(README.parent / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            made_at_build = target.startswith("reference/")  # the site's strict build checks those
            assert made_at_build or (page.parent / target).exists(), f"{page.name} links to {target}"
