"""``python -m reproduction``: the paper's figures and theorems, and a report that judges each claim."""

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from lategrad.cli.main import UsageError, spread_values
from lategrad.cli.options import Device
from lategrad.serve import TrainingError
from reproduction.report import Section
from reproduction.reproduce import NAMES, reproduce

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PART]...", help=f"{', '.join(NAMES)}; by default all but local and local-real."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="quick (ten minutes on two cores), paper (an hour on two cores, or a GPU), full (GPU).")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for report.html, figures and CSV files.")] = Path("out"),
    device: Device = "cpu",
    models: Annotated[
        list[str] | None, typer.Option(help="Limit deep, local or local-real to some models, such as mlp cnn.")
    ] = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="Limit deep, local or local-real to some rules, such as adamw muon.")
    ] = None,
    data: Annotated[str, typer.Option(metavar="FILE", help="fig1 on your own .npz, .csv or LIBSVM file.")] = "",
    delays: Annotated[
        list[str] | None, typer.Option(help="fig1 under your own constant delays, such as 10 100.")
    ] = None,
    updates: Annotated[int, typer.Option(help="fig1 with your own number of updates.")] = 0,
) -> None:
    """Reproduce the paper's figures and theorems, compare all baselines, and write a report that judges each claim.

    An interrupted run continues where it stopped: what is finished is kept under OUT/traces. On a CPU every core works
    on pieces of its own. Beyond the quick scale the deep models and the baselines on Fashion-MNIST would take hours
    there: `all` leaves them out, and says so.
    """
    begin = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"[{time.monotonic() - begin:6.0f} s] {line}", err=True)

    try:
        report, sections = reproduce(
            parts or [], scale, out, device=device, models=models or [], rules=rules or [], data=data,
            delays=delays or [], updates=updates, say=say,
        )  # fmt: skip
    except (ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError, TrainingError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: what is finished is kept, and the same command continues from there", err=True)
        raise typer.Exit(130) from None
    _print_verdicts(sections)
    typer.echo(f"report: {report}")


def _print_verdicts(sections: list[Section]) -> None:
    table = Table("claim", "claimed by", "measured", "holds", header_style="bold")
    for section in sections:
        for verdict in section.verdicts:
            colour = {True: "green", False: "red", None: "default"}[verdict.holds]
            table.add_row(verdict.claim, verdict.source, verdict.measured, f"[{colour}]{verdict.outcome}[/]")
    if table.row_count:
        Console().print(table)


if __name__ == "__main__":
    try:
        sys.argv[1:] = spread_values(sys.argv[1:], lists={"--models", "--rules", "--delays"})
        sys.exit(app(standalone_mode=False))
    except (ValueError, UsageError) as error:
        message = error.format_message() if isinstance(error, UsageError) else error  # type: ignore[attr-defined]
        typer.echo(f"error: {message}", err=True)
        sys.exit(2)
