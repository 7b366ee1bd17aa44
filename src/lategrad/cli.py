"""The command line: list what there is, simulate it, train for real, replay what happened, reproduce the paper."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from lategrad import __version__
from lategrad.commands import tolerance as tolerance_command
from lategrad.comparison import Contender, file_name, require_new, table, write_results
from lategrad.delays import specs as delay_specs
from lategrad.experiments.reproduce import NAMES as PARTS
from lategrad.experiments.reproduce import reproduce as run_reproduction
from lategrad.problems import Dataset, LocalSteps, Problem, Quadratic, load
from lategrad.problems.data import PREPROCESSING
from lategrad.problems.linear import MODELS
from lategrad.registry import LEARNERS, RULES, SETS, Entry, RuleSpec, parse_set, read_rule
from lategrad.replay import replay as replay_trace
from lategrad.rules.rule import AnyRule
from lategrad.serve import TrainingError
from lategrad.serve.command_line import RESUME_OPTIONS, TRAIN_OPTIONS, with_options
from lategrad.serve.control import STOPPED
from lategrad.serve.training import resume_from
from lategrad.serve.training import train as run_training
from lategrad.sets import ConvexSet
from lategrad.simulate import simulate as run_simulation
from lategrad.support.options import as_text, load_object, options_of, own_target, parse_options
from lategrad.support.validation import did_you_mean
from lategrad.trace import Axis, Trace

app = typer.Typer(
    name="lategrad",
    help="Train from late gradients: compare server rules under unknown, changing delays.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

_REPEATED = {
    "simulate": ("--rule", "--lr", "--delay"),
    "train": ("--slow",),
    "replay": ("--rule", "--lr"),
    "tolerance": ("--optimizer",),
}
"""Options of each command that take several values after one name: ``--lr 0.1 0.3 1``."""

_DEFAULTS: dict[str, list[Any]] = {"rule": ["anytime-sgd"], "delay": ["constant:0"]}
_LR = 0.1
"""The step of rules that have one, and no default of their own."""
_INNER = "adamw:lr=0.001"
"""The optimizer of local steps."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises for wrong options: its own click's or the installed one's, depending on its version."""

PROBLEMS = {
    "digits": "8x8 handwritten digits, bundled (the default: works offline)",
    "fashion-mnist": "28x28 images of clothes, 60,000 + 10,000",
    "letters": "16 features of printed letters, 16,000 + 4,000 (scripts/fetch_mlbench.sh)",
    "satellite": "six kinds of soil seen from above, 4,435 + 2,000 (likewise)",
    "quadratic": "noisy quadratic with a known optimum",
    "FILE": "your own .npz, .csv or libsvm file",
    "MODULE:CLASS": "your own problem, package.module:Class or file.py:Class, and :option=value,... after it",
}
MODEL_SUMMARIES = {
    "softmax": "softmax regression, for any number of classes",
    "least-squares": "least squares, for numbers or for classes",
    "svm": "support vector machine with a smoothed hinge, for two classes",
}


