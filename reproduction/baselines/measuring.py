"""Running it: all steps of a rule under all delays as one simulation, judged at its output and at its query.

Small data sets stay on the CPU even where there is a GPU, which has the others to do.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lategrad.problems import SoftmaxRegression
from lategrad.simulator import simulate
from lategrad.trace import Axis, Trace, describe
from reproduction import style
from reproduction.baselines.setup import (
    SCENARIOS,
    TOO_LARGE,
    Config,
    Contender,
    Setting,
    config_for,
    scenarios_for,
)
from reproduction.jobs import Job
from reproduction.part import Run
from reproduction.sweep import cached_trace

RUN_STEP = 5e-6
"""Seconds of one core for one update of one run on digits, about; for forecasts."""
POINTS = ("output", "query")
"""Where a run is judged: at the rule's own output, and at its last query (most rules' last iterate)."""


def jobs(run: Run) -> list[Job]:
    """A job for every rule on every data set and set."""
    config, made = config_for(run), []
    for setting in config.settings:
        for domain in config.domains:
            for contender in config.contenders:
                runs = (len(contender.steps[:: config.every_step]) * max(1, len(contender.values)) * len(SCENARIOS)
                        * config.seeds)  # fmt: skip
                small = setting.data not in TOO_LARGE
                made.append(Job(
                    f"baselines: {setting.data}, {domain[0]}, {style.TITLES[contender.rule]}",
                    6 + runs * setting.updates * RUN_STEP if small else 30,
                    partial(measure, config, setting, domain, contender, run.out, device=run.device),
                    (_path(run.out, setting, domain, contender),),
                    "processes" if small else "gpu",
                ))  # fmt: skip
    return made


def _path(out: Path, setting: Setting, domain: tuple[str, str], contender: Contender) -> Path:
    return out / "traces" / f"baselines-{setting.data}-{domain[0]}-{contender.rule}.safetensors"


def measure(config: Config, setting: Setting, domain: tuple[str, str], contender: Contender, out: Path, *,
            device: str) -> Trace:  # fmt: skip
    """All steps of a rule under all delays: axes seed, delay, knob, step and point; no vectors."""
    device = device if setting.data in TOO_LARGE else "cpu"
    problem, (_, the_set) = config.problem(setting), domain
    kinds = scenarios_for(problem.outputs)
    scenarios = {label: describe(delays) for label, delays in kinds.items()}
    rule = contender.build(the_set, config.every_step)
    key = {"setting": dataclasses.asdict(setting), "seeds": config.seeds,
           "rule": describe(rule), "scenarios": scenarios}  # fmt: skip

    def run() -> Trace:
        trace = simulate(
            problem, rule, list(kinds.values()), setting.updates, device=device,
            seed=[setting.first_seed + k for k in range(config.seeds)],
            record_every=setting.updates, compile=setting.updates > 10_000,
        )  # fmt: skip
        return _at_both_points(trace, contender, problem, device)

    return cached_trace(_path(out, setting, domain, contender), key, run)


def _at_both_points(trace: Trace, contender: Contender, problem: SoftmaxRegression, device: str) -> Trace:
    """The end of a run, judged at the rule's output and at its query; the vectors are left behind."""
    on_device, query = problem.to(device), trace.query.to(device)
    accuracy = on_device.accuracy(query)
    assert trace.accuracy is not None
    assert accuracy is not None
    at_query = {"loss": on_device.loss(query).squeeze(-1).cpu(), "accuracy": accuracy.squeeze(-1).cpu()}
    at_output = {"loss": trace.loss[-1], "accuracy": trace.accuracy[-1]}
    number = next(axis for axis in trace.axes if axis.name not in ("seed", "delay", contender.knob, "run0"))
    axes = (trace.axis("seed"), Axis("delay", tuple(SCENARIOS)), Axis("knob", contender.values or ("",)),
            Axis("lr", number.values), Axis("point", POINTS))  # fmt: skip
    both: dict[str, Any] = {
        name: torch.stack([at_output[name], at_query[name]], dim=-1).unsqueeze(0) for name in at_output
    }
    return dataclasses.replace(
        trace, steps=trace.steps[-1:], axes=axes, delays=trace.delays[-1:], time=None, worker=None,
        output=trace.output[..., :0], query=trace.query[..., :0], **both,
    )  # fmt: skip
