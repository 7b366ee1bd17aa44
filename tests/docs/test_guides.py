"""What the guides print works: their first programs run, and their commands have the options that they use."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import lategrad as lg
from lategrad.cli.main import COMMANDS, program

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def deep_network():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(9)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def regression():
    return {"model": torch.nn.Linear(4, 4), "problem": lg.problems.SoftmaxRegression(lg.problems.load("digits"))}


NEEDS = {"local": dict, "simulate": dict, "stages": deep_network, "baselines": regression}
"""Guides whose first program can be run, and the names that it takes for granted."""


@pytest.mark.parametrize("page", NEEDS)
def test_the_first_program_of_a_guide_runs(page, capsys):
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(program[1], {"lg": lg, "torch": torch, **NEEDS[page]()})


def commands():
    """Every ``lategrad COMMAND ...`` in a block of code, with the page it is on."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if language in ("", "sh") and re.match(r"lategrad [a-z]+ ", line):
                    yield page, shlex.split(line, comments=True)


def test_commands_in_the_docs_have_the_options_that_they_use():
    known = {name: program(name).commands[name] for name in COMMANDS}
    found = list(commands())
    assert len(found) > 15
    for page, (_, command, *words) in found:
        assert command in known, f"{page.name}: lategrad {command}"
        options = {option for parameter in known[command].params for option in parameter.opts}
        unknown = [word for word in words if word.startswith("--") and word not in options]
        assert not unknown, f"{page.name}: lategrad {command} has no {unknown}"
