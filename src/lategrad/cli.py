"""The command line: list what there is, simulate it, train for real, replay what happened, reproduce the paper."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from lategrad.delays import specs as delay_specs
from lategrad.experiments.reproduce import NAMES as PARTS
from lategrad.experiments.reproduce import reproduce as run_reproduction
from lategrad.problems import Dataset, Problem, Quadratic, load
from lategrad.problems.data import PREPROCESSING
from lategrad.problems.linear import MODELS
from lategrad.registry import LEARNERS, RULES, SETS, build_rule, parse_set
from lategrad.replay import replay as replay_trace
from lategrad.rules.rule import AnyRule
from lategrad.serve.settings import ENGINES
from lategrad.serve.training import TrainingError, saved_config
from lategrad.serve.training import resume as resume_training
from lategrad.serve.training import train as run_training
from lategrad.simulate import simulate as run_simulation
from lategrad.support.validation import require_choice
from lategrad.trace import Axis, Trace, write_csv

app = typer.Typer(
    name="lategrad",
    help="Train from late gradients: compare server rules under unknown, changing delays.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

_REPEATED = ("--rule", "--lr", "--delay", "--slow")
"""Options that take several values after one name: ``--lr 0.1 0.3 1``."""

_DEFAULTS: dict[str, list[Any]] = {"rule": ["anytime-sgd"], "lr": [0.1], "delay": ["constant:0"]}

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises for wrong options: its own click's or the installed one's, depending on its version."""

PROBLEMS = {
    "digits": "8x8 handwritten digits, bundled (the default: works offline)",
    "fashion-mnist": "28x28 images of clothes, 60,000 + 10,000",
    "quadratic": "noisy quadratic with a known optimum",
    "FILE": "your own .npz, .csv or libsvm file",
}


ProblemName = Annotated[str, typer.Option(help="digits, fashion-mnist, quadratic, or a data file.")]
ModelName = Annotated[str, typer.Option(help=f"What is fitted to the data: {', '.join(MODELS)}.")]
Preprocessing = Annotated[str, typer.Option(help=f"One of {', '.join(PREPROCESSING)}.")]
Batch = Annotated[int, typer.Option(help="Rows in a minibatch.")]
Sampling = Annotated[str, typer.Option(help="Minibatches: iid (the paper's model) or epochs.")]
Penalty = Annotated[float, typer.Option(help="Quadratic penalty; makes the problem strongly convex.")]
Domain = Annotated[str, typer.Option(help="Constraint such as ball:5, or whole.")]
Steps = Annotated[int, typer.Option(help="Server updates.")]
RecordEvery = Annotated[int | None, typer.Option(help="Updates between records; by default ten records.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@app.callback()
def _about() -> None:
    """Keeps subcommands even when there is only one."""


@app.command("list")
def list_everything() -> None:
    """List all rules, learners, sets, problems and delays, a line each."""
    console = Console()
    tables = {
        "rules (--rule)": {name: f"{e.summary}; --lr is its {e.parameter}" for name, e in RULES.items()},
        "learners inside anytime rules": {name: entry.summary for name, entry in LEARNERS.items()},
        "sets (--domain)": {entry.form: entry.summary for entry in SETS.values()},
        "problems (--problem)": PROBLEMS,
        "models (--model)": {name: _first_line(model) for name, model in MODELS.items()},
        "delays (--delay)": delay_specs.FORMS,
    }
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for name, summary in rows.items():
            table.add_row("  " + name, summary)
        console.print(table)


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]


@app.command()
def simulate(
    problem: ProblemName = "digits",
    model: ModelName = "softmax",
    preprocess: Preprocessing = "standardise",
    batch: Batch = 64,
    sampling: Sampling = "iid",
    l2: Penalty = 0.0,
    rule: Annotated[list[str], typer.Option(help="Server rule; several may follow. See `lategrad list`.")] = _DEFAULTS[
        "rule"
    ],
    lr: Annotated[
        list[float], typer.Option(help="The rule's step (or its one number, see list); several may follow.")
    ] = _DEFAULTS["lr"],
    delay: Annotated[
        list[str], typer.Option(help="Delays such as constant:500 or lognormal:7,0.4; several may follow.")
    ] = _DEFAULTS["delay"],
    domain: Domain = "whole",
    steps: Steps = 2000,
    seeds: Annotated[int, typer.Option(help="How many seeds: 0, 1, ...")] = 1,
    record_every: RecordEvery = None,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.csv, a figure and a trace for each rule.")
    ] = None,
) -> None:
    """Simulate rules under delays: all combinations of steps, delays and seeds at once.

    Example:

        lategrad simulate --problem fashion-mnist --rule anytime-sgd sgd --lr 0.1 0.3 1
        --delay constant:500 lognormal:7,0.4 --domain ball:5 --steps 20000 --seeds 3 --out runs/demo

    The table shows the final accuracy and loss of the rule's output, averaged over seeds. With --out the same is
    written as CSV, with a figure, and the trace of every rule, which `lategrad.Trace.load` reads.
    """
    the_set = parse_set(domain)
    the_problem = _problem(problem, model, preprocess, batch, sampling, l2)
    lrs = torch.tensor(lr, dtype=torch.float64).unsqueeze(-1)
    rules = {name: build_rule(name, lrs, the_set) for name in rule}
    models = [delay_specs.parse(spec) and spec for spec in delay]  # all are checked before anything runs
    if seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {seeds}")
    traces = {}
    for name, one in rules.items():
        traces[name] = run_simulation(
            the_problem, one, models, steps, seed=list(range(seeds)), record_every=record_every, device=device,
            save_to=None if out is None else out / f"{name}.safetensors",
        )  # fmt: skip
        if not traces[name].complete:
            break
    _print_table(traces)
    if out is not None:
        _write_results(traces, out)
    if not all(trace.complete for trace in traces.values()):
        raise typer.Exit(130)


