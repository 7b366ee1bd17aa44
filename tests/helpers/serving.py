"""For the tests of real training: problems that misbehave, and what is audited of every run.

The problems are in a module of their own, so that worker processes can import them.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lategrad as lg
from lategrad.problems import Problem, Quadratic
from lategrad.registry import as_rule
from lategrad.rules.blocks import Block, Blocks
from lategrad.serve import Settings, Training
from lategrad.serve.engines.processes import ProcessLink
from lategrad.serve.engines.segment import READY, RESULT, Header
from lategrad.trace import Trace


class Misbehaving(Quadratic):
    """A quadratic whose gradients go wrong in a given way, for one worker or for all."""

    def __init__(self, how: str, marker: Path | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.how, self.marker = how, marker

    def _hang_once(self) -> None:
        if _is_first(self.marker):
            time.sleep(1000)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        grad = super().gradient(x, sample)
        if self.how == "nan":
            return grad * torch.nan
        if self.how == "inf":
            return grad + torch.inf
        if self.how == "shape":
            return grad[..., :-1]
        if self.how == "dtype":
            return grad.float()
        if self.how == "raise":
            raise OSError("the data is gone")
        self._hang_once()
        return grad


class Poisonous(Quadratic):
    """Some gradients are finite, but so long that the next state is not: of every worker's one in twenty, as long as
    there are doses, and none of its first twenty."""

    def __init__(self, folder: Path, doses: int) -> None:
        super().__init__()
        self.folder, self.doses = folder, doses
        self.calls = 0

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        self.calls += 1
        due = self.calls > 20 and self.calls % 20 == 19
        poison = due and any(_is_first(self.folder / f"dose-{n}") for n in range(self.doses))
        return torch.full_like(x, torch.finfo(x.dtype).max) if poison else super().gradient(x, sample)


class Marked(Quadratic):
    """Long gradients with equal entries: a torn one would leave unequal entries in the parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim=4)
        self.dim = dim

    def start(self) -> Tensor:
        return torch.zeros(self.dim)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        return torch.full_like(x, float(sample.item() % 7 + 1))

    def loss(self, x: Tensor) -> Tensor:
        return x[..., :1].double()


class Babbling(Quadratic):
    """One worker process sends what no worker sends, once, and then goes on as if nothing had happened."""

    def __init__(self, how: str, marker: Path) -> None:
        super().__init__()
        self.how, self.marker = how, marker
        self.calls = 0

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:  # job 0 is answered by now
            link = next((thing for thing in gc.get_objects() if type(thing) is ProcessLink), None)
            if link is not None and _is_first(self.marker):
                self._send(link)
        return super().gradient(x, sample)

    def _send(self, link: ProcessLink) -> None:
        messages = {
            "repeated": [Header(RESULT).pack()] * 15,
            "short": [b"abc"],
            "empty": [b""],
            "long": [bytes(100_000)],
            "garbage": [bytes(range(200, 256))],
            "started again": [Header(READY).pack()],
            "of no slot": [Header(RESULT, slot=77).pack()],
            "from the future": [Header(RESULT, link.slot, version=10**12).pack()],
        }
        for message in messages[self.how]:
            link.channel.send(message)


class Unread(Quadratic):
    """The only worker answers many jobs that it has not read, more than a socket holds, once."""

    messages = 2000

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker
        self.calls = 0

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:  # job 0 is answered by now, and this is job 1
            link = next((thing for thing in gc.get_objects() if type(thing) is ProcessLink), None)
            if link is not None and _is_first(self.marker):
                for job in range(1, self.messages):
                    link.channel.send(Header(RESULT, sequence=job, version=job).pack())
        return super().gradient(x, sample)


