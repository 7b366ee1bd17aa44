"""``lategrad simulate``: rules under delays, all combinations at once."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lategrad.cli import options
from lategrad.cli.build import problem_from, rules_from, set_from, single_values, with_local_steps
from lategrad.cli.results import Contender, file_name, require_new, table, write_results
from lategrad.cli.train_options import NORM_OPTIONS, with_options
from lategrad.delays import as_delay_model
from lategrad.simulator import simulate as run_simulation

_RULES, _DELAYS = ["anytime-sgd"], ["constant:0"]
_LR_HELP = "Learning rates of rules that have an lr, by default their own or 0.1; several may follow."
_OUT_HELP = "Folder for results.csv, a figure and a trace for each rule."
_DELAY_HELP = "Delays such as constant:500 or lognormal:7,0.4; several may follow."


@with_options(NORM_OPTIONS)
def simulate(
    problem: options.ProblemName = "digits", model: options.ModelName = "softmax",
    preprocess: options.Preprocessing = None, batch: options.Batch = 64, sampling: options.Sampling = "iid",
    l2: options.Penalty = 0.0,
    rule: Annotated[list[str], typer.Option(help=f"Server rules, {options.RuleHelp} Several may follow.")] = _RULES,
    lr: Annotated[list[float] | None, typer.Option(help=_LR_HELP)] = None,
    delay: Annotated[list[str], typer.Option(help=_DELAY_HELP)] = _DELAYS, domain: options.Domain = "whole",
    local_steps: options.LocalStepCount = None, inner: options.Inner = None, scaled: options.Scaled = False,
    steps: options.Steps = 2000, seeds: options.Seeds = 1, record_every: options.RecordEvery = None,
    device: options.Device = "cpu", out: Annotated[Path | None, typer.Option(help=_OUT_HELP)] = None,
    overwrite: options.Overwrite = False, drift: options.Drift = False, **long_gradients: Any,
) -> None:  # fmt: skip
    """Simulate rules under delays, all combinations at once.

    Example:

        lategrad simulate --problem fashion-mnist --rule anytime-sgd sgd --lr 0.1 0.3 1
        --delay constant:500 lognormal:7,0.4 --domain ball:5 --steps 20000 --seeds 3 --out runs/demo

    The table shows the final accuracy and loss of the rule's output, averaged over seeds. With --out the same is
    written as CSV, with a figure, and the trace of every rule, which `lategrad.Trace.load` reads.
    """
    the_set = set_from(domain)
    the_problem = problem_from(problem, model, preprocess, batch, sampling, l2)
    the_problem = with_local_steps(the_problem, local_steps, inner, scaled)
    rules = rules_from(rule, lr or [])
    built = {label: spec.build(the_set) for label, spec in rules.items()}
    for text in delay:
        as_delay_model(text)  # all are checked before anything runs
    require_new(out, overwrite)
    contenders = []
    for label, one in built.items():
        trace = run_simulation(the_problem, one, delay, steps, seed=list(range(seeds)), record_every=record_every,
                               device=device, save_to=None if out is None else out / f"{file_name(label)}.safetensors",
                               drift=drift, **long_gradients)  # fmt: skip
        contenders.append(Contender(label, trace, single_values(rules[label])))
        if not trace.complete:
            break
    Console().print(table(contenders))
    if left := list(built)[len(contenders) :]:
        typer.echo(f"not simulated: {', '.join(left)}", err=True)
    if out is not None:
        typer.echo(write_results(contenders, out))
    if not all(contender.trace.complete for contender in contenders):
        raise typer.Exit(130)