@app.command()
def train(
    problem: ProblemName = "digits",
    model: ModelName = "softmax",
    preprocess: Preprocessing = "standardise",
    batch: Batch = 64,
    sampling: Sampling = "iid",
    l2: Penalty = 0.0,
    rule: Annotated[str, typer.Option(help="Server rule; see `lategrad list`.")] = "anytime-sgd",
    lr: Annotated[float, typer.Option(help="The rule's step (or its one number, see list).")] = 0.1,
    domain: Domain = "whole",
    steps: Steps = 2000,
    workers: Annotated[
        str, typer.Option(help="How many, on Ray also 2:8; write a number to OUT/workers to change it.")
    ] = "4",
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(ENGINES)}.")] = "processes",
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster: auto, HOST:PORT; without it, Ray on this machine.")
    ] = None,
    shards: Annotated[int, typer.Option(help="Server actors that the parameters are split over, on Ray.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the workers' streams of samples.")] = 0,
    device: Device = "cpu",
    slow: Annotated[
        list[str] | None,
        typer.Option(help="Milliseconds to hold gradients back: lognormal:3,1, or 2=constant:100 for worker 2 alone."),
    ] = None,
    ahead: Annotated[
        int, typer.Option(help="Jobs a worker holds beside the one it is at: faster for short gradients, more delay.")
    ] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds until a silent worker is taken for hung.")] = 300.0,
    record_every: RecordEvery = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, the trace, a figure and a table of records.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Updates between checkpoints; by default one a minute.")
    ] = None,
    log: Annotated[str | None, typer.Option(help="tensorboard writes to OUT/tensorboard.")] = None,
) -> None:
    """Train for real: worker processes on this machine, whose gradients are late because computing takes time.

    Example:

        lategrad train --problem fashion-mnist --rule steady --lr 1 --workers 4 --steps 20000
        --slow 0=constant:100 --out runs/night

    Ctrl-C or SIGTERM leaves a checkpoint; `lategrad resume runs/night` goes on from it. `lategrad replay
    runs/night --rule sgd --lr 0.1` shows what another rule would have done with the same delays and samples.
    """
    command = {
        "problem": str(Path(problem).resolve()) if Path(problem).is_file() else problem,  # from any folder later
        "model": model, "preprocess": preprocess, "batch": batch, "sampling": sampling, "l2": l2,
        "rule": rule, "lr": lr, "domain": domain,
    }  # fmt: skip
    the_problem, the_rule = _problem_of(command), _rule_of(command)
    trace = run_training(
        the_problem, the_rule, steps=steps, workers=workers, engine=engine, address=address, shards=shards,
        seed=seed, device=device,
        slow=_pauses(slow or []), ahead=ahead, deadline=deadline, record_every=record_every, out=out,
        checkpoint_every=checkpoint_every, log=log, notes={"command": command},
    )  # fmt: skip
    _finish_training(trace, out)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to train as --out.")],
    steps: Annotated[int | None, typer.Option(help="Updates in all; by default as first asked for.")] = None,
    workers: Annotated[str | None, typer.Option(help="By default as before.")] = None,
) -> None:
    """Go on with an interrupted training from its last checkpoint."""
    changes: dict[str, Any] = {
        name: value for name, value in (("steps", steps), ("workers", workers)) if value is not None
    }
    command = _command(saved_config(folder)["settings"]["notes"], folder)
    trace = resume_training(folder, _problem_of(command), _rule_of(command), **changes)
    _finish_training(trace, folder)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A training's folder, or its trace.safetensors.")],
    rule: Annotated[list[str] | None, typer.Option(help="Other rules; by default the run's own.")] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Their steps; by default the run's own.")] = None,
    domain: Annotated[str | None, typer.Option(help="Their set; by default the run's own.")] = None,
    record_every: RecordEvery = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for results.csv, figures and traces.")] = None,
) -> None:
    """What would another rule have done with the delays and samples of a recorded training?

    Example:

        lategrad replay runs/night --rule sgd anytime-sgd --lr 0.01 0.1 1
    """
    recorded = Trace.load(trace / "trace.safetensors" if trace.is_dir() else trace)
    command = _command(recorded.config.get("settings", {}).get("notes", {}), trace)
    the_problem = _problem_of(command)
    lrs = torch.tensor(lr or [command["lr"]], dtype=torch.float64).unsqueeze(-1)
    the_set = parse_set(domain or command["domain"])
    rules = {name: build_rule(name, lrs, the_set) for name in rule or [command["rule"]]}
    run = partial(replay_trace, recorded, the_problem, record_every=record_every, device=device)
    traces = {name: _with_axes(run(rule=one)) for name, one in rules.items()}
    typer.echo(f"recorded: {command['rule']}, {_result(recorded)}", err=True)
    _print_table(traces)
    if out is not None:
        for name, one_trace in traces.items():
            one_trace.save(out / f"{name}.safetensors")
        _write_results(traces, out)


