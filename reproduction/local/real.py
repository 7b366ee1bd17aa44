"""The same for real: worker processes on this machine, half of them slowed, every outer rule for the same wall time.

Workers are slowed by pauses that are far longer than what they compute (``slow=`` of :func:`lategrad.train`). So the
pauses set their speeds, and four workers can share two cores. On a machine with more to do than it has cores, computing
takes longer, too: the number of updates that each rule made in its time shows that.
"""

import dataclasses
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lategrad as lg
from lategrad.delays.clocks import Worker
from lategrad.serve import Settings
from lategrad.trace import Trace, describe
from reproduction.local.curves import Curve, LocalCurves, VirtualRuns
from reproduction.local.plan import ANCHOR, CANDIDATES, LocalSetting, build_outer
from reproduction.local.rounds import train_in_rounds
from reproduction.local.study import csv_rows, plot, ranked, table
from reproduction.report import Section, prose
from reproduction.study import Candidate, Plan, Study, Task, Workspace, finite_loss
from reproduction.style import loss_in_table, three_digits

_POINTS = 25  # of a curve; records are about as frequent
_MOST_UPDATES = 10**6  # the time ends a run before that
_TIME_IS_UP = "stopped by on_record"
_OVERHEAD = 6.0  # seconds before and after a training, about; for forecasts
_PROTOCOL = "frozen"
_CHOOSING = {"cnn": 1.0, "gpt": 10.0}
"""Seconds on one core in which the learning rate of a rule is chosen, for each round, about; for forecasts."""


@dataclass(frozen=True)
class TwoSpeeds(LocalSetting):
    """Half of the workers are fast and half are slow; all times are real seconds."""

    workers: int = 4
    fastest: float = 0.01  # for a gradient, where a pause stands for it; computing comes on top
    slowest: float = 0.06

    @property
    def name(self) -> str:
        return f"real-{super().name}"

    def speeds(self) -> list[Worker]:
        """The fast ones first."""
        half = self.workers // 2
        return [Worker(mean=self.fastest)] * (self.workers - half) + [Worker(mean=self.slowest)] * half


_CNN = partial(TwoSpeeds, "cnn", local_steps=20, batch=32, inner="adamw:lr=0.003")
_GPT = partial(TwoSpeeds, "gpt", local_steps=20, batch=8, inner="adamw:lr=0.001", layers=2, width=64, evaluate=512,
               fastest=0.05, slowest=0.3)  # fmt: skip
_SHORT = (_CNN(rounds=25), _GPT(rounds=10, only_by_name=True))
PLANS = {
    "quick": Plan(_SHORT, CANDIDATES, seeds=1, judged=False),
    "paper": Plan(_SHORT, CANDIDATES, seeds=3, judged=False),
    "full": Plan((_CNN(rounds=100), _GPT(rounds=50)), CANDIDATES, seeds=3, judged=False),
}
"""The GPT's jobs need more computing, and get longer pauses. The scale paper repeats the quick one with more seeds."""


@dataclass(frozen=True, eq=False)
class RealCurves(LocalCurves):
    """How an outer rule trains a model for real."""

    accuracy: float  # on held-out data at the end of the time, the mean over seeds
    updates: float  # in the time, the mean over seeds
    delays: Tensor  # of all updates in the time


class LocalReal(Study[TwoSpeeds, RealCurves]):
    """Learning rates are chosen by jobs in virtual time; then trainings have the machine to themselves, one by one."""

    name = "local-real"
    plans = PLANS
    only_by_name = True
    has_models = True

    def seconds(self, task: Task[TwoSpeeds]) -> float:
        return _CHOOSING[task.setting.model] * task.setting.rounds

    def prepare(self, task: Task[TwoSpeeds]) -> int:
        return VirtualRuns(task).frozen()

    def section_of(self, plan: Plan[TwoSpeeds], space: Workspace) -> Section:
        seconds = [plan.seeds * (task.setting.seconds + _OVERHEAD) for task in plan.tasks(space)]
        space.say(f"local: {plan.seeds * len(seconds)} real trainings, {sum(seconds) / 60:.0f} minutes unless finished")
        return super().section_of(plan, space)

    def measure(self, task: Task[TwoSpeeds]) -> RealCurves:
        setting, candidate = task.setting, task.candidate
        position = VirtualRuns(task).frozen()
        traces = [train_for_real(task, candidate.lrs[position], seed) for seed in range(task.seeds)]
        curves = real_curves(setting, candidate, position, traces)
        task.space.say(f"local: {setting.name}, {candidate.rule}: {curves.updates:.0f} updates in "
                       f"{setting.seconds:.0f} s, held-out loss {loss_in_table(curves.final(_PROTOCOL))}")  # fmt: skip
        return curves

    def show(self, plan: Plan[TwoSpeeds], panels: dict[TwoSpeeds, dict[str, RealCurves]]) -> Section:
        return Section(
            name=self.name,
            title="Local steps, for real. Processes of different speed",
            text=prose("local-real", settings=list(panels), seeds=plan.seeds)[0],
            figures={f"local-{s.name}": plot(s, panel, _PROTOCOL, real=True) for s, panel in panels.items()},
            captions={f"local-{s.name}": f"{s.title}: held-out loss in real time." for s in panels},
            tables={f"{s.title}, for real": real_table(s, panel) for s, panel in panels.items()},
            rows=[row for s, panel in panels.items() for curves in panel.values() for row in csv_rows(s, curves)],
            config=dataclasses.asdict(plan),
        )  # fmt: skip