_PREPROCESSING_HELP = "; ".join(f"{name} ({meaning})" for name, meaning in PREPROCESSING.items())
ProblemName = Annotated[
    str,
    typer.Option(
        help="digits, fashion-mnist, letters, satellite, quadratic, a data file, or your own module:Class or "
        "file.py:Class."
    ),
]
ModelName = Annotated[str, typer.Option(help=f"What is fitted to the data: {', '.join(MODELS)}.")]
Preprocessing = Annotated[
    str | None,
    typer.Option(help=f"{_PREPROCESSING_HELP}; by default standardise for files, standardise-globally for the images."),
]
Batch = Annotated[int, typer.Option(help="Rows in a minibatch.")]
Sampling = Annotated[str, typer.Option(help="Minibatches: iid (the paper's model) or epochs.")]
Penalty = Annotated[float, typer.Option(help="Quadratic penalty; makes the problem strongly convex.")]
Domain = Annotated[str, typer.Option(help="Constraint such as ball:5, or whole.")]
Steps = Annotated[int, typer.Option(help="Server updates.")]
RecordEvery = Annotated[int | None, typer.Option(help="Updates between records; by default ten records.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


RuleHelp = (
    "such as steady or anytime-sgd:lr=1,power=2 (see `lategrad list`), or your own module:Class or file.py:Class."
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lategrad {__version__}")
        raise typer.Exit


app.command()(tolerance_command.tolerance)


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """What every command has."""


@app.command("list")
def list_everything() -> None:
    """List all rules, learners, sets, problems and delays, a line each."""
    console = Console()
    tables: dict[str, dict[str, tuple[str, ...]]] = {
        "rules (--rule NAME:OPTION=VALUE,...; several values as lr=0.1|1|10)": _with_options(RULES),
        "learners inside anytime rules": _with_options(LEARNERS),
        "sets (--domain)": {entry.form: (entry.summary,) for entry in SETS.values()},
        "problems (--problem)": {name: (summary,) for name, summary in PROBLEMS.items()},
        "models (--model)": {name: (MODEL_SUMMARIES[name],) for name in MODELS},
        "preprocessing (--preprocess)": {name: (meaning,) for name, meaning in PREPROCESSING.items()},
        "delays (--delay)": {name: (form,) for name, form in delay_specs.FORMS.items()},
    }
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for name, cells in rows.items():
            table.add_row("  " + name, *cells)
        console.print(table)


def _with_options(entries: Mapping[str, Entry[Any]]) -> dict[str, tuple[str, ...]]:
    """Names with their options and defaults, and what they are."""
    return {name: (", ".join(map(str, entry.options.values())), entry.summary) for name, entry in entries.items()}


@app.command()
def simulate(
    problem: ProblemName = "digits",
    model: ModelName = "softmax",
    preprocess: Preprocessing = None,
    batch: Batch = 64,
    sampling: Sampling = "iid",
    l2: Penalty = 0.0,
    rule: Annotated[list[str], typer.Option(help=f"Server rules, {RuleHelp} Several may follow.")] = _DEFAULTS["rule"],
    lr: Annotated[
        list[float] | None, typer.Option(help="The step of rules that have an lr; several may follow.")
    ] = None,
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that are in OUT already.")] = False,
) -> None:
    """Simulate rules under delays: all combinations of steps, delays and seeds at once.

    Example:

        lategrad simulate --problem fashion-mnist --rule anytime-sgd sgd --lr 0.1 0.3 1
        --delay constant:500 lognormal:7,0.4 --domain ball:5 --steps 20000 --seeds 3 --out runs/demo

    The table shows the final accuracy and loss of the rule's output, averaged over seeds. With --out the same is
    written as CSV, with a figure, and the trace of every rule, which `lategrad.Trace.load` reads.
    """
    the_set = _set(domain)
    the_problem = _problem(problem, model, preprocess, batch, sampling, l2)
    rules = _rules(rule, lr or [])
    built = {label: spec.build(the_set) for label, spec in rules.items()}
    models = [delay_specs.parse(spec) and spec for spec in delay]  # all are checked before anything runs
    if seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {seeds}")
    if out is not None:
        require_new(out, overwrite)
    contenders = []
    for label, one in built.items():
        trace = run_simulation(
            the_problem, one, models, steps, seed=list(range(seeds)), record_every=record_every, device=device,
            save_to=None if out is None else out / f"{file_name(label)}.safetensors",
        )  # fmt: skip
        contenders.append(Contender(label, trace, _settings(rules[label])))
        if not trace.complete:
            break
    Console().print(table(contenders))
    if out is not None:
        typer.echo(write_results(contenders, out))
    if not all(contender.trace.complete for contender in contenders):
        raise typer.Exit(130)


def _rules(texts: Sequence[str], lrs: Sequence[float]) -> dict[str, RuleSpec]:
    """The rules of a command line, by what was written; ``--lr`` is for those that have an lr and do not say it."""
    twice = [text for text, count in Counter(texts).items() if count > 1]
    if twice:
        raise ValueError(f"--rule {twice[0]} is given twice")
    rules, used = {}, False
    for text in texts:
        spec = read_rule(text)
        label = ",".join(f"{name}={as_text(value)}" for name, value in _settings(spec).items())
        label = f"{spec.name}:{label}" if label else spec.name  # a sweep's values are on its axes
        label = text if spec.domain is not None else label
        options, number = spec.entry.options, spec.entry.parameter
        if "lr" in options and "lr" not in spec.given:
            if lrs:
                spec, used = spec.with_option("lr", *lrs), True
            elif options["lr"].required:
                spec = spec.with_option("lr", _LR)
        elif "lr" not in options and lrs and number not in spec.given:
            value = as_text(lrs[0])
            raise ValueError(f"--lr is not an option of rule {spec.name!r}: its number is {number}, "
                             f"write --rule {spec.name}:{number}={value}")  # fmt: skip
        rules[label if label not in rules else text] = spec
    if lrs and not used:
        raise ValueError(f"--lr {as_text(lrs[0])} is of no use: every rule says its own numbers")
    return rules


def _settings(spec: RuleSpec) -> dict[str, Any]:
    """The options with one value."""
    return {name: values[0] for name, values in spec.given.items() if len(values) == 1}


@app.command()
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
        str | None, typer.Option(help=f"The optimizer of these steps, a rule of `lategrad list`; by default {_INNER}.")
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
        "problem": _from_anywhere(problem),
        "model": model, "preprocess": preprocess, "batch": batch, "sampling": sampling, "l2": l2,
        "rule": _from_anywhere(rule), "lr": lr, "domain": domain,
        "local": {"steps": local_steps, "inner": inner, "scaled": scaled, "seconds": local_seconds},
    }  # fmt: skip
    the_problem, the_rule = _problem_of(command), _rule_of(command)
    trace = run_training(the_problem, the_rule, **settings, notes={"command": command})
    _finish_training(trace, settings["out"])


@app.command()
@with_options(RESUME_OPTIONS)
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder that was given to train as --out.")],
    rule: Annotated[str | None, typer.Option(help="Only for a rule of your own: the same as it was.")] = None,
    problem: Annotated[str | None, typer.Option(help="Only for a problem of your own: the same as it was.")] = None,
    **settings: Any,
) -> None:
    """Go on with an interrupted training from its last checkpoint; options that are not given stay as they were."""

    def recall(saved: dict[str, Any]) -> tuple[Problem, AnyRule[Any]]:
        command = _command(saved["notes"], folder)
        _confirm_own_code(command, rule=rule, problem=problem)
        return _problem_of(command), _rule_of(command)

    trace = resume_from(folder, recall, {name: value for name, value in settings.items() if value is not None})
    _finish_training(trace, folder)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A training's folder, or its trace.safetensors.")],
    rule: Annotated[list[str] | None, typer.Option(help="Other rules; by default the run's own.")] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="The step of rules that have an lr; by default the run's.")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Their set; by default the run's own.")] = None,
    record_every: RecordEvery = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for results.csv, a figure and traces.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that are in OUT already.")] = False,
    problem: Annotated[str | None, typer.Option(help="Only for a problem of your own: the same as it was.")] = None,
) -> None:
    """What would another rule have done with the delays and samples of a recorded training?

    Example:

        lategrad replay runs/night --rule sgd anytime-sgd --lr 0.01 0.1 1
    """
    recorded = Trace.load(trace / "trace.safetensors" if trace.is_dir() else trace)
    command = _command(recorded.config.get("settings", {}).get("notes", {}), trace)
    _confirm_own_code(command, problem=problem, **({} if rule else {"rule": None}))
    if out is not None:
        require_new(out, overwrite)
    the_problem, the_set = _problem_of(command), _set(domain or command["domain"])
    own_lr = [] if rule or command["lr"] is None else [command["lr"]]
    rules = _rules(rule or [command["rule"]], lr or own_lr)
    contenders = []
    for label, spec in rules.items():
        one = replay_trace(recorded, the_problem, spec.build(the_set), record_every=record_every, device=device)
        contenders.append(Contender(label, _with_axes(one), _settings(spec)))
    typer.echo(f"recorded: {command['rule']}, {_result(recorded)}", err=True)
    Console().print(table(contenders))
    if out is not None:
        for contender in contenders:
            contender.trace.save(out / f"{file_name(contender.label)}.safetensors")
        typer.echo(write_results(contenders, out))


