"""Running it: steps are chosen with a seed of their own, for one worker and for all; every finished piece is kept."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lategrad.delays.clocks import Barrier, Cluster
from lategrad.simulator import simulate
from lategrad.trace import Trace, describe
from reproduction.deep.measuring import tensor_cores
from reproduction.jobs import Say
from reproduction.local.setup import TUNING_SEED, Config, Contender, Setting
from reproduction.sweep import find_trace, keep_trace

_RECORDS = 24
"""Along the way, of the runs that are shown."""
PROTOCOLS = ("frozen", "tuned")


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss against virtual time."""

    seconds: Tensor
    """``(records,)``, from 0."""
    gradients: Tensor
    """``(records,)``: how many had arrived by then."""
    losses: Tensor
    """``(records, seeds)``: on held-out data; infinite where the run has diverged."""

    @property
    def mean(self) -> Tensor:
        """Over seeds."""
        return self.losses.mean(1)

    def at_gradients(self, count: float) -> float:
        """The mean loss when so many gradients had arrived, between two records on a straight line."""
        return between(self.gradients.double(), self.mean, count)

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


def between(places: Tensor, values: Tensor, place: float) -> float:
    """The value at a place on the straight line between its neighbours; beyond the last, the last."""
    i = min(int(torch.searchsorted(places, place)), len(places) - 1)
    if i == 0:
        return values[0].item()
    share = min(1.0, (place - places[i - 1].item()) / (places[i] - places[i - 1]).item())
    return (values[i - 1] + share * (values[i] - values[i - 1])).item()


@dataclass(frozen=True, eq=False)
class Result:
    """How an outer rule trains a model."""

    contender: Contender
    step: dict[str, float]
    """The one that is best for one worker ("frozen"), and for all ("tuned")."""
    curves: dict[str, Curve]
    """With either."""
    at_end: dict[str, bool]
    """Whether the step is at an end of its grid, so that the best may lie beyond."""


def measure(config: Config, setting: Setting, contender: Contender, out: Path, *, device: str, say: Say) -> Result:
    """All numbers of one rule in one setting; what is finished is read from ``out/traces``."""
    run = Runner(setting, contender, out, device, say)
    chosen = {"tuned": run.tuned(), "frozen": run.frozen()}
    places = sorted(set(chosen.values()))
    shown = run.trace("shown", run.clock, [contender.steps[i] for i in places], config.all_seeds, records=_RECORDS)
    return Result(
        contender,
        step={protocol: contender.steps[i] for protocol, i in chosen.items()},
        curves={protocol: _curve(setting, contender, shown, places.index(i)) for protocol, i in chosen.items()},
        at_end={protocol: contender.is_at_end(i) for protocol, i in chosen.items()},
    )


def _best(trace: Trace) -> int:
    """The step with the smallest training loss at the end; what diverged is not it."""
    return int(torch.nan_to_num(trace.loss[-1, 0], nan=torch.inf, posinf=torch.inf).argmin())


def _curve(setting: Setting, contender: Contender, trace: Trace, place: int) -> Curve:
    assert trace.time is not None
    assert trace.test_loss is not None
    assert trace.local_steps is not None
    workers = setting.workers if contender.synchronous else 1
    taken = workers * torch.cat([torch.zeros(1), trace.local_steps[:, 0].cumsum(0)])
    seconds = torch.cat([trace.time.new_zeros(1), trace.time[:, 0]])
    losses = trace.test_loss[:, :, place]
    return Curve(seconds[trace.steps], taken[trace.steps], torch.nan_to_num(losses, nan=torch.inf, posinf=torch.inf))


@dataclass(frozen=True)
class Runner:
    """Runs one rule in one setting, and keeps a trace of every phase."""

    setting: Setting
    contender: Contender
    out: Path
    device: str
    say: Say

    @property
    def clock(self) -> Cluster | Barrier:
        """Of all workers."""
        return self.setting.together() if self.contender.synchronous else self.setting.cluster()

    def tuned(self) -> int:
        """The place in its grid of the step that is best for all workers."""
        return _best(self.trace("all", self.clock, self.contender.steps, [TUNING_SEED], records=1))

    def frozen(self) -> int:
        """That of the step that is best for one worker; an anchor is always tuned."""
        if self.contender.synchronous:
            return self.tuned()
        return _best(self.trace("one", self.setting.alone(), self.contender.steps, [TUNING_SEED], records=1))

    def trace(
        self, phase: str, clock: Cluster | Barrier, steps: Sequence[float], seeds: Sequence[int], records: int
    ) -> Trace:
        """Axes seed and lr; no vectors."""
        setting, contender = self.setting, self.contender
        rule = contender.build(steps, len(clock.workers))
        key = {"setting": setting.describe(), "rule": describe(rule), "clock": describe(clock), "seeds": list(seeds)}
        path = self.out / "traces" / f"local-{setting.name}-{contender.rule}-{phase}.safetensors"
        found = find_trace(path, key)
        if found is not None:
            return found
        synchronous = isinstance(clock, Barrier)
        problem = setting.synchronous() if synchronous else setting.problem()
        updates = setting.rounds if synchronous else setting.updates(clock)  # type: ignore[arg-type]
        begin = time.monotonic()
        with tensor_cores:
            trace = simulate(problem, rule, clock, updates, seed=list(seeds), device=self.device,
                             record_every=max(1, updates // records))  # fmt: skip
        self.say(f"local: {setting.name}, {contender.rule}, {phase}: {len(steps) * len(seeds)} runs of {updates:,} "
                 f"updates in {time.monotonic() - begin:.1f} s")  # fmt: skip
        small = dataclasses.replace(trace, output=trace.output[..., :0], query=trace.query[..., :0])
        return keep_trace(path, key, small)
