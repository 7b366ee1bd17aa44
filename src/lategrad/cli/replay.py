"""``lategrad replay``: another rule on the delays and samples of a recorded run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lategrad.cli.build import rules_from, set_from, single_values
from lategrad.cli.options import Device, Drift, Overwrite, OwnProblem, RecordEvery
from lategrad.cli.results import Contender, file_name, require_new, table, write_results
from lategrad.cli.train import build_problem, confirm_own_code, final_result, saved_command
from lategrad.replays import replay as replay_trace
from lategrad.trace import Axis, Trace

_LR_HELP = "Learning rates of rules that have an lr; by default the run's."


def replay(
    trace: Annotated[Path, typer.Argument(help="A run's folder, or its trace.safetensors.")],
    rule: Annotated[list[str] | None, typer.Option(help="Rules to replay; by default the run's.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help=_LR_HELP)] = None,
    domain: Annotated[str | None, typer.Option(help="Constraint set of the rules; by default the run's.")] = None,
    record_every: RecordEvery = None, device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for results.csv, a figure and traces.")] = None,
    overwrite: Overwrite = False, problem: OwnProblem = None, drift: Drift = False,
) -> None:  # fmt: skip
    """Simulate a rule on the delays and samples of a recorded run.

    Example:

        lategrad replay runs/night --rule sgd anytime-sgd --lr 0.01 0.1 1
    """
    recorded = Trace.load(trace / "trace.safetensors" if trace.is_dir() else trace)
    command = saved_command(recorded.config.get("settings", {}), trace)
    confirm_own_code(command, problem=problem, **({} if rule else {"rule": None}))
    require_new(out, overwrite)
    the_problem, the_set = build_problem(command), set_from(domain or command["domain"])
    own_lr = [] if rule or command["lr"] is None else [command["lr"]]
    contenders = []
    for label, spec in rules_from(rule or [command["rule"]], lr or own_lr).items():
        one = replay_trace(recorded, the_problem, spec.build(the_set), record_every=record_every, device=device,
                           drift=drift)  # fmt: skip
        contenders.append(Contender(label, _with_axes(one), single_values(spec)))
    typer.echo(f"recorded: {command['rule']}, {final_result(recorded)}", err=True)
    Console().print(table(contenders))
    if out is not None:
        for contender in contenders:
            contender.trace.save(out / f"{file_name(contender.label)}.safetensors")
        typer.echo(write_results(contenders, out))


def _with_axes(trace: Trace) -> Trace:
    """Add the axes of seeds and delays that the tables expect."""
    axes = (Axis("seed", (0,)), Axis("delay", ("recorded",)), *trace.axes)
    values: dict[str, Any] = {name: value[:, None, None] for name, value in trace.recorded().items()}
    metrics = {name: values.pop(name) for name in trace.metrics}
    return replace(trace, axes=axes, metrics=metrics, **values)