def _command(notes: dict[str, Any], where: Path) -> dict[str, Any]:
    """The options that a training was started with."""
    if "command" not in notes:
        raise ValueError(f"{str(where)!r} was not made by `lategrad train`: use lategrad.resume or lategrad.replay "
                         "in Python, where problem and rule are at hand")  # fmt: skip
    command: dict[str, Any] = notes["command"]
    return command


def _problem_of(command: dict[str, Any]) -> Problem:
    problem = _problem(*(command[name] for name in ("problem", "model", "preprocess", "batch", "sampling", "l2")))
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
    name = (inner or _INNER).partition(":")[0]
    if name not in RULES:  # the run's folder names it, and must not name code
        raise ValueError(f"--inner must be a rule of `lategrad list`, got {name!r}{did_you_mean(name, RULES)}; in "
                         "Python any rule will do")  # fmt: skip
    return LocalSteps(problem, steps, inner or _INNER, scaled, seconds)


def _rule_of(command: dict[str, Any]) -> AnyRule[Any]:
    (spec,) = _rules([command["rule"]], [] if command["lr"] is None else [command["lr"]]).values()
    if spec.swept:
        raise ValueError(f"--rule {command['rule']}: a training has one value of {spec.swept[0]}; simulate sweeps")
    return spec.build(_set(command["domain"]))


