"""``lategrad tolerance``: how much delay does a training script tolerate?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from lategrad.cli.options import Drift, Seeds
from lategrad.support.options import load_object, own_target
from lategrad.tolerance_study import tolerance as run_study
from lategrad.tolerance_study.study import DELAYS

_DELAYS = list(DELAYS)
_DELAY_HELP = "Delays of the gradients, in updates; several may follow."
_OPTIMIZER_HELP = "NAME=MODULE:FUNCTION to compare with: from parameters to an optimizer; several may follow."


def tolerance(
    train: Annotated[str, typer.Argument(help="MODULE:FUNCTION or FILE.py:FUNCTION, a function of wrap.")],
    delay: Annotated[list[int], typer.Option(help=_DELAY_HELP)] = _DELAYS,
    optimizer: Annotated[list[str] | None, typer.Option(help=_OPTIMIZER_HELP)] = None, seeds: Seeds = 2,
    profile: Annotated[str | None, typer.Option(help="stages:8 for the delays of a pipeline of 8 stages.")] = None,
    better: Annotated[str, typer.Option(help="lower or higher numbers.")] = "lower",
    cost: Annotated[float, typer.Option(help="Acceptable loss, as a share of the number without delay.")] = 0.05,
    workers: Annotated[str, typer.Option(help="Runs in parallel; auto for as many as fit.")] = "1",
    drift: Drift = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the page, the picture, the tables and the runs.")] = None,
) -> None:  # fmt: skip
    """Run your training at every delay, and report what each one costs.

    Example:

        lategrad tolerance my_script:train --delay 0 1 2 4 8 16 --out tol

    The function calls `optimizer = wrap(optimizer)` once, trains, and returns a number, or yields it over time. With
    --out finished runs are kept: the same command continues an interrupted study.
    """
    named = [text.partition("=") for text in optimizer or []]
    for name, _, target in named:
        if not target:
            raise ValueError(f"--optimizer must be NAME=MODULE:FUNCTION, got {name!r}")
    optimizers = {name: _load_function(target) for name, _, target in named}
    if len(optimizers) < len(named):
        raise ValueError(f"--optimizer names one twice: {' '.join(name for name, _, _ in named)}")
    result = run_study(_load_function(train), delay, optimizers, seeds, profile=profile, better=better, cost=cost,
                       workers=int(workers) if workers.isdecimal() else workers, out=out, drift=drift)  # fmt: skip
    typer.echo(result.table())
    if out is not None:
        result.to_html(out / "tolerance.html")
        result.plot(out / "tolerance.png")
        result.to_csv(out / "tolerance.csv")
        result.to_json(out / "tolerance.json")
        typer.echo(f"written to {out}: tolerance.html, tolerance.png, tolerance.csv, tolerance.json, runs")


def _load_function(target: str) -> Any:
    module, name, options = own_target(target) or ("", "", "")
    if not module or options:
        raise ValueError(f"a function must be MODULE:FUNCTION or FILE.py:FUNCTION, got {target!r}")
    function = load_object(module, name)
    if not callable(function):
        raise ValueError(f"{name!r} of {module!r} must be a function, got {function!r}")
    return function
