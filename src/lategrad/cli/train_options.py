"""The arguments of :func:`lategrad.train` as options of a command: names, types, defaults and help texts."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from lategrad.serve.training import resume, train

_PYTHON_ONLY = ("problem", "rule", "notes", "on_record")
_TYPES = {"workers": str, "slow": list[str], "log": list[str], "schedule": str, "device": str, "server_device": str,
          "out": Path}  # fmt: skip
"""Types on the command line, where they differ from those in Python."""
_STEPS = 2000  # the default on the command line; in Python there is none

Options = dict[str, inspect.Parameter]


def argument_help(function: Callable[..., Any]) -> dict[str, str]:
    """The text of each argument in the ``Args`` section of a docstring."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = (entry.partition(": ") for entry in re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)[1:])
    return {name: " ".join(text.split()) for name, _, text in entries}


def _options(*, only_changes: bool) -> Options:
    """Those of ``train``, or those that ``resume`` can change, with None for what stays as it was."""
    texts, options = argument_help(train), {}
    left_out = {*_PYTHON_ONLY, "out"} if only_changes else {*_PYTHON_ONLY}
    available = inspect.signature(resume if only_changes else train).parameters
    for name, parameter in inspect.signature(train, eval_str=True).parameters.items():
        if name in left_out or name not in available:
            continue
        kind, default = _TYPES.get(name, parameter.annotation), parameter.default
        if only_changes:
            default = None
        elif default is parameter.empty:
            default = _STEPS
        elif kind is str and default is not None:
            default = str(default)
        if default is None:
            kind = Optional[kind]  # noqa: UP045 - of a type that is a value
        text = texts.get(name, "")
        option = typer.Option(help=text[:1].upper() + text[1:])
        options[name] = parameter.replace(default=default, annotation=Annotated[kind, option])
    return options


TRAIN_OPTIONS = _options(only_changes=False)
RESUME_OPTIONS = _options(only_changes=True)
NORM_OPTIONS = {name: TRAIN_OPTIONS[name] for name in ("clip", "max_norm_ratio")}
"""What a simulation does with long gradients, by the same code."""


def with_options(options: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options; it receives them as keyword arguments for ``train`` or ``resume``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]

        @wraps(command)
        def run(**arguments: Any) -> None:
            if arguments.get("slow") is not None:
                arguments["slow"] = parse_slow(arguments["slow"])
            if arguments.get("log") is not None:
                arguments["log"] = ",".join(arguments["log"]) or None
            command(**arguments)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *options.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def parse_slow(specs: Sequence[str]) -> str | dict[int, str] | None:
    """``constant:5`` for all workers, or ``2=constant:100`` for single ones."""
    pairs = [spec.partition("=") for spec in specs]
    if len(pairs) == 1 and not pairs[0][0].isdecimal():
        return specs[0]
    if not all(worker.isdecimal() for worker, _, _ in pairs):
        raise ValueError("--slow takes one distribution for all workers, or WORKER=DISTRIBUTION for each of some, got "
                         f"{' '.join(specs)}")  # fmt: skip
    by_worker = {int(worker): distribution for worker, _, distribution in pairs}
    if len(by_worker) < len(pairs):
        raise ValueError(f"--slow names a worker twice: {' '.join(specs)}")
    return by_worker or None
