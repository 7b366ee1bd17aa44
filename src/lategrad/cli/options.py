"""Options that several commands have, each described once, and how lists are written."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from lategrad.cli.build import INNER
from lategrad.problems.data import PREPROCESSING
from lategrad.problems.linear import MODELS

_PREPROCESSING_HELP = "; ".join(f"{name} ({meaning})" for name, meaning in PREPROCESSING.items())
ProblemName = Annotated[
    str, typer.Option(help="digits, fashion-mnist, quadratic, a data file, or your own module:NAME or file.py:NAME.")
]
ModelName = Annotated[str, typer.Option(help=f"What is fitted to the data: {', '.join(MODELS)}.")]
Preprocessing = Annotated[
    str | None,
    typer.Option(help=f"{_PREPROCESSING_HELP}; by default standardise for files, standardise-globally for the images."),
]
Batch = Annotated[int, typer.Option(help="Rows in a minibatch.")]
Sampling = Annotated[str, typer.Option(help="How minibatches are drawn: iid (as in the paper) or epochs.")]
Penalty = Annotated[float, typer.Option(help="Quadratic penalty, which makes the problem strongly convex.")]
Domain = Annotated[str, typer.Option(help="Constraint set such as ball:5; by default none.")]
Steps = Annotated[int, typer.Option(help="Server updates.")]
RecordEvery = Annotated[int | None, typer.Option(help="Updates between records; by default ten records.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
LocalStepCount = Annotated[
    int | None, typer.Option(help="Local steps that a worker takes in each job, such as 50; it sends their sum.")
]
Inner = Annotated[str | None, typer.Option(help=f"Optimizer of the local steps, a rule; by default {INNER}.")]
Scaled = Annotated[
    bool, typer.Option("--scaled", help="Divide the sum of the local steps by their number and the inner lr.")
]
RuleHelp = (
    "such as steady or anytime-sgd:lr=1,power=2 (see `lategrad list`), or your own module:Class or file.py:Class."
)


def spread_values(arguments: Sequence[str], lists: Collection[str]) -> list[str]:
    """Rewrite lists, ``--lr 0.1 0.3``, as ``--lr 0.1 --lr 0.3``, which the parser understands.

    All options that take several values are written this way. An option that takes one value and is given twice is an
    error: the parser would keep the last one. So is an empty value, which would be a path to the current folder.

    >>> spread_values(["simulate", "--lr", "0.1", "-0.3", "--steps", "5"], lists={"--lr"})
    ['simulate', '--lr', '0.1', '--lr', '-0.3', '--steps', '5']
    """
    spread: list[str] = []
    seen: set[str] = set()
    option, count = "", 0
    for argument in arguments:
        if any(int(number) >= 2**63 for number in re.findall(r"\b\d{19,}\b", argument)):
            raise ValueError(f"{option or 'an argument'} must have numbers below 2^63, got {argument}")
        if re.match(r"-(?![.\d])", argument):  # an option, and not a negative number
            option, equals, value = argument.partition("=")
            count = len(equals)
            if equals and not value:
                raise ValueError(f"{option} must not be empty")
            if option in seen and option not in lists:
                raise ValueError(f"{option} is given twice: it takes one value")
            seen.add(option)
        else:
            if not argument:
                raise ValueError(f"{option or 'an argument'} must not be empty")
            if option in lists and count > 0:
                spread.append(option)
            count += 1
        spread.append(argument)
    return spread