def _set(text: str) -> ConvexSet | None:
    """The set of --domain; None for the default, which leaves the word to the rule."""
    return None if text == "whole" else parse_set(text)


def _from_anywhere(text: str) -> str:
    """A data file or a file of code by its full path, so that a run can be resumed from another folder."""
    if Path(text).is_file():
        return str(Path(text).resolve())
    module, colon, rest = text.partition(":")
    return f"{Path(module).resolve()}{colon}{rest}" if module.endswith(".py") else text


def _confirm_own_code(command: dict[str, Any], **given: str | None) -> None:
    """A run's folder may name code of the user's own; it is executed only if the user names it, too."""
    known = {"rule": tuple(RULES), "problem": tuple(PROBLEMS)}
    for option, again in given.items():
        noted = command[option]
        is_own = noted.partition(":")[0] not in known[option] and not Path(noted).is_file() and own_target(noted)
        if is_own and _from_anywhere(again or "") != noted:
            raise ValueError(f"the run used code of your own: name it again, --{option} {noted}")


_QUEUE_AGAIN = 75
"""EX_TEMPFAIL: a batch system took the machine away; `lategrad resume` goes on from the checkpoint."""


def _finish_training(trace: Trace, out: Path | None) -> None:
    delays = ""
    if len(trace.delays):
        summary = trace.delay_summary()
        delays = f", delay mean {summary.mean:.1f} max {summary.max}"
    typer.echo(f"{len(trace.delays):,} updates in {trace.config['seconds']:.1f} s, {_result(trace)}{delays}")
    if returns := trace.config.get("returns"):
        typer.echo(f"went back to a checkpoint {returns} times, because the state was not finite")
    if trace.config["settings"].get("wire", "float32") != "float32":
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
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}, or all but local and local-real.")] = "all",
    scale: Annotated[
        str, typer.Option(help="quick (ten minutes on two cores), paper (under an hour on two cores), full (GPU).")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for report.html, figures and CSV files.")] = Path("out"),
    device: Device = "cpu",
    models: Annotated[str, typer.Option(help="Limit deep, local or local-real to some models: mlp,cnn,gpt.")] = "",
    rules: Annotated[str, typer.Option(help="Limit deep, local or local-real to some rules: adamw,muon,...")] = "",
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


_OWN_DATA = ("softmax", None, 64, "iid", 0.0)
"""The defaults of the options that say what is done with data."""


def _problem(name: str, model: str, preprocess: str | None, batch: int, sampling: str, l2: float) -> Problem:
    own = None if Path(name).is_file() else own_target(name)
    if (name == "quadratic" or own) and (model, preprocess, batch, sampling, l2) != _OWN_DATA:
        raise ValueError(f"--model, --preprocess, --batch, --sampling and --l2 do not apply to --problem {name}")
    if name == "quadratic":
        return Quadratic()
    if own:
        return _own_problem(*own)
    if model not in MODELS:
        choices = ", ".join(map(repr, MODELS))
        raise ValueError(f"--model must be one of {choices}, got {model!r}{did_you_mean(model, MODELS)}")
    images = name in ("digits", "fashion-mnist")  # whose pixels have one scale
    data: Dataset = load(name, preprocess or ("standardise-globally" if images else "standardise"))
    return MODELS[model](data, batch=batch, sampling=sampling, l2=l2)


def _own_problem(module: str, name: str, options: str) -> Problem:
    make = load_object(module, name)
    if not callable(make):
        raise ValueError(f"--problem {module}:{name} must be a class, or a function that makes a problem")
    given = parse_options(options, options_of(make), f"problem {name!r}")
    for option, values in given.items():
        if len(values) > 1:
            raise ValueError(f"{option} of problem {name!r} takes one value: rules sweep, problems do not")
    made = make(**{option: value for option, (value,) in given.items()})
    missing = [member for member in _PROBLEM_MEMBERS if not hasattr(made, member)]
    if missing:
        raise ValueError(f"--problem {module}:{name} made a {type(made).__name__}, which has no {', '.join(missing)}")
    problem: Problem = made
    return problem


_PROBLEM_MEMBERS = ("dim", "start", "samples", "labels", "gradient", "loss", "accuracy", "to")


def spread_values(arguments: Sequence[str]) -> list[str]:
    """Write ``--lr 0.1 0.3`` as ``--lr 0.1 --lr 0.3``, which the parser understands, where a command takes several.

    An option that takes one value and is given twice is an error: the parser would keep the last one.

    >>> spread_values(["simulate", "--lr", "0.1", "-0.3", "--steps", "5"])
    ['simulate', '--lr', '0.1', '--lr', '-0.3', '--steps', '5']
    """
    repeated = _REPEATED.get(next(iter(arguments), ""), ())
    spread: list[str] = []
    seen: set[str] = set()
    option, count = "", 0
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            option, equals, _ = argument.partition("=")
            count = len(equals)
            if option in seen and option not in repeated:
                raise ValueError(f"{option} is given twice: it takes one value")
            seen.add(option)
            spread.append(argument)
            continue
        if option in repeated and count > 0:
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
        typer.echo(f"error: {_with_option_name(str(error), arguments)}", err=True)
        result = 2
    except (KeyboardInterrupt, typer.Abort):
        result = 130
    return result


_LIBRARY_NAMES = {"preprocessing": "preprocess", "name": "problem", "delays": "delay"}
"""Arguments of the library that an option has another name for."""


def _with_option_name(message: str, arguments: Sequence[str]) -> str:
    """``steps must be ...`` as ``--steps must be ...``, where the command has that option."""
    command = typer.main.get_command(app).commands.get(next(iter(arguments), ""))  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts} if command else set()
    found = re.match(r"(\w+) must be ", message)
    if found:
        name = found[1]
        option = "--" + _LIBRARY_NAMES.get(name, name).replace("_", "-")
        if option in options:
            return f"{option}{message.removeprefix(name)}"
    return message
