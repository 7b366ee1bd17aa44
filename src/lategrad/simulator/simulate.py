r"""The delayed oracle: any rule under any delays, many runs at once.

The semantics, exactly. Before update t = 1, 2, ..., T the server's query is :math:`x_t`. Update t receives
:math:`g_t = \nabla f(x_{t - \tau_t}; z_t)` with the t-th sample :math:`z_t` and :math:`0 \le \tau_t \le t-1`; then the
query becomes :math:`x_{t+1}`. With :math:`\tau = 2` the first four gradients are those at x_1, x_1, x_1 and x_2.

Where the problem's workers keep a state from job to job (:class:`~lategrad.problems.LocalSteps`), every simulated
worker has its own: the workers of a cluster, or the fewest that can have sent gradients with these delays.

With ``clip`` and ``max_norm_ratio`` a gradient is clipped, or refused, as by a real server. A refused gradient counts
in the sequence of delays but makes no update: the state, and the rule's own count, stay as they are.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lategrad.delays import Arrivals, Constant, DelayModel, Recorded, as_delay_model
from lategrad.delays.clocks import Barrier, Cluster
from lategrad.delays.stages import StageDelays
from lategrad.gates import require_norm_options
from lategrad.problems.problem import Problem, as_problem, is_stateful
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in, fill_in_delays
from lategrad.rules.rule import AnyRule
from lategrad.simulator.recorder import Recorder, rule_axes
from lategrad.simulator.run import Simulation
from lategrad.support.progress import progress_of
from lategrad.support.runs import map_tensors
from lategrad.support.validation import require, require_device, require_switch
from lategrad.trace import Axis, Trace, describe

Delays = DelayModel | StageDelays | int | str


def simulate(
    problem: Problem, rule: AnyRule[Any] | str, delays: Delays | Sequence[Delays], steps: int, *,
    seed: int | Sequence[int] = 0, record_every: int | None = None, device: torch.device | str = "cpu",
    share_samples: bool = True, compile: bool | Literal["rule"] | None = None, progress: bool | None = None,
    save_to: str | Path | None = None, axes: Sequence[str] | None = None, clip: float | None = None,
    max_norm_ratio: float | None = None, drift: bool = False,
) -> Trace:  # fmt: skip
    """Run a rule under late gradients; all combinations of seeds, delays and the rule's own runs at once.

    Args:
        problem: the objective and its oracle.
        rule: the server rule; hyper-parameters of shape ``(*runs, 1)`` make it a sweep. Or a text such as
            ``"steady:lr=0.1|1|10"`` (see :func:`lategrad.registry.parse_rule`).
        delays: a delay model, an integer for a constant delay, a specification such as
            ``"lognormal:7,0.4"``, delays by stage, or a list of those, which adds an axis of runs. By stage
            (:func:`~lategrad.delays.by_stage`) each block of the query is that of its own past version. A rule with
            ``delay_blocks`` is told the delay of each block, other rules and the trace get the longest one, and a
            ticket that is not a vector belongs to the longest one.
        steps: T, the number of updates.
        seed: of samples and delays; a list adds an axis of runs.
        record_every: updates between two records of loss and accuracy (they read all the data); by
            default ten records. The start and the end are always recorded.
        device: "cpu", "cuda", ...; the samples are the same on all.
        share_samples: runs with the same seed see the same samples, which makes them comparable and fast;
            False gives every run samples of its own.
        compile: compile gradient and update together (linear models with small batches to C, anything else with
            ``torch.compile``), or the rule's update alone ("rule", as a real server does); by default where it pays
            (:func:`lategrad.execution.compiling_pays`). Problems whose workers keep a state are not compiled by
            default. ``trace.config["backend"]`` says what ran: "loops", "compile" or "eager".
        progress: show a progress bar; by default on a terminal, and elsewhere a line every half a minute.
        save_to: write the trace to this file at every record, so that a killed run is not lost.
        axes: a name for every run dimension of the rule (and of the start); by default that of the one
            hyper-parameter that varies along it, or ``run0``, ``run1``, ... where there is not one.
        clip: clip gradients to this norm.
        max_norm_ratio: refuse gradients whose norm is more than this many times the median of the last hundred of
            their run, and the first twenty, from which the norms are learned; ``trace.config["refused"]`` counts them.
        drift: measure the distance between the query of each gradient, refused ones too, and the query at its arrival:
            the metric "drift", a mean since the last record; ``trace.certificate()`` has that of the run.

    Ctrl-C ends the run early and returns what was recorded (``trace.complete`` is then False).

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> rule = lg.Anytime(lg.OGD(lr=torch.tensor([[0.1], [1.0]]), domain=lg.Ball(1.0)))
    >>> trace = simulate(Quadratic(noise=0.1), rule, delays=[0, 50], steps=400, seed=[0, 1, 2])
    >>> [(axis.name, axis.values) for axis in trace.axes]
    [('seed', (0, 1, 2)), ('delay', (0, 50)), ('lr', (0.1..., 1.0))]
    >>> trace.loss.shape  # eleven records
    torch.Size([11, 3, 2, 2])
    """
    require("steps", steps, isinstance(steps, int) and steps >= 1, "an integer >= 1")
    valid_record = record_every is None or (isinstance(record_every, int) and record_every >= 1)
    require("record_every", record_every, valid_record, "an integer >= 1, or None")
    seeds, models = _as_tuple(seed), _as_tuple(delays)
    require("seed", seed, all(isinstance(s, int) and s >= 0 for s in seeds) and len(seeds) > 0, "integers >= 0")
    require("delays", delays, len(models) > 0, "at least one delay model")
    require_norm_options(clip, max_norm_ratio)
    require_switch("drift", drift)
    problem, rule = as_problem(problem), as_rule(rule)
    parsed = tuple(_as_model(model, problem) for model in models)
    arrivals = [[_draw(model, problem, steps, s, share_samples) for model in parsed] for s in seeds]
    profiles = [model if isinstance(model, StageDelays) else None for model in parsed]
    _warn_of_long_delays([_label(model) for model in models], arrivals, steps)

    rule = fill_in(rule, getattr(problem, "blocks", None))
    for profile in filter(None, profiles):
        rule = fill_in_delays(rule, profile.blocks)
    device = require_device("device", device)
    simulation = Simulation(problem.to(device), map_tensors(lambda leaf: leaf.to(device), rule), arrivals, seeds,
                            share_samples, compile, profiles, clip, max_norm_ratio, drift)  # fmt: skip
    single = (isinstance(seed, int), not isinstance(delays, Sequence) or isinstance(delays, str))
    all_axes = [Axis("seed", seeds), Axis("delay", tuple(_label(m) for m in models)),
                *rule_axes(rule, simulation.shape[2:-1], axes)]  # fmt: skip
    config = {"problem": repr(problem), "rule": describe(rule),
              "delays": [repr(model) if isinstance(model, StageDelays) else describe(model) for model in parsed],
              "seeds": list(seeds), "steps": steps, "share_samples": share_samples, "clip": clip,
              "max_norm_ratio": max_norm_ratio,
              "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
              "torch": torch.__version__}  # fmt: skip
    recorder = Recorder(simulation, all_axes, single, config, save_to)
    every = record_every or max(1, steps // 10)
    recorder.record(0)
    try:
        with progress_of("simulating: update", steps, progress) as report:
            for t in range(0, steps, every):
                until = min(t + every, steps)
                simulation.run(t, until, lambda done: report(completed=done))
                recorder.record(until)
    except KeyboardInterrupt:
        warnings.warn(f"interrupted: the trace ends after {recorder.steps[-1]} updates", stacklevel=2)
    return recorder.trace()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _as_model(value: Delays, problem: Problem) -> DelayModel | StageDelays:
    """Delays for a problem: a virtual cluster has its number of local steps per job; other models have no clocks."""
    if isinstance(value, StageDelays):
        require("delays", value, value.stashing, "with stashing: a problem takes its gradient at one point")
    model = value if isinstance(value, StageDelays) else as_delay_model(value)
    if not is_stateful(problem):
        return model
    timed = getattr(problem, "seconds", None) is not None and getattr(model, "local_steps", None) is None
    require("problem", problem, not timed, "one without seconds: simulated workers have clocks of their own")
    return model.with_local_steps(problem.local_steps) if isinstance(model, Cluster | Barrier) else model


def _label(value: Delays) -> int | str:
    if isinstance(value, Constant):
        return value.delay
    return value if isinstance(value, int | str) else repr(value)


def _draw(model: DelayModel | StageDelays, problem: Problem, steps: int, seed: int, share_samples: bool) -> Arrivals:
    if isinstance(model, StageDelays):
        require("delays", model, model.blocks.size == problem.dim, f"of the problem's {problem.dim} entries")
        longest = Constant(model.largest) if model.longest is None else Recorded(model.longest)
        return longest.draw(steps, seed)
    if not model.needs_labels:
        return model.draw(steps, seed)
    require("share_samples", share_samples, share_samples, "True when delays depend on the samples")
    labels = problem.labels(problem.samples(seed, 0, steps))
    require("problem", problem, labels is not None, "one with classes when delays depend on them")
    return model.draw(steps, seed, labels)


def _warn_of_long_delays(labels: list[int | str], arrivals: list[list[Arrivals]], steps: int) -> None:
    for i, label in enumerate(labels):
        if steps > 1 and all(bool((row[i].delays == torch.arange(steps)).all()) for row in arrivals):
            warnings.warn(f"delay {label} is too long for {steps} steps: every gradient is taken at the start",
                          stacklevel=3)  # fmt: skip
