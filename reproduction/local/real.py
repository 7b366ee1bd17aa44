"""The same for real: worker processes on this machine, half of them slowed, every outer rule for the same wall time.

Workers are slowed by pauses that are far longer than what they compute (``slow=`` of :func:`lategrad.train`). So the
pauses set their speeds, and four workers can share two cores. On a machine with more to do than it has cores computing
takes longer, too: the number of updates that each rule made in its time tells.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lategrad.delays.clocks import Worker
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.observe.watch import OnRecord
from lategrad.serve.settings import Settings
from lategrad.serve.training import train
from lategrad.trace import Trace, describe
from reproduction.jobs import Job, Say, to_stderr
from reproduction.local.measuring import Curve, Result, Runner, between
from reproduction.local.rounds import train_in_rounds
from reproduction.local.setup import RULES, Config, Contender, Setting
from reproduction.local.summary import TITLES, plot, ranked, rows, table, title
from reproduction.part import Run
from reproduction.results import Section
from reproduction.style import loss_in_table, three_digits
from reproduction.sweep import load_trace

_POINTS = 25
"""Of a curve; records are about as frequent."""
_ENDLESS = 10**6
"""Updates: time ends a run."""
_TIME_IS_UP = "stopped by on_record"
_AROUND = 6.0
"""Seconds before and after a training, about; for forecasts."""
_PROTOCOL = "frozen"
_CHOOSING = {"cnn": 1.0, "gpt": 10.0}
"""Seconds on one core in which the step of a rule is chosen, for each round, about; for forecasts."""


@dataclass(frozen=True)
class TwoSpeeds(Setting):
    """Half of the workers are fast and half are slow; all times are seconds of a clock on the wall."""

    workers: int = 4
    fastest: float = 0.01
    """For a gradient, where a pause stands for it; what is computed comes on top."""
    slowest: float = 0.06

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"real-{super().name}"

    def speeds(self) -> list[Worker]:
        """The fast ones first."""
        half = self.workers // 2
        return [Worker(mean=self.fastest)] * (self.workers - half) + [Worker(mean=self.slowest)] * half


_CNN = partial(TwoSpeeds, "cnn", local_steps=20, batch=32, inner="adamw:lr=0.003")
_GPT = partial(TwoSpeeds, "gpt", local_steps=20, batch=8, inner="adamw:lr=0.001", layers=2, width=64, evaluate=512,
               fastest=0.05, slowest=0.3)  # fmt: skip

CONFIGS = {
    "quick": Config((_CNN(rounds=25), _GPT(rounds=10, only_by_name=True)), rules=RULES, seeds=1, targets=False),
    "paper": Config((_CNN(rounds=25), _GPT(rounds=10, only_by_name=True)), rules=RULES, seeds=3, targets=False),
    "full": Config((_CNN(rounds=100), _GPT(rounds=50)), rules=RULES, seeds=3, targets=False),
}
"""The GPT's jobs need more computing, and get longer pauses. The scale paper repeats the quick one with more seeds."""


@dataclass(frozen=True, eq=False)
class RealResult(Result):
    """How an outer rule trains a model for real."""

    accuracy: float
    """On held-out data at the end of the time, the mean over seeds."""
    updates: float
    """In the time, the mean over seeds."""
    delays: Tensor
    """Of all updates in the time."""


