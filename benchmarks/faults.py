"""Faults done to real training, and bad gradients sent to it: what was survived, lost and doubled.

    python -m benchmarks.faults [--minutes 3] [--only faults|attacks]

Faults: each kind is done again and again to real runs of worker processes, for its share of the time. The gradient of
job k has all entries k mod 7 + 1, so that the parameters tell whether every gradient was applied once and whole.

Attacks: 1 or 2 of 8 gradients are bad, picked by what is in their minibatch; the accuracy of softmax regression on
digits after 3,000 updates with delay 7, without defence and with each.
"""

from __future__ import annotations

import argparse
import gc
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
from lategrad.problems import Quadratic, SoftmaxRegression, load
from lategrad.problems.problem import Problem
from lategrad.serve import Settings, Training, TrainingError
from lategrad.serve.checkpoint import checkpoint_paths
from lategrad.serve.engines.processes import _ARRIVED, _pack, _ProcessLink
from lategrad.serve.gradient_norms import NormGate, clipped, norm

DIM = 50_000
RULE = lg.SGD(lr=1.0)


class Counting(Quadratic):
    """The gradient of job k is k mod 7 + 1 everywhere; now and then a worker sends what no worker sends."""

    def __init__(self, babble: bytes | None = None, repeat: bool = False) -> None:
        super().__init__(dim=4)
        self.dim, self.babble, self.repeat = DIM, babble, repeat

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
            link = next((thing for thing in gc.get_objects() if type(thing) is _ProcessLink), None)
            if link is not None:
                link.channel.send(_pack(_ARRIVED, 0, k - 1, 0) if self.repeat else self.babble)
        return torch.full_like(x, float(k % 7 + 1))

    def loss(self, x: Tensor) -> Tensor:
        """Of no meaning."""
        return x[..., :1].double()


class Outcome(NamedTuple):
    """Of one kind of fault."""

    injected: int
    survived: int
    lost: int
    doubled: int


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


KINDS: dict[str, tuple[Callable[[Training, random.Random, Path], int], Problem]] = {
    "worker killed (SIGKILL)": (kill_workers, Counting()),
    "worker stopped (SIGSTOP)": (stop_workers, Counting()),
    "message repeated": (babble, Counting(repeat=True)),
    "message of 3 bytes": (babble, Counting(babble=b"abc")),
    "message of 100 kB": (babble, Counting(babble=bytes(100_000))),
    "garbage in the control file": (spoil_control_file, Counting()),
    "log of updates removed": (remove_log, Counting()),
    "all checkpoints damaged": (damage_checkpoints, Counting()),
}


def inject(kind: str, seconds: float) -> Outcome:
    """Do one kind of fault to a run for so many seconds."""
    fault, problem = KINDS[kind]
    rng, injected = random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        settings = Settings(steps=10**9, workers=3, ahead=1, out=folder, checkpoint_every=200, deadline=1.0,
                            slow="constant:2", record_every=10**9, progress=False, compile=False)  # fmt: skip
        training = Training(problem, RULE, settings)

        def disturb() -> None:
            nonlocal injected
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.3)
                if training.version > 20:
                    injected += fault(training, rng, folder)
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
    assert trace.worker is not None
    assert trace.sequence is not None
    pairs = list(zip(trace.worker.tolist(), trace.sequence.tolist(), strict=True))
    expected = -sum(k % 7 + 1 for _, k in pairs)
    whole = bool((trace.output == trace.output[0]).all())
    missing = 0 if whole and trace.output[0].item() == expected else 1
    if fault is babble:
        injected = sum(trace.config["replaced"].values())
    return Outcome(injected, injected - ends, missing, len(pairs) - len(set(pairs)))


class Attacked:
    """A problem some of whose gradients are bad: ``bad`` of 8, picked by the rows of their minibatch."""

    def __init__(self, problem: Problem, kind: str, bad: int, defence: Callable[[Tensor], Tensor] | None) -> None:
        self._problem, self._kind, self._bad, self._defence = problem, kind, bad, defence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def to(self, device: Any) -> Attacked:
        """It stays where it is."""
        return self

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """As it is sent, after the defence."""
        grad = self._problem.gradient(x, sample)
        is_bad = (sample.sum(dim=-1, keepdim=True) % 8 < self._bad).view(*grad.shape[:-1], 1)
        sent = torch.where(is_bad, ATTACKS[self._kind](grad), grad)
        return sent if self._defence is None else self._defence(sent)


_NOISE = torch.Generator().manual_seed(0)
ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda grad: grad,
    "sign flipped, x 10": lambda grad: -10 * grad,
    "scaled by 1000": lambda grad: 1000 * grad,
    "random": lambda grad: torch.randn(grad.shape, generator=_NOISE).to(grad),
    "constant": lambda grad: torch.linspace(-1, 1, grad.shape[-1]).to(grad).expand_as(grad),
}


def refusing() -> Callable[[Tensor], Tensor]:
    """What is refused does nothing; a gate remembers norms, so that each run needs its own."""
    gate = NormGate(ratio=5.0)
    return lambda grad: grad if gate.objection(norm(grad)) is None else torch.zeros_like(grad)


DEFENCES: dict[str, tuple[Any, Callable[[], Callable[[Tensor], Tensor] | None]]] = {
    "SGD": (lg.SGD(lr=0.05), lambda: None),
    "max_norm_ratio=5": (lg.SGD(lr=0.05), refusing),
    "clip=0.5": (lg.SGD(lr=0.05), lambda: lambda grad: clipped(grad, 0.5)),
    "clip=0.2": (lg.SGD(lr=0.05), lambda: lambda grad: clipped(grad, 0.2)),
    "CentredClipping, radius=0.2": (lg.CentredClipping(lr=0.05, radius=0.2), lambda: None),
}


def accuracy(kind: str, bad: int, defence: str) -> float:
    rule, make_filter = DEFENCES[defence]
    problem = Attacked(SoftmaxRegression(load("digits"), batch=32), kind, bad, make_filter())
    trace = lg.simulate(problem, rule, 7, 3000, progress=False)  # type: ignore[arg-type]
    assert trace.accuracy is not None
    return float(trace.accuracy[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--only", choices=["faults", "attacks"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.only != "attacks":
        print("| fault | injected | survived | lost | doubled |\n|---|---|---|---|---|")
        for kind in KINDS:
            outcome = inject(kind, 60 * options.minutes / len(KINDS))
            print(f"| {kind} | " + " | ".join(map(str, outcome)) + " |", flush=True)
    if options.only != "faults":
        print(f"| bad gradients | {' | '.join(DEFENCES)} |\n|---|{'---|' * len(DEFENCES)}")
        for kind in ATTACKS:
            for bad in (1, 2) if kind != "none" else (0,):
                row = " | ".join(f"{accuracy(kind, bad, defence):.3f}" for defence in DEFENCES)
                print(f"| {kind}, {bad} of 8 | {row} |", flush=True)


if __name__ == "__main__":
    main()
