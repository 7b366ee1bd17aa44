"""``lategrad list``: all names."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lategrad.cli.build import PROBLEMS
from lategrad.delays.specs import DELAYS
from lategrad.problems.data import PREPROCESSING
from lategrad.problems.linear import MODELS
from lategrad.registry import LEARNERS, RULES, SETS
from lategrad.support.options import Entry

MODEL_SUMMARIES = {
    "softmax": "softmax regression, for any number of classes",
    "least-squares": "least squares, for numbers or for classes",
    "svm": "support vector machine with a smoothed hinge, for two classes",
}


def list_everything() -> None:
    """List all rules, learners, sets, problems and delays, a line each."""
    console = Console()
    tables: dict[str, dict[str, tuple[str, ...]]] = {
        "rules (--rule NAME:OPTION=VALUE,...; several values as lr=0.1|1|10)": _with_options(RULES),
        "learners inside anytime rules": _with_options(LEARNERS),
        "constraint sets (--domain)": {entry.form: (entry.summary,) for entry in SETS.values()},
        "problems (--problem)": {name: (summary,) for name, summary in PROBLEMS.items()},
        "models (--model)": {name: (MODEL_SUMMARIES[name],) for name in MODELS},
        "preprocessing (--preprocess)": {name: (meaning,) for name, meaning in PREPROCESSING.items()},
        "delays (--delay)": {entry.form: (entry.summary,) for entry in DELAYS.values()},
    }
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for name, cells in rows.items():
            table.add_row("  " + name, *cells)
        console.print(table)


def _with_options(entries: Mapping[str, Entry[Any]]) -> dict[str, tuple[str, ...]]:
    return {name: (", ".join(map(str, entry.options.values())), entry.summary) for name, entry in entries.items()}
