"""Faults done to real training, and bad gradients sent to it: what was survived, lost and doubled.

    python -m benchmarks.faults [--minutes 3] [--only faults|attacks]

Faults: each kind is done again and again to real runs of worker processes, for its share of the time, of which half is
for servers that are killed and resumed. The gradient of job k has all entries k mod 7 + 1, so that the parameters tell
whether every gradient was applied once and whole.

Attacks: see benchmarks/attacks.py.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lategrad as lg
from benchmarks.attacks import show_attacks
from lategrad.problems import Quadratic
from lategrad.problems.problem import Problem
from lategrad.serve import Settings, Training, TrainingError
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths, version_of
from lategrad.serve.engines.processes import ProcessLink
from lategrad.serve.engines.segment import RESULT, Header

DIM = 50_000
EVERY = 200  # updates between two checkpoints
LR = 2.0  # twice the longest gradient is infinite
RULE = lg.SGD(lr=LR)


class Counting(Quadratic):
    """The gradient of job k is k mod 7 + 1 everywhere; now and then a worker sends what no worker sends.

    Args:
        babble: a message that comes before every 40th gradient.
        repeat: whether that message is one that was sent before.
        dose: a file that makes the next gradient, of whichever worker finds it first, the longest that there is.
    """

    def __init__(self, babble: bytes | None = None, repeat: bool = False, dose: Path | None = None) -> None:
        super().__init__(dim=4)
        self.dim, self.babble, self.repeat, self.dose = DIM, babble, repeat, dose

    def start(self) -> Tensor:
        """All zeros."""
        return torch.zeros(DIM)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The numbers of the jobs."""
        return torch.arange(first, first + count)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """The number of the job, as a vector."""
        k = int(sample.item())
        if k % 40 == 39 and (self.babble is not None or self.repeat):
            link = next((thing for thing in gc.get_objects() if type(thing) is ProcessLink), None)
            if link is not None:
                link.channel.send(Header(RESULT, sequence=k - 1).pack() if self.repeat else self.babble)
        if self.dose is not None and _taken(self.dose):
            return torch.full_like(x, torch.finfo(x.dtype).max)
        return torch.full_like(x, float(k % 7 + 1))

    def loss(self, x: Tensor) -> Tensor:
        """Of no meaning."""
        return x[..., :1].double()


