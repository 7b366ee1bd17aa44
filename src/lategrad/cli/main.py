"""The command line: one file of :mod:`lategrad.cli` for each command."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer

from lategrad import __version__
from lategrad.cli.export import export
from lategrad.cli.listing import list_everything
from lategrad.cli.options import spread_values
from lategrad.cli.replay import replay
from lategrad.cli.simulate import simulate
from lategrad.cli.tolerance import tolerance
from lategrad.cli.train import resume, train
from lategrad.serve import TrainingError

app = typer.Typer(
    name="lategrad",
    help="Train from late gradients: compare server rules under unknown, changing delays.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises for wrong options: an exception of the click that it comes with, or of the installed one."""

app.command()(tolerance)
app.command("list")(list_everything)
for command in (simulate, train, resume, replay, export):
    app.command()(command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lategrad {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def _parameters(arguments: Sequence[str]) -> list[Any]:
    """The options and arguments of the command that is called."""
    command = typer.main.get_command(app).commands.get(next(iter(arguments), ""))  # type: ignore[attr-defined]
    return [parameter for parameter in command.params if hasattr(parameter, "multiple")] if command else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
        sys.exit(_run(arguments))


def _run(arguments: Sequence[str]) -> Any:
    try:
        lists = {name for parameter in _parameters(arguments) if parameter.multiple for name in parameter.opts}
        return app(spread_values(arguments, lists), standalone_mode=False)
    except _UsageError as error:
        if message := error.format_message():  # type: ignore[attr-defined]
            typer.echo(f"error: {message}", err=True)  # without a message the help has been printed
        return 2
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError, TrainingError, ImportError) as error:
        typer.echo(f"error: {_with_option_name(str(error), arguments)}", err=True)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _with_option_name(message: str, arguments: Sequence[str]) -> str:
    """``steps must be ...`` as ``--steps must be ...``, where the command has that option."""
    if found := re.match(r"(\w+) must be ", message):
        other_names = {"preprocessing": "preprocess", "name": "problem", "delays": "delay"}
        option = "--" + other_names.get(found[1], found[1]).replace("_", "-")
        if any(option in parameter.opts for parameter in _parameters(arguments)):
            return f"{option}{message.removeprefix(found[1])}"
    return message
