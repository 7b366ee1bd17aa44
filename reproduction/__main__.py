"""``python -m reproduction``: the paper's figures and theorems, and a report that judges each claim."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lategrad.cli.options import Device
from reproduction.reproduce import NAMES as PARTS
from reproduction.reproduce import reproduce as run_reproduction


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}, or all but local and local-real.")] = "all",
    scale: Annotated[
        str, typer.Option(help="quick (ten minutes on two cores), paper (under an hour on two cores), full (GPU).")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for report.html, figures and CSV files.")] = Path("out"),
    device: Device = "cpu",
    models: Annotated[str, typer.Option(help="Limit deep, local or local-real to some models: mlp,cnn,gpt.")] = "",
    rules: Annotated[str, typer.Option(help="Limit deep, local or local-real to some rules: adamw,muon,...")] = "",
) -> None:
    """Reproduce the paper's figures and theorems, compare all baselines, and write a report that judges each claim.

    An interrupted run goes on where it stopped: what is finished is kept under OUT/traces. On a CPU every core gets
    work of its own. Beyond the quick scale the deep models and the baselines on Fashion-MNIST would take hours there:
    `all` leaves them out, and says so.
    """
    begin = time.monotonic()

    def say(line: str) -> None:
        typer.echo(f"[{time.monotonic() - begin:6.0f} s] {line}", err=True)

    report, sections = run_reproduction(
        what, scale, out, device=device, models=[name for name in models.split(",") if name],
        rules=[name for name in rules.split(",") if name], say=say,
    )  # fmt: skip
    table = Table(header_style="bold")
    for column in ("claim", "measured", "reproduced"):
        table.add_column(column)
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    for verdict in verdicts:
        outcome = {True: "[green]yes[/]", False: "[red]no[/]", None: "not judged"}[verdict.reproduced]
        table.add_row(verdict.claim, verdict.measured, outcome)
    if verdicts:
        Console().print(table)
    typer.echo(f"report: {report}")


if __name__ == "__main__":
    typer.run(reproduce)
