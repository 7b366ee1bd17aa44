"""``lategrad train`` and ``lategrad resume``: workers on this machine, or of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Annotated, Any

import typer

from lategrad.cli.options import (
    Batch,
    Domain,
    ModelName,
    Penalty,
    Preprocessing,
    ProblemName,
    RuleHelp,
    Sampling,
)
from lategrad.cli.saved_command import INNER, command_of, confirm_own_code, from_anywhere, problem_of, rule_of
from lategrad.cli.train_options import RESUME_OPTIONS, TRAIN_OPTIONS, with_options
from lategrad.problems import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.signals import STOPPED
from lategrad.serve.training import resume_from
from lategrad.serve.training import train as run_training
from lategrad.trace import Trace


@with_options(TRAIN_OPTIONS)
def train(
    problem: ProblemName = "digits",
    model: ModelName = "softmax",
    preprocess: Preprocessing = None,
    batch: Batch = 64,
    sampling: Sampling = "iid",
    l2: Penalty = 0.0,
    rule: Annotated[str, typer.Option(help=f"Server rule, {RuleHelp}")] = "anytime-sgd",
    lr: Annotated[float | None, typer.Option(help="The step of a rule that has an lr.")] = None,
    domain: Domain = "whole",
    local_steps: Annotated[
        int | None,
        typer.Option(help="Steps of its own that a worker takes before it sends where they led, such as 50."),
    ] = None,
    inner: Annotated[
        str | None, typer.Option(help=f"The optimizer of these steps, a rule of `lategrad list`; by default {INNER}.")
    ] = None,
    scaled: Annotated[bool, typer.Option("--scaled", help="Divide where they led by steps x the inner lr.")] = False,
    local_seconds: Annotated[
        float | None, typer.Option(help="Only as many of these steps for a job as fit into so many seconds.")
    ] = None,
    **settings: Any,
) -> None:
    """Train for real: worker processes on this machine, whose gradients are late because computing takes time.

    Example:

        lategrad train --problem fashion-mnist --rule steady --lr 1 --workers 4 --steps 20000
        --slow 0=constant:100 --out runs/night

    Ctrl-C or SIGTERM leaves a checkpoint; `lategrad resume runs/night` goes on from it. `lategrad replay
    runs/night --rule sgd --lr 0.1` shows what another rule would have done with the same delays and samples.

    With --local-steps the rule is the outer optimizer of workers that take steps of their own:

        lategrad train --problem fashion-mnist --local-steps 50 --inner adamw:lr=0.001 --rule nesterov --workers 4
    """
    command = {
        "problem": from_anywhere(problem),
        "model": model, "preprocess": preprocess, "batch": batch, "sampling": sampling, "l2": l2,
        "rule": from_anywhere(rule), "lr": lr, "domain": domain,
        "local": {"steps": local_steps, "inner": inner, "scaled": scaled, "seconds": local_seconds},
    }  # fmt: skip
    the_problem, the_rule = problem_of(command), rule_of(command)
    trace = run_training(the_problem, the_rule, **settings, notes={"command": command})
    _finish_training(trace, settings["out"])


@with_options(RESUME_OPTIONS)
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to train as --out.")],
    rule: Annotated[str | None, typer.Option(help="Only for a rule of your own: the same as it was.")] = None,
    problem: Annotated[str | None, typer.Option(help="Only for a problem of your own: the same as it was.")] = None,
    **settings: Any,
) -> None:
    """Go on with an interrupted training from its last checkpoint; options that are not given stay as they were."""

    def recall(saved: dict[str, Any]) -> tuple[Problem, AnyRule[Any]]:
        command = command_of(saved["notes"], folder)
        confirm_own_code(command, rule=rule, problem=problem)
        return problem_of(command), rule_of(command)

    trace = resume_from(folder, recall, {name: value for name, value in settings.items() if value is not None})
    _finish_training(trace, folder)


_QUEUE_AGAIN = 75
"""EX_TEMPFAIL: a batch system took the machine away; `lategrad resume` goes on from the checkpoint."""


def _finish_training(trace: Trace, out: Path | None) -> None:
    delays = ""
    if len(trace.delays):
        summary = trace.delay_summary()
        delays = f", delay mean {summary.mean:.1f} max {summary.max}"
    typer.echo(f"{len(trace.delays):,} updates in {trace.config['seconds']:.1f} s, {result_in_words(trace)}{delays}")
    if returns := trace.config.get("returns"):
        typer.echo(f"went back to a checkpoint {returns} times, because the state was not finite")
    if trace.config["settings"].get("compression", "none") != "none":
        up, down = (f"{trace.config['bytes'][way] / 1e6:,.1f} MB" for way in ("up", "down"))
        typer.echo(f"on the wire: {up} of gradients, {down} of queries")
    for what in ("refusals", "too_late", "replaced", "memories_lost"):
        if counts := trace.config.get(what):
            typer.echo(f"{what}: " + ", ".join(f"{worker} {count}" for worker, count in sorted(counts.items())))
    if out is not None:
        trace.plot(out / "training.png")
        typer.echo(f"written to {out}: trace.safetensors, records.csv, training.png, checkpoints")
    if not trace.complete:
        sent_away = out is not None and trace.config.get("stopped") in (STOPPED[SIGTERM], STOPPED[SIGHUP])
        raise typer.Exit(_QUEUE_AGAIN if sent_away else 130)


def result_in_words(trace: Trace) -> str:
    """The last loss and accuracy."""
    accuracy = "" if trace.accuracy is None else f", accuracy {trace.accuracy[-1]:.4f}"
    return f"loss {trace.loss[-1]:.5g}{accuracy}"
