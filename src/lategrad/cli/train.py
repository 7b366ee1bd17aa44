"""``lategrad train`` and ``lategrad resume``, and the command that a run's folder keeps for them."""

import shlex
import warnings
from pathlib import Path
from signal import SIGHUP, SIGTERM
from types import NoneType
from typing import Annotated, Any

import typer

from lategrad.cli import options
from lategrad.cli.build import is_own_code, is_own_problem, problem_from, rules_from, set_from, with_local_steps
from lategrad.cli.train_options import RESUME_OPTIONS, TRAIN_OPTIONS, with_options
from lategrad.problems import Problem
from lategrad.registry import RULES
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.checkpoint import DamagedError
from lategrad.serve.signals import STOP_REASONS
from lategrad.serve.training import resume_from
from lategrad.serve.training import train as run_training
from lategrad.support.validation import did_you_mean, require_form
from lategrad.trace import Trace

_TEMPORARY_FAILURE = 75  # EX_TEMPFAIL: a batch system stopped the run; `lategrad resume` continues it
_LR_HELP = "Learning rate of a rule that has an lr, by default its own or 0.1."
_SECONDS_HELP = "Take only as many local steps in a job as fit into this number of seconds."


@with_options(TRAIN_OPTIONS)
def train(
    problem: options.ProblemName = "digits", model: options.ModelName = "softmax",
    preprocess: options.Preprocessing = None, batch: options.Batch = 64, sampling: options.Sampling = "iid",
    l2: options.Penalty = 0.0,
    rule: Annotated[str, typer.Option(help=f"Server rule, {options.RuleHelp}")] = "anytime-sgd",
    lr: Annotated[float | None, typer.Option(help=_LR_HELP)] = None,
    domain: options.Domain = "whole", local_steps: options.LocalStepCount = None, inner: options.Inner = None,
    scaled: options.Scaled = False, local_seconds: Annotated[float | None, typer.Option(help=_SECONDS_HELP)] = None,
    **settings: Any,
) -> None:  # fmt: skip
    """Train with asynchronous worker processes on this machine.

    Example:

        lategrad train --problem fashion-mnist --rule steady --lr 1 --workers 4 --steps 20000
        --slow 0=constant:100 --out runs/night

    Ctrl-C or SIGTERM leaves a checkpoint; `lategrad resume runs/night` continues from it. `lategrad replay
    runs/night --rule sgd --lr 0.1` shows what another rule would have done with the same delays and samples.

    With --local-steps the rule is the outer optimizer of workers that take local steps:

        lategrad train --problem fashion-mnist --local-steps 50 --inner adamw:lr=0.001 --rule nesterov --workers 4
    """
    local = {"local_steps": local_steps, "inner": inner, "scaled": scaled, "seconds": local_seconds}
    command = {"problem": absolute(problem), "model": model, "preprocess": preprocess, "batch": batch,
               "sampling": sampling, "l2": l2, "rule": absolute(rule), "lr": lr, "domain": domain,
               "local": local}  # fmt: skip
    trace = run_training(build_problem(command), _build_rule(command), **settings, notes={"command": command})
    _print_summary(trace, settings["out"])


@with_options(RESUME_OPTIONS)
def resume(
    folder: options.RunFolder,
    rule: Annotated[str | None, typer.Option(help="The run's rule, only if it is your own code.")] = None,
    problem: options.OwnProblem = None, **settings: Any,
) -> None:  # fmt: skip
    """Continue an interrupted run from its last checkpoint.

    Options that are not given stay as they were.
    """

    def build(saved: dict[str, Any]) -> tuple[Problem, AnyRule[Any]]:
        command = saved_command(saved, folder)
        confirm_own_code(command, rule=rule, problem=problem)
        return build_problem(command), _build_rule(command)

    trace = resume_from(folder, build, {name: value for name, value in settings.items() if value is not None})
    _print_summary(trace, folder)


_LOCAL = {"local_steps": (int, NoneType), "inner": (str, NoneType), "scaled": bool, "seconds": (int, float, NoneType)}
_COMMAND = {"problem": str, "model": str, "preprocess": (str, NoneType), "batch": int, "sampling": str,
            "l2": (int, float), "rule": str, "lr": (int, float, NoneType), "domain": str, "local": _LOCAL}  # fmt: skip


def saved_command(settings: Any, folder: Path) -> dict[str, Any]:
    """The command that a run was started with, which its folder keeps."""
    notes = settings.get("notes") if isinstance(settings, dict) else None
    if not isinstance(notes, dict) or "command" not in notes:
        raise ValueError(f"{str(folder)!r} was not made by `lategrad train`: use lategrad.resume or lategrad.replay "
                         "in Python, with its problem and rule")  # fmt: skip
    try:
        require_form("the command", notes["command"], _COMMAND)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{str(folder)!r} is damaged: {error}") from None
    return dict(notes["command"])