def train_for_real(task: Task[TwoSpeeds], lr: float, seed: int) -> Trace:
    """One real training, recorded in a folder of its own under ``out/runs``; a finished one is found again."""
    setting, candidate, space = task.setting, task.candidate, task.space
    name = f"local-{setting.name}-{candidate.rule}-{seed}"
    rule = build_outer(candidate, lr, setting.workers)
    settings: dict[str, Any] = {"steps": _MOST_UPDATES, "workers": setting.workers, "slow": setting.pauses(),
                                "seed": seed, "device": space.device}  # fmt: skip
    recorded_at: list[float] = []

    def stop_in_time(telemetry: Any, output: Tensor) -> str | None:
        """Starting the workers, before the first record, is not counted."""
        recorded_at.append(telemetry.seconds)
        return "stop" if telemetry.seconds - recorded_at[0] >= setting.seconds else None

    def run() -> Trace:
        if candidate.rule == ANCHOR:
            return train_in_rounds(setting.problem(), rule, Settings(**settings), setting.seconds)
        folder = space.out / "runs" / name
        if folder.exists():  # interrupted, or made from other choices
            shutil.rmtree(folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_TIME_IS_UP)
            trace = lg.train(
                setting.problem(), rule, **settings, engine="processes", compile=False, progress=False, out=folder,
                record_every=max(1, setting.updates(setting.cluster()) // _POINTS), on_record=stop_in_time,
            )  # fmt: skip
        if trace.config["stopped"] != _TIME_IS_UP:
            raise KeyboardInterrupt
        return dataclasses.replace(trace, config=trace.config | {"steps": len(trace.delays)})  # it is complete

    return space.trace(name, {"setting": setting.describe(), "rule": describe(rule), "seed": seed}, run)


def real_curves(setting: LocalSetting, candidate: Candidate, position: int, traces: Sequence[Trace]) -> RealCurves:
    """What traces say up to the end of the time, interpolated linearly between records."""
    grid = torch.linspace(0, setting.seconds, _POINTS, dtype=torch.float64)
    losses, gradients, accuracies, in_time = [], [], [], []
    for trace in traces:
        assert trace.time is not None
        assert trace.local_steps is not None
        recorded = trace.recorded()
        begin = 0.0  # of rounds, which are timed from there
        if trace.worker is not None:  # when the workers got their first jobs: before the one that came back first
            begin = trace.time[0].item() - setting.local_steps * setting.speeds()[int(trace.worker[0])].mean
        time = torch.cat([torch.zeros(1, dtype=torch.float64), trace.time - begin])
        at = time[trace.steps]
        losses.append(np.interp(grid, at, recorded["test_loss"]))
        gradients.append(np.interp(grid, time, torch.cat([torch.zeros(1), trace.local_steps.cumsum(0)])))
        accuracies.append(float(np.interp(setting.seconds, at, recorded["accuracy"])))
        in_time.append(trace.delays[time[1:] <= setting.seconds])
    return RealCurves(
        candidate,
        choice={_PROTOCOL: position},
        curves={_PROTOCOL: Curve(grid, torch.tensor(np.mean(gradients, 0)),
                                 finite_loss(torch.tensor(np.stack(losses, 1))))},
        accuracy=sum(accuracies) / len(traces),
        updates=sum(map(len, in_time)) / len(traces),
        delays=torch.cat(in_time),
    )  # fmt: skip


def real_table(setting: LocalSetting, panel: dict[str, RealCurves]) -> list[dict[str, str]]:
    order = [panel[curves.candidate.rule] for curves in ranked(panel, _PROTOCOL)]
    return [
        row | {"accuracy": three_digits(curves.accuracy), "updates": f"{curves.updates:.0f}",
               "mean delay": f"{curves.delays.double().mean():.1f}" if len(curves.delays) else "",
               "longest delay": f"{max(curves.delays.tolist(), default=0)}"}
        for row, curves in zip(table(setting, panel, _PROTOCOL), order, strict=True)
    ]  # fmt: skip
