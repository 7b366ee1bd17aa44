"""Running it: all steps at the delays that are tuned at, the frozen step everywhere, and every finished piece kept."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lategrad.delays.stages import StageDelays
from lategrad.rules import needs_ticket
from lategrad.simulator import Delays, simulate
from lategrad.trace import Axis, Trace, describe
from reproduction.deep.setup import MEAN_DELAY, PIPELINE, Config, Contender, Setting
from reproduction.jobs import Say
from reproduction.sweep import find_trace, keep_trace

_HISTORY_BYTES = {"cpu": 6 * 2**30, "cuda": 48 * 2**30}
"""What the waiting queries of runs that are simulated together may take."""


@dataclass(frozen=True, eq=False)
class Result:
    """How a rule trains a model: scores are accuracies, or losses on held-out text."""

    contender: Contender
    by_loss: bool
    choice: dict[str, int]
    """The position of the best step, by the training loss of the first seed, at every delay that is tuned at."""
    grids: dict[str, Tensor]
    """``(seeds, steps)``: scores of all steps, at the delays that are tuned at."""
    frozen: dict[str, Tensor]
    """``(seeds,)``: scores of the step that is best without delay, at every delay."""
    traces: list[Trace]
    """What all that was read from; axes delay, seed and lr."""

    @property
    def tuned(self) -> dict[str, Tensor]:
        """``(seeds,)``: scores of the best step at each delay; for anchors, of all seeds."""
        if self.contender.synchronous:
            return self.frozen
        return {delay: grid[:, self.choice[delay]] for delay, grid in self.grids.items()}

    def scores(self, protocol: str) -> dict[str, Tensor]:
        """Frozen or tuned; anchors are always tuned."""
        return self.frozen if protocol == "frozen" else self.tuned

    def step(self, delay: str = "0") -> float:
        """The one that is best at a delay."""
        return self.contender.steps[self.choice[delay]]


def measure(config: Config, setting: Setting, contender: Contender, out: Path, *, device: str, say: Say) -> Result:
    """All numbers of one rule on one model; what is finished is read from ``out/traces``."""
    run = _Runner(config, setting, contender, out, device, say)
    first, seeds = config.all_seeds[: setting.tuning_seeds], config.all_seeds
    if contender.synchronous:  # tuned at every number of rounds
        constant = list(dict.fromkeys(str(MEAN_DELAY[delay]) for delay in config.delays))
        grid = run.traces("grid", dict.fromkeys(constant, (contender.steps, first)))
        choice = {delay: _best_step(trace) for delay, trace in grid.items()}
        rest = {delay: ((contender.steps[choice[delay]],), seeds[len(first) :]) for delay in constant}
    else:
        at = [delay for delay in config.delays if delay in setting.tuned_at]
        grid = run.traces("grid", dict.fromkeys(at, (contender.steps, first)))
        choice = {delay: _best_step(trace) for delay, trace in grid.items()}
        frozen = (contender.steps[choice["0"]],)
        rest = {delay: (frozen, seeds[len(first) :] if delay in at else seeds) for delay in config.delays}
    chosen = run.traces("chosen", {delay: wanted for delay, wanted in rest.items() if wanted[1]})

    def scores(delay: str) -> Tensor:
        step = choice[delay] if contender.synchronous else choice["0"]
        parts = [_scores(setting, grid[delay])[:, step]] if delay in grid else []
        parts += [_scores(setting, chosen[delay])[:, 0]] if delay in chosen else []
        return torch.cat(parts)

    same_rounds = {delay: str(MEAN_DELAY[delay]) if contender.synchronous else delay for delay in config.delays}
    return Result(
        contender=contender,
        by_loss=setting.by_loss,
        choice={delay: choice[of] for delay, of in same_rounds.items() if of in choice},
        grids={delay: _scores(setting, trace) for delay, trace in grid.items()},
        frozen={delay: scores(of) for delay, of in same_rounds.items()},
        traces=[*grid.values(), *chosen.values()],
    )


def _best_step(trace: Trace) -> int:
    """The step with the smallest training loss of the first seed; what diverged is not it."""
    return int(torch.nan_to_num(trace.loss[-1, 0, 0], nan=torch.inf, posinf=torch.inf).argmin())


def _scores(setting: Setting, trace: Trace) -> Tensor:
    """``(seeds, steps)``; what diverged has no accuracy and an infinite loss."""
    finite = torch.isfinite(trace.loss[-1, 0])
    if setting.by_loss:
        assert trace.test_loss is not None
        return torch.where(finite, torch.nan_to_num(trace.test_loss[-1, 0], nan=torch.inf), torch.inf)
    assert trace.accuracy is not None
    return torch.where(finite, trace.accuracy[-1, 0], 0.0)


Wanted = tuple[tuple[float, ...], tuple[int, ...]]
"""Steps and seeds."""


@dataclass(frozen=True)
class _Runner:
    """Runs one rule on one model; keeps a trace for every delay, whatever was simulated together."""

    config: Config
    setting: Setting
    contender: Contender
    out: Path
    device: str
    say: Say

    def traces(self, phase: str, wanted: dict[str, Wanted]) -> dict[str, Trace]:
        """A trace for each delay: one record, axes delay (one), seed and lr, no vectors."""
        found = {delay: trace for delay, want in wanted.items()
                 if (trace := find_trace(self._path(phase, delay), self._key(delay, want))) is not None}  # fmt: skip
        missing = {delay: want for delay, want in wanted.items() if delay not in found}
        for group in self._groups(missing):
            (want,) = {missing[delay] for delay in group}
            for delay, trace in self._simulate(phase, group, *want).items():
                found[delay] = keep_trace(self._path(phase, delay), self._key(delay, want), trace)
        return {delay: found[delay] for delay in wanted}

    def _path(self, phase: str, delay: str) -> Path:
        return self.out / "traces" / f"deep-{self.setting.model}-{self.contender.rule}-{phase}-{delay}.safetensors"

    def _key(self, delay: str, want: Wanted) -> dict[str, object]:
        rule = describe(self.contender.build(want[0], self.setting.updates))
        return {"setting": self.setting.describe(), "rule": rule, "delay": describe_delays(self.setting.delays(delay)),
                "seeds": want[1], "synchronous": bool(self.contender.synchronous)}  # fmt: skip

    def _groups(self, missing: dict[str, Wanted]) -> Iterator[list[str]]:
        """Delays to simulate together: the same steps and seeds, and no more waiting queries than there is room for.

        On a CPU a pipeline goes alone, and last, as looking up every stage's own past costs the others time.
        """
        if self.contender.synchronous:
            yield from ([delay] for delay in missing)  # each has a minibatch of its own
            return
        problem, on_gpu = self.setting.problem(self.setting.batch), self.device.startswith("cuda")
        group: list[str] = []
        taken = 0.0
        for delay in sorted(missing, key=lambda delay: (missing[delay], delay == PIPELINE, MEAN_DELAY[delay])):
            steps, seeds = missing[delay]
            queries = 1 + needs_ticket(self.contender.build(steps, self.setting.updates))
            needed = 4.0 * problem.dim * queries * (2 + MEAN_DELAY[delay]) * len(steps) * len(seeds)
            room = _HISTORY_BYTES["cuda" if on_gpu else "cpu"]
            alone = PIPELINE in (delay, *group) and not on_gpu
            if group and (alone or missing[delay] != missing[group[0]] or taken + needed > room):
                yield group
                group, taken = [], 0.0
            group.append(delay)
            taken += needed
        if group:
            yield group

    def _simulate(
        self, phase: str, delays: list[str], steps: tuple[float, ...], seeds: Sequence[int]
    ) -> dict[str, Trace]:
        setting, updates, batch = self.setting, self.setting.updates, self.setting.batch
        late = [setting.delays(delay) for delay in delays]
        if self.contender.synchronous:
            (delay,) = delays
            updates, batch, late = setting.rounds(delay), batch * (1 + MEAN_DELAY[delay]), [0]
        rule = self.contender.build(steps, setting.updates)
        begin = time.monotonic()
        with tensor_cores:
            # On a GPU a replayed graph costs little to launch, and compiling would take longer than it saves.
            trace = simulate(setting.problem(batch), rule, late, updates, seed=list(seeds), record_every=updates,
                             device=self.device, compile=False)  # fmt: skip
        seconds = time.monotonic() - begin
        runs = len(delays) * len(steps) * len(seeds)
        self.say(f"deep: {setting.model}, {self.contender.rule}, {phase}, delays {' '.join(delays)}: {runs} runs of "
                 f"{updates:,} updates in {seconds:.1f} s, {1e3 * seconds / updates:.2f} ms an update")  # fmt: skip
        return {delay: _of_one_delay(trace, position, delay) for position, delay in enumerate(delays)}


def _of_one_delay(trace: Trace, position: int, name: str) -> Trace:
    """The end of the runs under one kind of delay; axes delay, seed and lr. The vectors are left behind."""

    def end(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[-1:, :, position].unsqueeze(1).clone()

    loss = end(trace.loss)
    assert loss is not None
    return dataclasses.replace(
        trace, steps=trace.steps[-1:], loss=loss, accuracy=end(trace.accuracy), test_loss=end(trace.test_loss),
        axes=(Axis("delay", (name,)), trace.axis("seed"), Axis("lr", trace.axes[-1].values)),
        delays=trace.delays[-1:, :, position], output=trace.output[..., :0], query=trace.query[..., :0],
        time=None, worker=None,
    )  # fmt: skip


def describe_delays(delays: Delays) -> object:
    """As plain JSON values."""
    return delays.table() if isinstance(delays, StageDelays) else describe(delays)


class _TensorCores:
    """Products of float32 matrices in TF32 on a GPU that has it; nothing changes on a CPU.

    The precision is one for all threads: the first that asks for it changes it, the last that leaves puts it back.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high")

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                torch.set_float32_matmul_precision(self.before)


tensor_cores = _TensorCores()
