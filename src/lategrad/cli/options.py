"""Options that several commands have, each described once."""

from __future__ import annotations

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