def train_for_real(setting: Setting, contender: Contender, step: float, seed: int, out: Path, *, device: str) -> Trace:
    """One real training, recorded in a folder of its own under ``out/runs``, where a finished one is found again."""
    folder = out / "runs" / f"local-{setting.name}-{contender.rule}-{seed}"
    rule = contender.build(step, setting.workers)
    key = {"setting": setting.describe(), "rule": describe(rule), "seed": seed}
    found = _find(folder / "trace.safetensors", key)
    if found is not None:
        return found
    if folder.exists():  # broken off, or from other choices
        shutil.rmtree(folder)
    settings: dict[str, Any] = {
        "steps": _ENDLESS, "workers": setting.workers, "slow": setting.pauses(), "seed": seed, "device": device,
        "notes": {"made_from": key},
    }  # fmt: skip
    if contender.synchronous:
        trace = train_in_rounds(setting.problem(), rule, Settings(**settings), setting.seconds)
        trace.save(folder / "trace.safetensors")
        return trace
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_TIME_IS_UP)
        trace = train(
            setting.problem(), rule, **settings, engine="processes", compile=False, progress=False, out=folder,
            record_every=max(1, setting.updates(setting.cluster()) // _POINTS), on_record=_until(setting.seconds),
        )  # fmt: skip
    if trace.config["stopped"] != _TIME_IS_UP:
        raise KeyboardInterrupt
    return trace


def _find(path: Path, key: dict[str, Any]) -> Trace | None:
    """The trace of a training that was made from the same choices and had all of its time."""
    found = load_trace(path)
    if found is None or found.config["stopped"] not in (None, _TIME_IS_UP):
        return None
    return found if found.config["settings"]["notes"] == {"made_from": key} else None


def _until(seconds: float) -> OnRecord:
    """Ends a run so many seconds after its first record: starting the workers is not counted."""
    first: list[float] = []

    def look(telemetry: Telemetry, output: Tensor) -> str | None:
        first.append(telemetry.seconds)
        return "stop" if telemetry.seconds - first[0] >= seconds else None

    return look


def _begin(setting: Setting, trace: Trace) -> float:
    """When the workers got their first jobs: before the first that came back, by its pause."""
    if trace.worker is None:  # rounds are timed from there
        return 0.0
    assert trace.time is not None
    first = setting.speeds()[int(trace.worker[0])]
    return trace.time[0].item() - setting.local_steps * first.mean


def measure_for_real(
    config: Config, setting: Setting, contender: Contender, out: Path, *, device: str, say: Say
) -> RealResult:
    """All numbers of one rule: its step is chosen in virtual time, then everything is real."""
    place = Runner(setting, contender, out, device, say).frozen()
    step = contender.steps[place]
    traces = [train_for_real(setting, contender, step, seed, out, device=device) for seed in config.all_seeds]
    result = result_of(setting, contender, place, traces)
    say(f"local: {setting.name}, {contender.rule}: {result.updates:.0f} updates in {setting.seconds:.0f} s, "
        f"held-out loss {loss_in_table(result.curves[_PROTOCOL].mean[-1].item())}")  # fmt: skip
    return result


def result_of(setting: Setting, contender: Contender, place: int, traces: Sequence[Trace]) -> RealResult:
    """What traces say up to the end of the time; between two records on a straight line."""
    grid = torch.linspace(0, setting.seconds, _POINTS, dtype=torch.float64)
    losses, gradients, accuracies, in_time = [], [], [], []
    for trace in traces:
        assert trace.time is not None
        assert trace.local_steps is not None
        assert trace.test_loss is not None
        assert trace.accuracy is not None
        time = torch.cat([torch.zeros(1, dtype=torch.float64), trace.time - _begin(setting, trace)])
        taken = torch.cat([torch.zeros(1), trace.local_steps.cumsum(0)])
        recorded = time[trace.steps]
        losses.append(_at(grid, recorded, trace.test_loss))
        gradients.append(_at(grid, time, taken))
        accuracies.append(between(recorded, trace.accuracy, setting.seconds))
        in_time.append(trace.delays[time[1:] <= setting.seconds])
    whole = torch.nan_to_num(torch.stack(losses, 1), nan=torch.inf, posinf=torch.inf)
    return RealResult(
        contender,
        step={_PROTOCOL: contender.steps[place]},
        curves={_PROTOCOL: Curve(grid, torch.stack(gradients).mean(0), whole)},
        at_end={_PROTOCOL: contender.is_at_end(place)},
        accuracy=sum(accuracies) / len(traces),
        updates=sum(map(len, in_time)) / len(traces),
        delays=torch.cat(in_time),
    )


def _at(grid: Tensor, places: Tensor, values: Tensor) -> Tensor:
    return torch.tensor([between(places, values, place) for place in grid.tolist()], dtype=torch.float64)


def real_table(setting: Setting, panel: dict[str, RealResult]) -> list[dict[str, str]]:
    """That of virtual time, and what only real workers have."""
    compared = table(setting, dict(panel), _PROTOCOL)
    results = [panel[result.contender.rule] for result in ranked(dict(panel), _PROTOCOL)]
    return [
        row
        | {
            "accuracy": three_digits(result.accuracy),
            "updates": f"{result.updates:.0f}",
            "mean delay": f"{result.delays.double().mean():.1f}" if len(result.delays) else "",
            "longest delay": f"{max(result.delays.tolist(), default=0)}",
        }
        for row, result in zip(compared, results, strict=True)
    ]


def jobs(run: Run) -> list[Job]:
    """Steps are chosen beside each other, each on a core; the trainings have the machine for themselves, afterwards."""
    config = CONFIGS[run.scale].limited(run.models, run.rules)
    return [
        Job(f"local: {setting.name}, {TITLES[contender.rule]}, step", _CHOOSING[setting.model] * setting.rounds,
            partial(choose_step, setting, contender, run.out, device=run.device, say=to_stderr),
            lane="processes" if run.device == "cpu" else "streams")
        for setting in config.settings for contender in config.contenders
    ]  # fmt: skip


def choose_step(setting: Setting, contender: Contender, out: Path, *, device: str, say: Say) -> float:
    """In virtual time, where workers take as long as the pauses of the real ones."""
    return contender.steps[Runner(setting, contender, out, device, say).frozen()]


def section(run: Run) -> Section:
    """Everything at a scale."""
    return section_of(CONFIGS[run.scale].limited(run.models, run.rules), run.out, device=run.device)


def section_of(config: Config, out: Path, *, device: str, say: Say = to_stderr) -> Section:
    """Train with every rule, one training after another."""
    minutes = sum(setting.seconds + _AROUND for setting in config.settings) * config.seeds * len(config.contenders) / 60
    say(f"local: real trainings with {len(config.contenders)} outer rules, {minutes:.0f} minutes if none are kept")
    panels = {
        setting: {
            contender.rule: measure_for_real(config, setting, contender, out, device=device, say=say)
            for contender in sorted(config.contenders, key=lambda one: not one.synchronous)
        }
        for setting in config.settings
    }
    return Section(
        name="local-real",
        title="Local steps on workers of different speed, for real",
        text=(
            "; ".join(f"{title(s)}, batch {s.batch}, inner {s.inner}, {s.seconds:g} seconds" for s in panels)
            + f"; {config.seeds} seed(s). Workers are processes on one machine. Half of them pause for "
            + "; ".join(f"{s.local_steps * s.speeds()[0].mean:g} seconds for each job and the others for "
                        f"{s.local_steps * s.slowest:g}" for s in panels)
            + ", on top of what they compute.",
            "Synchronous DiLoCo: in every round the server waits for all workers, then makes one update of Nesterov "
            "momentum with their mean. The others get each worker's pseudo-gradient as it arrives.",
            "Outer steps are frozen: chosen in virtual time for one fast worker alone, by its training loss, with a "
            "seed that is not shown; that of synchronous DiLoCo for all workers. Equal gradients: the loss on held-out "
            "data when as many gradients had arrived as synchronous training uses in all; equal time: at the end. Time "
            "to synchronous loss: the share of the time after which the loss stays below the one that synchronous "
            "training ends with. Accuracy, updates and delays are those at the end of the time.",
        ),
        figures={f"local-{s.name}": plot(s, dict(panel), _PROTOCOL, real=True) for s, panel in panels.items()},
        captions={f"local-{s.name}": f"{title(s)}: held-out loss in real time." for s in panels},
        tables={f"{title(s)}, for real": real_table(s, panel) for s, panel in panels.items()},
        rows=[row for s, panel in panels.items() for result in panel.values() for row in rows(s, result)],
        config=dataclasses.asdict(config),
    )  # fmt: skip
