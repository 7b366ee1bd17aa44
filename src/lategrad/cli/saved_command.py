"""The options that a training was started with, which its folder keeps, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lategrad.cli.build import PROBLEMS, problem_from, rules_from, set_from
from lategrad.problems import LocalSteps, Problem
from lategrad.registry import RULES
from lategrad.rules.rule import AnyRule
from lategrad.support.options import own_target
from lategrad.support.validation import did_you_mean

INNER = "adamw:lr=0.001"
"""The optimizer of local steps."""


def command_of(notes: dict[str, Any], where: Path) -> dict[str, Any]:
    """The options that a training was started with."""
    if "command" not in notes:
        raise ValueError(f"{str(where)!r} was not made by `lategrad train`: use lategrad.resume or lategrad.replay "
                         "in Python, where problem and rule are at hand")  # fmt: skip
    command: dict[str, Any] = notes["command"]
    return command


def problem_of(command: dict[str, Any]) -> Problem:
    """The problem that these options name."""
    problem = problem_from(*(command[name] for name in ("problem", "model", "preprocess", "batch", "sampling", "l2")))
    return _with_local_steps(problem, **command["local"]) if "local" in command else problem


def _with_local_steps(
    problem: Problem, steps: int | None, inner: str | None, scaled: bool, seconds: float | None
) -> Problem:
    """The problem of a command line, with local steps if it asks for them."""
    if steps is None:
        if (inner, scaled, seconds) != (None, False, None):
            raise ValueError(
                "--inner, --scaled and --local-seconds are for workers that take --local-steps, such as 50"
            )
        return problem
    name = (inner or INNER).partition(":")[0]
    if name not in RULES:  # the run's folder names it, and must not name code
        raise ValueError(f"--inner must be a rule of `lategrad list`, got {name!r}{did_you_mean(name, RULES)}; in "
                         "Python any rule will do")  # fmt: skip
    return LocalSteps(problem, steps, inner or INNER, scaled, seconds)


def rule_of(command: dict[str, Any]) -> AnyRule[Any]:
    """The rule that these options name."""
    (spec,) = rules_from([command["rule"]], [] if command["lr"] is None else [command["lr"]]).values()
    if spec.swept:
        raise ValueError(f"--rule {command['rule']}: a training has one value of {spec.swept[0]}; simulate sweeps")
    return spec.build(set_from(command["domain"]))


def from_anywhere(text: str) -> str:
    """A data file or a file of code by its full path, so that a run can be resumed from another folder."""
    if Path(text).is_file():
        return str(Path(text).resolve())
    module, colon, rest = text.partition(":")
    return f"{Path(module).resolve()}{colon}{rest}" if module.endswith(".py") else text


def confirm_own_code(command: dict[str, Any], **given: str | None) -> None:
    """A run's folder may name code of the user's own; it is executed only if the user names it, too."""
    known = {"rule": tuple(RULES), "problem": tuple(PROBLEMS)}
    for option, again in given.items():
        noted = command[option]
        is_own = noted.partition(":")[0] not in known[option] and not Path(noted).is_file() and own_target(noted)
        if is_own and from_anywhere(again or "") != noted:
            raise ValueError(f"the run used code of your own: name it again, --{option} {noted}")
