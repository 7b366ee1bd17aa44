"""Running it: learning rates are chosen with a seed of their own, for one worker and for all; finished pieces are
kept."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lategrad.delays.clocks import Barrier, Cluster
from lategrad.problems import Synchronous
from lategrad.simulator import simulate
from lategrad.trace import Trace, describe
from reproduction.local.plan import TUNING_SEED, LocalSetting, build_outer
from reproduction.study import Candidate, Task, column, finite_loss

_RECORDS = 24  # over time, of the runs that are shown
PROTOCOLS = ("frozen", "tuned")


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss against virtual time."""

    seconds: Tensor  # ``(records,)``, from 0
    gradients: Tensor  # ``(records,)``: how many had arrived by then
    losses: Tensor  # ``(records, seeds)``: on held-out data; infinite where the run has diverged

    @property
    def mean(self) -> Tensor:
        return self.losses.mean(1)

    def at_gradients(self, count: float) -> float:
        """The mean loss when n gradients had arrived, interpolated linearly between records."""
        return float(np.interp(count, self.gradients, self.mean))

    def reaches(self, loss: float) -> float | None:
        """The virtual second after which the mean loss is never above this again; None if it is at the end."""
        above = (self.mean > loss).nonzero()
        if not len(above):
            return 0.0
        i = int(above[-1]) + 1
        if i == len(self.mean):
            return None
        before, after = self.mean[i - 1].item(), self.mean[i].item()
        share = (before - loss) / (before - after) if before < torch.inf else 1.0
        return (self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])).item()


@dataclass(frozen=True, eq=False)
class LocalCurves:
    """How an outer rule trains a model."""

    candidate: Candidate
    choice: dict[str, int]
    """The position of the learning rate that is best for one worker ("frozen"), and for all ("tuned")."""
    curves: dict[str, Curve]  # with either

    def lr(self, protocol: str) -> float:
        return self.candidate.lrs[self.choice[protocol]]

    def final(self, protocol: str) -> float:
        return self.curves[protocol].mean[-1].item()


class VirtualRuns:
    """Runs one rule in one setting in virtual time, and keeps a trace of every phase."""

    def __init__(self, task: Task[Any]) -> None:
        self.setting: LocalSetting = task.setting
        self.candidate, self.space = task.candidate, task.space

    @property
    def clock(self) -> Cluster | Barrier:
        return self.setting.barrier() if self.candidate.synchronous else self.setting.cluster()

    def curves(self, seeds: Sequence[int]) -> LocalCurves:
        choice = {"tuned": self.tuned(), "frozen": self.frozen()}
        positions = sorted(set(choice.values()))
        lrs = [self.candidate.lrs[i] for i in positions]
        trace = self.trace("shown", self.clock, lrs, seeds, records=_RECORDS)
        curves = {protocol: self._curve(trace, positions.index(i)) for protocol, i in choice.items()}
        return LocalCurves(self.candidate, choice, curves)

    def tuned(self) -> int:
        """The position in its grid of the learning rate that is best for all workers."""
        return _best(self.trace("all", self.clock, self.candidate.lrs, [TUNING_SEED], records=1))

    def frozen(self) -> int:
        """That of the learning rate that is best for one worker; an anchor is always tuned."""
        if self.candidate.synchronous:
            return self.tuned()
        return _best(self.trace("one", self.setting.fastest_alone(), self.candidate.lrs, [TUNING_SEED], records=1))

    def trace(
        self, phase: str, clock: Cluster | Barrier, lrs: Sequence[float], seeds: Sequence[int], records: int
    ) -> Trace:
        """Axes seed and lr; no vectors."""
        setting, rule = self.setting, build_outer(self.candidate, column(lrs), len(clock.workers))
        key = {"setting": setting.describe(), "rule": describe(rule), "clock": describe(clock), "seeds": list(seeds)}

        def run() -> Trace:
            begin = time.monotonic()
            each = setting.problem()
            problem = Synchronous(each, setting.workers) if isinstance(clock, Barrier) else each
            updates = setting.rounds if isinstance(clock, Barrier) else setting.updates(clock)
            trace = simulate(problem, rule, clock, updates, seed=list(seeds), device=self.space.device,
                             record_every=max(1, updates // records))  # fmt: skip
            self.space.say(f"local: {setting.name}, {self.candidate.rule}, {phase}: {len(lrs) * len(seeds)} runs of "
                           f"{updates:,} updates in {time.monotonic() - begin:.1f} s")  # fmt: skip
            return dataclasses.replace(trace, output=trace.output[..., :0], query=trace.query[..., :0])

        return self.space.trace(f"local-{setting.name}-{self.candidate.rule}-{phase}", key, run)

    def _curve(self, trace: Trace, position: int) -> Curve:
        assert trace.time is not None
        assert trace.local_steps is not None
        workers = self.setting.workers if self.candidate.synchronous else 1
        gradients = workers * torch.cat([torch.zeros(1), trace.local_steps[:, 0].cumsum(0)])
        seconds = torch.cat([trace.time.new_zeros(1), trace.time[:, 0]])
        losses = trace.recorded()["test_loss"][:, :, position]
        return Curve(seconds[trace.steps], gradients[trace.steps], finite_loss(losses))


def _best(trace: Trace) -> int:
    return int(finite_loss(trace.loss[-1, 0]).argmin())