def _command(notes: dict[str, Any], where: Path) -> dict[str, Any]:
    """The options that a training was started with."""
    if "command" not in notes:
        raise ValueError(f"{str(where)!r} was not made by `lategrad train`: use lategrad.resume or lategrad.replay "
                         "in Python, where problem and rule are at hand")  # fmt: skip
    command: dict[str, Any] = notes["command"]
    return command


def _problem_of(command: dict[str, Any]) -> Problem:
    return _problem(*(command[name] for name in ("problem", "model", "preprocess", "batch", "sampling", "l2")))


def _rule_of(command: dict[str, Any]) -> AnyRule[Any]:
    return build_rule(command["rule"], command["lr"], parse_set(command["domain"]))


def _pauses(specs: Sequence[str]) -> str | dict[int, str] | None:
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


def _finish_training(trace: Trace, out: Path | None) -> None:
    delays = ""
    if len(trace.delays):
        summary = trace.delay_summary()
        delays = f", delay mean {summary.mean:.1f} max {summary.max}"
    typer.echo(f"{len(trace.delays):,} updates in {trace.config['seconds']:.1f} s, {_result(trace)}{delays}")
    for what in ("refusals", "replaced"):
        if counts := trace.config[what]:
            typer.echo(f"{what}: " + ", ".join(f"{worker} {count}" for worker, count in sorted(counts.items())))
    if out is not None:
        trace.to_csv(out / "results.csv")
        trace.plot(out / "training.png")
        typer.echo(f"written to {out}: trace.safetensors, results.csv, training.png, checkpoints")
    if not trace.complete:
        raise typer.Exit(130)


def _result(trace: Trace) -> str:
    accuracy = "" if trace.accuracy is None else f", accuracy {trace.accuracy[-1]:.4f}"
    return f"loss {trace.loss[-1]:.5g}{accuracy}"