def build_problem(command: dict[str, Any]) -> Problem:
    problem = problem_from(*(command[name] for name in ("problem", "model", "preprocess", "batch", "sampling", "l2")))
    local = command["local"]
    name = (local["inner"] or "").partition(":")[0]
    if local["local_steps"] is not None and name and name not in RULES:  # a run's folder must not name code
        raise ValueError(f"--inner must be a rule of `lategrad list`, got {name!r}{did_you_mean(name, RULES)}; in "
                         "Python any rule can be used")  # fmt: skip
    return with_local_steps(problem, **local, names="--inner, --scaled and --local-seconds")


def _build_rule(command: dict[str, Any]) -> AnyRule[Any]:
    (spec,) = rules_from([command["rule"]], [] if command["lr"] is None else [command["lr"]]).values()
    if spec.swept:
        raise ValueError(f"--rule {command['rule']}: a training has one value of {spec.swept[0]}; simulate sweeps")
    return spec.build(set_from(command["domain"]))


def absolute(text: str) -> str:
    """A data file or a file of code by its absolute path, so that a run can be resumed from another folder."""
    if Path(text).is_file():
        return str(Path(text).resolve())
    module, colon, rest = text.partition(":")
    return f"{Path(module).resolve()}{colon}{rest}" if module.endswith(".py") else text


def confirm_own_code(command: dict[str, Any], **names: str | None) -> None:
    """Execute the user's own code that a run's folder names only if the user names it again."""
    for option, name in names.items():
        saved = command[option]
        shown = shlex.quote(repr(saved)[1:-1])  # it may be pasted, and be of a stranger's choosing
        is_own = is_own_problem(saved) if option == "problem" else is_own_code(saved, RULES)
        if is_own and absolute(name or "") != saved:
            raise ValueError(f"the run used code of your own: name it again, --{option} {shown}")
        if name is not None and absolute(name) != saved:
            raise ValueError(f"--{option} must be the run's, {shown}, or be left out, got {name}")


def _print_summary(trace: Trace, out: Path | None) -> None:
    delays = ""
    if len(trace.delays):
        summary = trace.delay_summary()
        delays = f", delay mean {summary.mean:.1f} max {summary.max}"
    typer.echo(f"{len(trace.delays):,} updates in {trace.config['seconds']:.1f} s, {final_result(trace)}{delays}")
    if "drift" in trace.metrics and len(trace.delays):
        drift, _, outstanding, most = trace.certificate()
        typer.echo(f"drift {drift:.4g}, {outstanding:.1f} gradients outstanding, {most} at most")
    if returns := trace.config.get("returns"):
        typer.echo(f"returned to a checkpoint {returns} times because the state was not finite")
    if trace.config["settings"].get("compression", "none") != "none":
        up, down = (f"{trace.config['bytes'][way] / 1e6:,.1f} MB" for way in ("up", "down"))
        typer.echo(f"sent: {up} of gradients, {down} of queries")
    for what in ("refusals", "too_late", "replaced", "memories_lost"):
        if counts := trace.config.get(what):
            typer.echo(f"{what}: " + ", ".join(f"{worker} {count}" for worker, count in sorted(counts.items())))
    if out is not None:
        if not trace.complete:  # before the figure, which another Ctrl-C may interrupt
            typer.echo(f"to continue: lategrad resume {shlex.quote(str(out))}", err=True)
        try:
            trace.plot(out / "training.png")
        except OSError as error:  # the run itself is done
            warnings.warn(f"training.png could not be written: {error}", stacklevel=2)
        names = [name for name in ("trace.safetensors", "records.csv", "training.png") if (out / name).is_file()]
        typer.echo(f"written to {out}: {', '.join([*names, 'checkpoints'])}")
        if trace.complete and not (out / "trace.safetensors").is_file():
            raise OSError(f"the run is complete, and its trace could not be written to {out}: make room there, and "
                          f"run lategrad resume {shlex.quote(str(out))}")  # fmt: skip
    if not trace.complete:
        terminated = trace.config.get("stopped") in (STOP_REASONS[SIGTERM], STOP_REASONS[SIGHUP])
        raise typer.Exit(_TEMPORARY_FAILURE if terminated and out is not None else 130)


def final_result(trace: Trace) -> str:
    accuracy = "" if trace.accuracy is None else f", accuracy {trace.accuracy[-1]:.4f}"
    return f"loss {trace.loss[-1]:.5g}{accuracy}"
