"""Options that several commands have, each described once."""

from pathlib import Path
from typing import Annotated

import typer

from lategrad.cli.build import INNER
from lategrad.problems.data import PREPROCESSING
from lategrad.problems.linear import MODELS
from lategrad.support.validation import require


def _check_seeds(seeds: int) -> int:
    require("--seeds", seeds, 1 <= seeds <= 100_000, "an integer >= 1 and <= 100000")  # more is almost certainly a typo
    return seeds


_PREPROCESSING = "; ".join(f"{name} ({meaning})" for name, meaning in PREPROCESSING.items())
_PREPROCESSING_HELP = f"{_PREPROCESSING}; by default standardise for files, standardise-globally for the images."
_PROBLEM_HELP = "digits, fashion-mnist, quadratic, a data file, or your own module:NAME or file.py:NAME."
ProblemName = Annotated[str, typer.Option(help=_PROBLEM_HELP)]
ModelName = Annotated[str, typer.Option(help=f"What is fitted to the data: {', '.join(MODELS)}.")]
Preprocessing = Annotated[str | None, typer.Option(help=_PREPROCESSING_HELP)]
Batch = Annotated[int, typer.Option(help="Rows in a minibatch.")]
Sampling = Annotated[str, typer.Option(help="How minibatches are drawn: iid (as in the paper) or epochs.")]
Penalty = Annotated[float, typer.Option(help="Quadratic penalty, which makes the problem strongly convex.")]
Domain = Annotated[str, typer.Option(help="Constraint set such as ball:5; by default none.")]
Steps = Annotated[int, typer.Option(help="Server updates.")]
RecordEvery = Annotated[int | None, typer.Option(help="Updates between records; by default ten records.")]
Seeds = Annotated[int, typer.Option(callback=_check_seeds, help="Number of seeds; they are 0, 1, ...")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
_LOCAL_HELP = "Local steps that a worker takes in each job, such as 50; it sends their sum."
LocalStepCount = Annotated[int | None, typer.Option(help=_LOCAL_HELP)]
Inner = Annotated[str | None, typer.Option(help=f"Optimizer of the local steps, a rule; by default {INNER}.")]
_SCALED_HELP = "Divide the sum of the local steps by their number and the inner lr."
Scaled = Annotated[bool, typer.Option("--scaled", help=_SCALED_HELP)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace results that are in OUT already.")]
OwnProblem = Annotated[str | None, typer.Option(help="The run's problem, only if it is your own code.")]
RunFolder = Annotated[Path, typer.Argument(help="The run's folder: --out of train.")]
Drift = Annotated[bool, typer.Option("--drift", help="Measure how far the query moves during each delay.")]
RuleHelp = (
    "such as steady or anytime-sgd:lr=1,power=2 (see `lategrad list`), or your own module:Class or file.py:Class."
)
