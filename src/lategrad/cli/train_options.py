"""The options of :class:`~lategrad.serve.Settings` as those of a command: names, types, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from functools import wraps
from typing import Annotated, Any, Optional, get_type_hints

import typer

from lategrad.serve.settings import KEPT, Settings, options

_ELSEWHERE = ("notes", "on_record")  # which the command line writes itself, or cannot
_STEPS = 2000  # in Python there is no default: nobody should get another number of updates than he thinks

Options = dict[str, inspect.Parameter]


def _parameter(name: str, default: Any, help: str, kind: Any) -> inspect.Parameter:
    option = typer.Option(help=help[0].upper() + help[1:])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _parameters(left_out: Sequence[str], *, only_changes: bool) -> Options:
    types = get_type_hints(Settings)
    made = {}
    for option in options():
        if option.name in (*_ELSEWHERE, *left_out):
            continue
        kind = option.metadata["command_line"] or types[option.name]
        default = _STEPS if option.default is MISSING else option.default
        if only_changes:
            default = None
        elif kind is str and default is not None:
            default = str(default)
        if default is None:
            kind = Optional[kind]  # noqa: UP045 - of a type that is a value
        made[option.name] = _parameter(option.name, default, option.metadata["help"], kind)
    return made


TRAIN_OPTIONS = _parameters((), only_changes=False)
RESUME_OPTIONS = _parameters(KEPT, only_changes=True)
"""What may be changed when a run goes on."""
NORM_OPTIONS = {name: TRAIN_OPTIONS[name] for name in ("clip", "max_norm_ratio")}
"""What a simulation can do with long gradients, by the same code."""


def with_options(made: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes these options as its keywords, ready for :class:`~lategrad.serve.Settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]

        @wraps(command)
        def run(**given: Any) -> None:
            if given.get("slow") is not None:
                given["slow"] = pauses(given["slow"])
            command(**given)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *made.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def pauses(specs: Sequence[str]) -> str | dict[int, str] | None:
    """``constant:5`` for everyone, or ``2=constant:100`` for single workers."""
    if not specs:
        return None
    pairs = [spec.partition("=") for spec in specs]
    named = [worker.isdecimal() for worker, _, _ in pairs]
    if len(specs) == 1 and not named[0]:
        return specs[0]
    if not all(named):
        raise ValueError(f"--slow takes one law for all workers, or WORKER=LAW for each of some, got {' '.join(specs)}")
    return {int(worker): law for worker, _, law in pairs}