def _is_first(marker: Path) -> bool:
    """Whether nobody has made the marker before, in any process."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Stillborn(Quadratic):
    """Kills every worker process that moves it to its device, as each does first."""

    def to(self, device: torch.device | str) -> Stillborn:
        if multiprocessing.parent_process() is not None:
            os._exit(7)
        return self


class SlowToEvaluate(Quadratic):
    """Its loss takes a while: so many seconds, and everywhere but at the start as long as ``hold`` exists."""

    def __init__(self, seconds: float = 0.01, hold: Path | None = None) -> None:
        super().__init__()
        self.seconds, self.hold = seconds, hold

    def loss(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        while self.hold is not None and self.hold.exists() and not torch.equal(x, self.start()):
            time.sleep(0.01)
        return super().loss(x)


def audit(trace: Trace) -> None:
    """Nothing was applied twice, and every delay belongs to a query that had been handed out."""
    assert trace.worker is not None
    assert trace.sequence is not None
    assert trace.time is not None
    pairs = list(zip(trace.worker.tolist(), trace.sequence.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == len(trace.delays)
    assert bool((trace.version >= 0).all())
    assert bool((trace.delays >= 0).all())
    assert bool((trace.time.diff() >= 0).all())
    for worker in trace.worker.unique():
        mine = trace.worker == worker
        order = trace.sequence[mine].argsort()
        assert bool((trace.version[mine][order].diff() >= 0).all())  # later jobs have later queries


PATIENCE = 600.0
"""Seconds for what takes less than one: the machine may have much else to do."""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for something to happen; nothing is ever asserted about how long it takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def train_until(
    seen: Callable[[Training], object], problem: Problem, rule: Any, seconds: float = PATIENCE, **settings: Any
) -> Trace:
    """A run that goes on until something is true of it, at a record: however long it takes workers to come to that."""
    deadline = time.monotonic() + seconds

    def look(telemetry: object, output: Tensor) -> str | None:
        assert time.monotonic() < deadline, "waited in vain"
        return "stop" if seen(training) else None

    usual = {"steps": 10**7, "record_every": 20, "compile": False, "progress": False, "stall": seconds}
    training = Training(problem, as_rule(rule), Settings(**{**usual, **settings}, on_record=look))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "stopped by on_record")
        trace = training.run()
    assert trace.config["stopped"] == "stopped by on_record"
    return trace


def gradients_of(training: Training, workers: int) -> list[int]:
    """How many updates each worker has made."""
    counts: list[int] = training.engine.server.log.column("worker").bincount(minlength=workers).tolist()  # type: ignore[attr-defined]
    return counts


def each_answer_is_a_new_query(trace: Trace, jobs: int) -> bool:
    """Whether each worker, which holds so many jobs, got the next one in turn for each gradient, at the state after it.

    With all workers at work, the mean delay then is the number of jobs that are out, less one.
    """
    assert trace.worker is not None
    updates = ((trace.worker == worker).nonzero().flatten() for worker in trace.worker.unique())
    return all(bool((trace.version[mine[jobs:]] == mine[:-jobs] + 1).all()) for mine in updates)


class Shaped(Quadratic):
    """A quadratic in six variables that knows where its tensors are: a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__(dim=6)
        self.blocks = Blocks((Block("weight", (2, 2), "matrix"), Block("bias", (2,), "other")))


@dataclass(frozen=True, eq=False)
class MatricesOnly(lg.SGD):
    """A rule that looks at shapes: it trains matrices alone."""

    blocks: Blocks | None = None

    def update(self, state: Any, grad: Tensor, delay: Tensor) -> Any:
        assert self.blocks is not None, "the host has not filled in the blocks"
        parts = zip(self.blocks.split(grad), self.blocks.parts, strict=True)
        return super().update(state, self.blocks.join([part * (b.kind == "matrix") for part, b in parts]), delay)


@contextlib.contextmanager
def read_only(folder):
    """For root, whom no mode stops, by a mount."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        try:
            yield
        finally:
            folder.chmod(0o700)
        return
    for command in (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("root may not mount here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