def _with_axes(trace: Trace) -> Trace:
    """A single run on single delays as one of a seed and a delay, as the tables expect."""
    accuracy = None if trace.accuracy is None else trace.accuracy[:, None, None]
    axes = (Axis("seed", (0,)), Axis("delay", ("recorded",)), *trace.axes)
    test_loss = None if trace.test_loss is None else trace.test_loss[:, None, None]
    return replace(trace, axes=axes, loss=trace.loss[:, None, None], accuracy=accuracy, test_loss=test_loss)


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}, or all.")] = "all",
    scale: Annotated[
        str, typer.Option(help="quick (ten minutes on two cores), paper (under an hour on two cores), full (GPU).")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for report.html, figures and CSV files.")] = Path("out"),
    device: Device = "cpu",
    models: Annotated[str, typer.Option(help="Limit deep to some models: mlp,cnn,gpt.")] = "",
    rules: Annotated[str, typer.Option(help="Limit deep to some rules: adamw,muon,...")] = "",
) -> None:
    """Reproduce the paper's figures and theorems, compare all rivals, and write a report that judges each claim.

    An interrupted run goes on where it stopped: what is finished is kept under OUT/traces. On a CPU every core gets
    work of its own. Beyond the quick scale the deep models and the rivals on Fashion-MNIST would take hours there:
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


def _problem(name: str, model: str, preprocess: str, batch: int, sampling: str, l2: float) -> Problem:
    if name == "quadratic":
        given = (model, preprocess, batch, sampling, l2)
        if given != ("softmax", "standardise", 64, "iid", 0.0):
            raise ValueError("--model, --preprocess, --batch, --sampling and --l2 do not apply to --problem quadratic")
        return Quadratic()
    require_choice("--model", model, tuple(MODELS))
    data: Dataset = load(name, preprocess)
    return MODELS[model](data, batch=batch, sampling=sampling, l2=l2)


def _rows(rule: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """The trace's rows with the rule's name; its one number is in the column lr, whatever the rule calls it."""
    number = trace.axes[-1].name
    for row in trace.rows():
        yield {"rule": rule, **{("lr" if key == number else key): value for key, value in row.items()}}


def _write_results(traces: dict[str, Trace], out: Path) -> None:
    write_csv(out / "results.csv", (row for name, trace in traces.items() for row in _rows(name, trace)))
    for name, trace in traces.items():
        trace.plot(out / f"{name}.png")
    typer.echo(f"written to {out}: results.csv, " + ", ".join(f"{n}.png, {n}.safetensors" for n in traces))


def _print_table(traces: dict[str, Trace]) -> None:
    """A row for every rule, delay and step: means over seeds of the last record, the best of each delay marked."""
    table = Table(header_style="bold")
    for column in ("rule", "delay", "step size", "accuracy", "spread", "loss"):
        table.add_column(column, justify="left" if column in ("rule", "delay") else "right")
    for name, trace in traces.items():
        lrs = trace.axes[-1].values
        for i, delay in enumerate(trace.axis("delay").values):
            losses = trace.loss[-1, :, i]
            score = -losses.mean(0) if trace.accuracy is None else trace.accuracy[-1, :, i].mean(0)
            score = torch.nan_to_num(score, nan=-math.inf)  # what diverged is not the best
            for k, value in enumerate(lrs):
                accuracy, spread = "", ""
                if trace.accuracy is not None:
                    of_seeds = trace.accuracy[-1, :, i, k]
                    accuracy, spread = f"{of_seeds.mean():.4f}", f"{of_seeds.max() - of_seeds.min():.4f}"
                best = "bold green" if len(lrs) > 1 and k == int(score.argmax()) else ""
                row = (name, str(delay), f"{value:g}", accuracy, spread, f"{losses[:, k].mean():.5g}")
                table.add_row(*row, style=best)
    Console().print(table)


def spread_values(arguments: Sequence[str]) -> list[str]:
    """Write ``--lr 0.1 0.3`` as ``--lr 0.1 --lr 0.3``, which the parser understands.

    >>> spread_values(["simulate", "--lr", "0.1", "-0.3", "--steps", "5"])
    ['simulate', '--lr', '0.1', '--lr', '-0.3', '--steps', '5']
    """
    spread: list[str] = []
    option, count = "", 0
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            option, count = argument, 0
            spread.append(argument)
            continue
        if option in _REPEATED and count > 0:
            spread.append(option)
        spread.append(argument)
        count += 1
    return spread


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of the user are one line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
        sys.exit(_run(arguments))


def _run(arguments: Sequence[str]) -> Any:
    result: Any = 0
    try:
        result = app(spread_values(arguments), standalone_mode=False)
    except _UsageError as error:
        if message := error.format_message():  # type: ignore[attr-defined]
            typer.echo(f"error: {message}", err=True)  # no message: the help has been printed instead
        result = 2
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError, TrainingError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        result = 2
    except (KeyboardInterrupt, typer.Abort):
        result = 130
    return result
