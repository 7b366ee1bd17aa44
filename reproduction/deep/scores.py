"""Running it: all learning rates at the delays that are tuned at, the frozen one everywhere; every finished piece is
kept."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lategrad.delays.stages import StageDelays
from lategrad.rules import needs_ticket
from lategrad.simulator import Delays, simulate
from lategrad.trace import Axis, Trace, describe
from reproduction.deep.plan import LENGTHS, PIPELINE, DeepSetting, LargeSetting, PipelineSetting
from reproduction.study import Candidate, Task, finite_loss

HISTORY_BYTES = {"cpu": 6 * 2**30, "cuda": 48 * 2**30}
"""What the waiting queries of runs that are simulated together may take."""
_LARGE = ("loss", "test_loss", "drift")  # what is measured of a large model


@dataclass(frozen=True, eq=False)
class DeepScores:
    """How a rule trains a model: scores are accuracies, or losses on held-out text."""

    candidate: Candidate
    by_loss: bool
    choice: dict[str, int]
    """The position of the best learning rate, by the training loss of the first seed, at every delay tuned at."""
    grids: dict[str, Tensor]  # ``(seeds, lrs)``: scores of all learning rates, at the delays that are tuned at
    frozen: dict[str, Tensor]
    """``(seeds,)``: scores of the learning rate that is best without delay, at every delay; anchors: of the tuned."""
    drift: dict[str, Tensor]  # ``(seeds,)``: V of the runs in ``frozen``
    traces: list[Trace]  # what all that was read from; axes delay, seed and lr
    slowdown: dict[str, Tensor] = field(default_factory=dict)  # ``(1,)``: of pipelines, as :func:`slowdown` has it

    @property
    def tuned(self) -> dict[str, Tensor]:
        """``(seeds,)``: scores of the best learning rate at each delay; for anchors, of all seeds."""
        if self.candidate.synchronous:
            return self.frozen
        return {delay: grid[:, self.choice[delay]] for delay, grid in self.grids.items()}

    def lr(self, delay: str = "0") -> float:
        return self.candidate.lrs[self.choice[delay]]

    def mean(self, delay: str) -> float:
        return self.frozen[delay].mean().item()


def score_rule(task: Task[DeepSetting]) -> DeepScores:
    run, setting, candidate = _Runner(task), task.setting, task.candidate
    seeds = tuple(range(task.seeds))
    first, others = seeds[: setting.tuning_seeds], seeds[setting.tuning_seeds :]
    anchor = bool(candidate.synchronous)  # tuned at every number of rounds
    source = {delay: str(setting.mean_delay(delay)) if anchor else delay for delay in setting.delays}
    tuned_at = [delay for delay in dict.fromkeys(source.values()) if anchor or delay in setting.tuned_at]
    grid = run.traces("grid", dict.fromkeys(tuned_at, (candidate.lrs, first)))
    choice = {delay: best_position(trace) for delay, trace in grid.items()}
    shown = {delay: choice[delay if anchor else "0"] for delay in source.values()}
    rest = {delay: ((candidate.lrs[at],), others if delay in grid else seeds) for delay, at in shown.items()}
    chosen = run.traces("chosen", {delay: runs for delay, runs in rest.items() if runs[1]})

    def of_shown(delay: str, read: Callable[[Trace], Tensor]) -> Tensor:
        parts = [read(grid[delay])[:, shown[delay]]] if delay in grid else []
        return torch.cat(parts + ([read(chosen[delay])[:, 0]] if delay in chosen else []))

    score = partial(final_scores, by_loss=setting.by_loss)
    frozen = {delay: of_shown(of, score) for delay, of in source.items()}
    ratios = {}
    if isinstance(setting, PipelineSetting):
        ends = {setting.updates: frozen["0"][0].item()}
        for other in (replace(setting, updates=round(length * setting.updates)) for length in LENGTHS):
            runs: dict[str, _Runs] = {"0": ((candidate.lrs[choice["0"]],), seeds[:1])}
            ends[other.updates] = score(_Runner(replace(task, setting=other)).traces("chosen", runs)["0"]).item()
        ratios = {delay: torch.tensor([slowdown(ends, end[0].item())]) for delay, end in frozen.items()}
    return DeepScores(
        candidate,
        by_loss=setting.by_loss,
        choice={delay: choice[of] for delay, of in source.items() if of in choice},
        grids={delay: score(trace) for delay, trace in grid.items()},
        frozen=frozen,
        drift={delay: of_shown(of, lambda trace: trace.metrics["drift"][-1, 0]) for delay, of in source.items()},
        traces=[*grid.values(), *chosen.values()],
        slowdown=ratios,
    )


def slowdown(undelayed: Mapping[int, float], loss: float) -> float:
    """How many times the updates that undelayed runs need to end with a loss, the longest of them takes.

    Between lengths the logarithm of their losses at the end is taken to be linear in that of their updates. Infinite if
    the shortest run is better already.

    >>> slowdown({25: 4.0, 100: 1.0}, 2.0), slowdown({25: 4.0, 100: 1.0}, 4.1)
    (2.0, inf)
    """
    updates, losses = np.log(sorted(undelayed.items())).T
    needed = float(np.interp(-math.log(loss), -np.minimum.accumulate(losses), updates))
    return math.inf if loss > max(undelayed.values()) else math.exp(updates[-1] - needed)


def best_position(trace: Trace) -> int:
    """The learning rate with the smallest training loss of the first seed; not one that diverged."""
    return int(finite_loss(trace.loss[-1, 0, 0]).argmin())


def final_scores(trace: Trace, by_loss: bool) -> Tensor:
    """``(seeds, lrs)``; a run that diverged has accuracy 0 and an infinite loss."""
    values = trace.recorded()["test_loss" if by_loss else "accuracy"]
    finite = torch.isfinite(trace.loss[-1, 0]) & ~torch.isnan(values[-1, 0])
    return torch.where(finite, values[-1, 0], torch.inf if by_loss else 0.0)


_Runs = tuple[tuple[float, ...], tuple[int, ...]]  # learning rates and seeds


class _Runner:
    """Runs one rule on one model; keeps a trace for every delay, whatever was simulated together."""

    def __init__(self, task: Task[DeepSetting]) -> None:
        self.setting, self.candidate, self.space = task.setting, task.candidate, task.space

    def traces(self, phase: str, runs: dict[str, _Runs]) -> dict[str, Trace]:
        """A trace for each delay: one record, axes delay (one), seed and lr, no vectors."""
        found = {delay: trace for delay, of in runs.items()
                 if (trace := self.space.find(self._name(phase, delay), self._key(delay, of))) is not None}  # fmt: skip
        missing = {delay: of for delay, of in runs.items() if delay not in found}
        for group in self._groups(missing):
            (of,) = {missing[delay] for delay in group}
            for delay, trace in self._simulate(phase, group, *of).items():
                found[delay] = self.space.keep(self._name(phase, delay), self._key(delay, of), trace)
        return {delay: found[delay] for delay in runs}

    def _candidate(self, delay: str) -> Candidate:
        own = self.candidate
        return replace(own, rule=own.undelayed) if own.undelayed and delay == "0" else own

    def _name(self, phase: str, delay: str) -> str:
        length = f"-{self.setting.updates}" * isinstance(self.setting, PipelineSetting)
        return f"deep-{self.setting.model}{length}-{self._candidate(delay).rule}-{phase}-{delay}"

    def _key(self, delay: str, runs: _Runs) -> dict[str, object]:
        rule = describe(self.setting.build(self._candidate(delay), runs[0]))
        delays = describe_delays(self.setting.delay_model(delay))
        return {"setting": self.setting.describe(), "rule": rule, "delay": delays, "seeds": runs[1],
                "synchronous": bool(self.candidate.synchronous), "drift": True}  # fmt: skip

    def _groups(self, missing: dict[str, _Runs]) -> list[list[str]]:
        """Delays to simulate together: the same learning rates and seeds, and waiting queries that fit in memory.

        On a CPU a pipeline runs alone, and last, as looking up every stage's own past costs the others time.
        """
        if self.candidate.synchronous or isinstance(self.setting, LargeSetting):
            return [[delay] for delay in missing]  # each has a minibatch, or a loop, of its own
        setting, on_gpu = self.setting, self.space.device.startswith("cuda")
        dim = setting.problem(setting.batch).dim
        groups: list[list[str]] = [[]]
        taken = 0.0
        for delay in sorted(missing, key=lambda delay: (missing[delay], delay == PIPELINE, setting.mean_delay(delay))):
            lrs, seeds = missing[delay]
            queries = 1 + needs_ticket(setting.build(self.candidate, lrs))
            needed = 4.0 * dim * queries * (2 + setting.mean_delay(delay)) * len(lrs) * len(seeds)
            memory = HISTORY_BYTES["cuda" if on_gpu else "cpu"]
            alone = PIPELINE in (delay, *groups[-1]) and not on_gpu
            if groups[-1] and (alone or missing[delay] != missing[groups[-1][0]] or taken + needed > memory):
                groups.append([])
                taken = 0.0
            groups[-1].append(delay)
            taken += needed
        return groups if missing else []

    def _simulate(
        self, phase: str, delays: list[str], lrs: tuple[float, ...], seeds: Sequence[int]
    ) -> dict[str, Trace]:
        setting, updates, batch = self.setting, self.setting.updates, self.setting.batch
        if isinstance(setting, LargeSetting):
            return {delay: self._train(setting, delay, lrs, seeds) for delay in delays}
        late = [setting.delay_model(delay) for delay in delays]
        if self.candidate.synchronous:
            (delay,) = delays
            updates, batch, late = setting.rounds(delay), batch * (1 + setting.mean_delay(delay)), [0]
        rule = setting.build(self.candidate, lrs)
        begin = time.monotonic()
        # On a GPU a replayed graph costs little to launch, and compiling would take longer than it saves.
        trace = simulate(setting.problem(batch), rule, late, updates, seed=list(seeds), record_every=updates,
                         device=self.space.device, compile=False, drift=True)  # fmt: skip
        seconds = time.monotonic() - begin
        runs = len(delays) * len(lrs) * len(seeds)
        self.space.say(f"deep: {setting.model}, {self.candidate.rule}, {phase}, delays {' '.join(delays)}: {runs} runs "
                       f"of {updates:,} updates in {seconds:.1f} s, {1e3 * seconds / updates:.2f} ms each")  # fmt: skip
        return {delay: _kept(delay, seeds, lrs, [updates], {name: values[-1, :, position]
                                                          for name, values in trace.recorded().items()})
                for position, delay in enumerate(delays)}  # fmt: skip

    def _train(self, setting: LargeSetting, delay: str, lrs: tuple[float, ...], seeds: Sequence[int]) -> Trace:
        """One run after another, each of which is kept as soon as it is finished."""

        def run(lr: float, seed: int) -> Trace:
            begin = time.monotonic()
            losses = setting.train(self._candidate(delay), delay, lr, seed, self.space.device)
            seconds, updates = time.monotonic() - begin, losses[-1].updates
            self.space.say(f"deep: {setting.model}, {self._candidate(delay).rule}, delay {delay}, lr {lr:g}, seed "
                           f"{seed}: {updates:,} updates in {seconds:.1f} s, {updates / seconds:.1f} a second; "
                           f"held-out loss {losses[-1].held_out:.3f}")  # fmt: skip
            steps, *values = zip(*losses, strict=True)
            ends = torch.tensor(values, dtype=torch.float64)
            return _kept(delay, (seed,), (lr,), steps, dict(zip(_LARGE, ends, strict=True)))

        runs = [self.space.trace(f"{self._name('run', delay)}-{lr:g}-{seed}", self._key(delay, ((lr,), (seed,))),
                                 partial(run, lr, seed)) for seed in seeds for lr in lrs]  # fmt: skip
        ends = {name: torch.cat([one.recorded()[name] for one in runs], -1) for name in _LARGE}
        return _kept(delay, seeds, lrs, runs[0].steps.tolist(), ends)


def _kept(
    delay: str, seeds: Sequence[int], lrs: Sequence[float], steps: Sequence[int], ends: dict[str, Tensor]
) -> Trace:
    """Runs under one kind of delay: their end alone, or some records; axes delay, seed and lr, no vectors."""
    shape = len(steps), 1, len(seeds), len(lrs)
    kept = {name: values.reshape(shape).clone() for name, values in ends.items()}
    none = torch.zeros(*shape[1:], 0)
    return Trace(steps=torch.tensor(steps), loss=kept["loss"], accuracy=kept.get("accuracy"),
                 test_loss=kept.get("test_loss"), metrics={"drift": kept["drift"]}, output=none, query=none.clone(),
                 delays=torch.zeros(0, len(seeds), dtype=torch.int32), config={"steps": steps[-1]},
                 axes=(Axis("delay", (delay,)), Axis("seed", tuple(seeds)), Axis("lr", tuple(lrs))))  # fmt: skip


def describe_delays(delays: Delays) -> object:
    return delays.table() if isinstance(delays, StageDelays) else describe(delays)
