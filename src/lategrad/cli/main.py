"""The command line: one file of :mod:`lategrad.cli` for each command."""

import re
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from lategrad import __version__

COMMANDS = {
    "tolerance": ("tolerance:tolerance", "Run your training at every delay, and report what each one costs."),
    "list": ("listing:list_everything", "List all rules, learners, sets, problems and delays, a line each."),
    "simulate": ("simulate:simulate", "Simulate rules under delays, all combinations at once."),
    "train": ("train:train", "Train with asynchronous worker processes on this machine."),
    "resume": ("train:resume", "Continue an interrupted run from its last checkpoint."),
    "replay": ("replay:replay", "Simulate a rule on the delays and samples of a recorded run."),
    "export": ("export:export", "Write the weights of a run as named tensors."),
}
"""Function and summary of each command. Only the one that is called is imported: torch takes a second."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises for wrong options: an exception of the click that it comes with, or of the installed one."""


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lategrad {__version__}")
        raise typer.Exit


def _about(version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True,
                                                 help="Print the version and exit.")] = False) -> None:  # fmt: skip
    """Options of the program itself."""


def program(command: str) -> Any:
    """The program with one of its commands; of the others it has names and summaries."""
    about = "Train from late gradients: compare server rules under unknown, changing delays."
    app = typer.Typer(name="lategrad", help=about, add_completion=False, rich_markup_mode="markdown",
                      no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    app.callback()(_about)
    for name, (target, summary) in COMMANDS.items():
        module, _, function = target.partition(":")
        run = getattr(import_module(f"lategrad.cli.{module}"), function) if name == command else lambda: None
        app.command(name, help=None if name == command else summary)(run)
    return typer.main.get_command(app)


def _parameters(command: str) -> list[Any]:
    found = program(command).commands.get(command)
    return [parameter for parameter in found.params if hasattr(parameter, "multiple")] if found else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's error is one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
        sys.exit(_run(arguments))


def _run(arguments: Sequence[str]) -> Any:
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        lists = {name for parameter in _parameters(command) if parameter.multiple for name in parameter.opts}
        return program(command)(spread_values(arguments, lists), standalone_mode=False)
    except UsageError as error:
        if message := error.format_message():  # type: ignore[attr-defined]
            typer.echo(f"error: {message}", err=True)  # without a message the help has been printed
        return 2
    except (KeyboardInterrupt, typer.Abort):  # before the errors of torch, whose import it may have interrupted
        return 130
    except _user_errors() as error:
        typer.echo(f"error: {_with_option_name(str(error), command)}", err=True)
        return 2
    except Exception as error:
        if (message := _of_own_code(error)) is None and "can't allocate memory" not in str(error):
            raise
        typer.echo(f"error: {message or str(error).partition(': ')[2].partition(chr(10))[0]}", err=True)
        return 2


def _of_own_code(error: Exception) -> str | None:
    """The line of the user's own code, which may raise anything, that an error comes from; None if there is none.

    Of an error in another process its traceback has the text alone.
    """
    from lategrad.tolerance_study.code_identity import is_own_file

    places = re.findall(r'File "(.+)", line (\d+), in (.+)', "".join(traceback.format_exception(error)))
    own = [place for place in places if Path(place[0]).is_file() and is_own_file(place[0])]
    message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"{own[-1][0]}, line {own[-1][1]}, in {own[-1][2]}: {message}" if own else None


def _user_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError
    from torch import OutOfMemoryError

    from lategrad.serve import TrainingError

    return ValueError, OSError, MemoryError, OutOfMemoryError, TrainingError, ImportError, SafetensorError


def _with_option_name(message: str, command: str) -> str:
    """``steps must be ...`` as ``--steps must be ...``, where the command has that option."""
    if found := re.match(r"(\w+) must be ", message):
        other_names = {"preprocessing": "preprocess", "name": "problem", "delays": "delay"}
        option = "--" + other_names.get(found[1], found[1]).replace("_", "-")
        if any(option in parameter.opts for parameter in _parameters(command)):
            return f"{option}{message.removeprefix(found[1])}"
    return message


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
