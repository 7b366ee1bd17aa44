"""``lategrad tolerance``: what delay can the training in a script of one's own stand?"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lategrad.tolerance_study import tolerance as run_study
from lategrad.tolerance_study.study import DELAYS


def tolerance(
    train: Annotated[str, typer.Argument(help="MODULE:FUNCTION or FILE.py:FUNCTION, a function of wrap.")],
    delays: Annotated[str, typer.Option(help="How late gradients are, in updates.")] = ",".join(map(str, DELAYS)),
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=MODULE:FUNCTION to compare with: from parameters to an optimizer; several may follow."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many: 0, 1, ...")] = 2,
    profile: Annotated[str | None, typer.Option(help="stages:8 for the delays of a pipeline of 8 stages.")] = None,
    better: Annotated[str, typer.Option(help="lower or higher numbers.")] = "lower",
    cost: Annotated[float, typer.Option(help="What may be lost, as a share of the number without delay.")] = 0.05,
    workers: Annotated[str, typer.Option(help="Runs side by side; auto for as many as fit.")] = "1",
    out: Annotated[Path | None, typer.Option(help="Folder for the page, the picture, the tables and the runs.")] = None,
) -> None:
    """Run a training of your own at every delay, and say what each one costs.

    Example:

        lategrad tolerance my_script:train --delays 0,1,2,4,8,16 --out tol

    The function calls `optimizer = wrap(optimizer)` once, trains, and returns a number, or yields it over time. With
    --out finished runs are kept: the same command goes on where it was broken off.
    """
    named = [text.partition("=") for text in optimizer or []]
    for name, _, target in named:
        if not target:
            raise ValueError(f"--optimizer must be NAME=MODULE:FUNCTION, got {name!r}")
    result = run_study(
        load_function(train),
        _numbers(delays),
        {name: load_function(target) for name, _, target in named},
        seeds,
        profile=profile,
        better=better,
        cost=cost,
        workers=int(workers) if workers.isdecimal() else workers,
        out=out,
    )
    typer.echo(result.table())
    if out is not None:
        result.to_html(out / "tolerance.html")
        result.plot(out / "tolerance.png")
        result.to_csv(out / "tolerance.csv")
        result.to_json(out / "tolerance.json")
        typer.echo(f"written to {out}: tolerance.html, tolerance.png, tolerance.csv, tolerance.json, runs")


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--delays must be integers >= 0 with commas between, such as 0,1,2,4, got {text!r}")
    return tuple(int(part) for part in parts)


def load_function(target: str) -> Any:
    """The function that ``module:function`` or ``path/to/file.py:function`` names."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ValueError(f"a function must be MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    folder = os.getcwd()
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise FileNotFoundError(f"no file {where!r}")
        folder, where = str(path.resolve().parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)  # also found by the processes of --workers, which inherit the path
    module = importlib.import_module(where)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{where!r} has no function {name!r}")
    return getattr(module, name)