def _taken(path: Path) -> bool:
    """Whether a file was there, and is not any more because of us."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


class Outcome(NamedTuple):
    """Of one kind of fault."""

    injected: int
    survived: int
    lost: int
    doubled: int


Fault = Callable[[Training, random.Random, Path], int]
"""Does something to a run in a folder; how often."""


def kill_workers(training: Training, rng: random.Random, folder: Path) -> int:
    return _signal(training, rng, signal.SIGKILL)


def stop_workers(training: Training, rng: random.Random, folder: Path) -> int:
    return _signal(training, rng, signal.SIGSTOP)


def _signal(training: Training, rng: random.Random, number: int) -> int:
    if locations := list(training.workers.values()):
        try:
            os.kill(rng.choice(locations).pid or 0, number)
        except ProcessLookupError:
            return 0
    return len(locations[:1])


def spoil_control_file(training: Training, rng: random.Random, folder: Path) -> int:
    path = folder / "workers"
    if path.exists():
        return 0
    path.write_bytes(rng.randbytes(100))
    return 1


def remove_log(training: Training, rng: random.Random, folder: Path) -> int:
    (folder / "updates.bin").unlink(missing_ok=True)
    return 1


def damage_checkpoints(training: Training, rng: random.Random, folder: Path) -> int:
    for path in checkpoint_paths(folder):
        path.write_bytes(rng.randbytes(100))
    return 1


def babble(training: Training, rng: random.Random, folder: Path) -> int:
    return 0  # the workers do it themselves, and are replaced for it


class Poison:
    """Lets a worker send a gradient that makes the state infinite, once the run has got past the last one.

    It is counted where the run goes back.
    """

    def __init__(self, also: Fault | None = None) -> None:
        self._also, self._goal = also, 0

    def __call__(self, training: Training, rng: random.Random, folder: Path) -> int:
        """Leave a dose for whoever finds it."""
        if training.version > self._goal and not _dose(folder).exists():
            self._goal = training.version + EVERY + EVERY // 4  # a checkpoint after it
            if self._also is not None:
                self._also(training, rng, folder)
            _dose(folder).touch()
        return 0


def _dose(folder: Path) -> Path:
    return folder.with_name("dose")


class Kind(NamedTuple):
    """Of a fault that is done to a run in this process."""

    fault: Fault
    problem: Callable[[Path], Problem] = lambda folder: Counting()
    count: Callable[[lg.Trace], int] | None = None
    """How often it was done, where the trace tells."""


def _replaced(trace: lg.Trace) -> int:
    return sum(trace.config["replaced"].values())


def _returns(trace: lg.Trace) -> int:
    return int(trace.config["returns"])


KINDS = {
    "worker killed (SIGKILL)": Kind(kill_workers),
    "worker stopped (SIGSTOP)": Kind(stop_workers),
    "message repeated": Kind(babble, lambda folder: Counting(repeat=True), _replaced),
    "message of 3 bytes": Kind(babble, lambda folder: Counting(babble=b"abc"), _replaced),
    "message of 100 kB": Kind(babble, lambda folder: Counting(babble=bytes(100_000)), _replaced),
    "garbage in the control file": Kind(spoil_control_file),
    "log of updates removed": Kind(remove_log),
    "all checkpoints damaged": Kind(damage_checkpoints),
    "poison: a gradient that makes the state infinite": Kind(Poison(), lambda f: Counting(dose=_dose(f)), _returns),
    "poison, and all checkpoints damaged": Kind(
        Poison(damage_checkpoints), lambda f: Counting(dose=_dose(f)), _returns
    ),
}
SERVER_KILLED = "server killed (SIGKILL), and resumed"
_START = 60.0  # seconds, for the first workers
_SHARE = len(KINDS)  # of the time, against the others' 1: a server takes seconds to start, others are done in a moment


def _options(folder: Path) -> dict[str, Any]:
    return {"steps": 10**9, "workers": 3, "prefetch": 1, "out": folder, "checkpoint_every": EVERY, "deadline": 1.0,
            "slow": "constant:2", "record_every": 10**9, "progress": False, "compile": False}  # fmt: skip


def inject(kind: Kind, seconds: float) -> Outcome:
    """Do one kind of fault to a run for so many seconds."""
    rng, injected = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        training = Training(kind.problem(folder), RULE, Settings(**_options(folder)))

        def disturb() -> None:
            nonlocal injected
            begun = time.monotonic() + _START
            while training.version < 20 and time.monotonic() < begun:
                time.sleep(0.1)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.3)
                injected += kind.fault(training, rng, folder)
            training.stop()

        thread = threading.Thread(target=disturb, daemon=True)
        thread.start()
        try:
            trace, ends = training.run(), 0
        except TrainingError:
            trace, ends = training.engine.finish(at_once=True), 1
            training.stop()
        thread.join()
    assert trace is not None
    injected = injected if kind.count is None else kind.count(trace)
    return Outcome(injected, injected - ends, *_audit(trace))


def _audit(trace: lg.Trace) -> tuple[int, int]:
    """Whether a gradient of the log is not in the parameters, and how many are there more than once."""
    assert trace.worker is not None
    assert trace.sequence is not None
    pairs = list(zip(trace.worker.tolist(), trace.sequence.tolist(), strict=True))
    expected = -LR * sum(k % 7 + 1 for _, k in pairs)
    whole = bool((trace.output == trace.output[0]).all())
    return int(not whole or trace.output[0].item() != expected), len(pairs) - len(set(pairs))


def _train_for_ever(folder: Path) -> None:
    """In a process of its own: begin a run, or go on with it."""
    warnings.simplefilter("ignore")
    if checkpoint_paths(folder):
        lg.resume(folder, Counting(), RULE)
    else:
        lg.train(Counting(), RULE, **_options(folder))


def kill_servers(seconds: float) -> Outcome:
    """Kill the main process again and again, each time after it has made a new checkpoint, and resume."""
    rng, injected, survived = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name) / "run", time.monotonic() + seconds
        while time.monotonic() < end:
            before = _newest(folder)
            server = multiprocessing.get_context("spawn").Process(target=_train_for_ever, args=(folder,))
            server.start()
            begun = time.monotonic() + 2 * _START
            while server.is_alive() and _newest(folder) <= before and time.monotonic() < begun:
                time.sleep(0.01)
            survived += injected > 0 and _newest(folder) > before  # the fault before this start
            time.sleep(rng.random() / 2)
            server.kill()
            server.join()
            injected += 1
        try:
            trace = lg.resume(folder, Counting(), RULE, steps=_newest(folder) + 2 * EVERY)
        except (TrainingError, ValueError, OSError):
            return Outcome(injected, survived, 0, 0)
        return Outcome(injected, survived + trace.complete, *_audit(trace))


def _newest(folder: Path) -> int:
    return version_of(paths[0]) if (paths := checkpoint_paths(folder)) else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--only", choices=["faults", "attacks"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.only != "attacks":
        print("| fault | injected | survived | lost | doubled |\n|---|---|---|---|---|")
        share = 60 * options.minutes / (len(KINDS) + _SHARE)
        for name, kind in KINDS.items():
            print(f"| {name} | " + " | ".join(map(str, inject(kind, share))) + " |", flush=True)
        print(f"| {SERVER_KILLED} | " + " | ".join(map(str, kill_servers(_SHARE * share))) + " |", flush=True)
    if options.only != "faults":
        show_attacks()


if __name__ == "__main__":
    main()
