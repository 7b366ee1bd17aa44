"""Updates per second of real asynchronous training, against lock-free shared memory and Ray's pattern.

Two workers with one torch thread each. Ours does the anytime update and applies every gradient exactly once, each
worker holding one job ahead (and, beside it, none); the others do a plain SGD step, lock-free SGD without even that
guarantee. All compute the same gradients with the same code, but for "lock-free, autograd", which is lock-free SGD as
it is usually written: a shared module, ``backward`` and ``torch.optim.SGD``. Contenders take turns, and medians over
the rounds are compared.

    python benchmarks/bench_train.py [--rounds 3] [--seconds 4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import lategrad as lg
from async_baselines import FreeGradient, hogwild, hogwild_by_autograd, ray_parameter_server, softmax_problem
from lategrad.problems.problem import Problem
from lategrad.serve import Server, Settings, Training
from lategrad.support.runs import tensors
from timing import verdict

WORDS_PER_UPDATE = 8
"""Gradient written and read, two vectors of state read and written, query written and read."""


class Measured(NamedTuple):
    """What our server did in a stretch of time."""

    rate: float
    """Updates per second."""
    server: float
    """Processor seconds of the server for an update; unlike the rate, other work on the machine hardly changes it."""
    worker: float
    """Processor seconds of the worker that made its gradient."""


def processor_seconds(pid: int | None) -> float:
    """What a process has used so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def ours(problem: Problem, seconds: float, warm_up: float = 1.0, workers: int = 2, prefetch: int = 1) -> Measured:
    """Our server with worker processes, once its update is compiled."""
    settings = Settings(
        steps=10**9, workers=workers, prefetch=prefetch, compile=True, record_every=10**9, progress=False
    )
    training = Training(problem, lg.Anytime(lg.OGD(lr=1e-3)), settings)
    costs: list[float] = []

    def end() -> None:
        while training.version < 10 or len(training.workers) < workers:
            time.sleep(0.01)
        time.sleep(warm_up)
        first, pids = training.version, [location.pid for location in training.workers.values()]
        before = processor_seconds(os.getpid()), sum(map(processor_seconds, pids))
        time.sleep(seconds)
        after = processor_seconds(os.getpid()), sum(map(processor_seconds, pids))
        costs.extend((b - a) / (training.version - first) for a, b in zip(before, after, strict=True))
        training.stop()

    threading.Thread(target=end, daemon=True).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = training.run().time
    assert times is not None
    measured = times[times > times[-1] - seconds]
    return Measured((len(measured) - 1) / float(measured[-1] - measured[0]), *costs)


def copy_bandwidth(threads: int, entries: int = 10**7) -> float:
    """Bytes per second, read and written, of a plain copy."""
    torch.set_num_threads(threads)
    source, target = torch.ones(entries), torch.zeros(entries)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    torch.set_num_threads(1)
    return 2 * 4 * entries / statistics.median(times)


class Held(NamedTuple):
    """How long checkpoints hold the updates up, in milliseconds."""

    usual: float
    """Between two updates."""
    held_up: float
    """Between two updates, where a checkpoint is made."""
    checkpoint: float
    """Of the server's processor time, for a checkpoint: whether the state is finite, and a copy."""
    fresh_copy: float
    """Of processor time, for a plain copy of the state into fresh memory."""
    copy: float
    """The same into memory that was written to before."""


def checkpoint_hold(entries: int, checkpoints: int = 4, every: int = 60) -> Held:
    """Checkpoints of a run of free gradients, and what they cost by themselves."""
    rule = lg.Anytime(lg.OGD(lr=1e-3))
    with tempfile.TemporaryDirectory() as folder:
        trace = lg.train(FreeGradient(entries), rule, steps=every * checkpoints + every // 2, workers=1, compile=True,
                         record_every=10**9, progress=False, out=folder, checkpoint_every=every)  # fmt: skip
    assert trace.time is not None
    between = trace.time.diff()[every // 2 :]  # the update is compiled by then
    held_up = between.sort(descending=True).values[:checkpoints]
    server = Server(FreeGradient(entries), rule, Settings(steps=1, record_every=10**9))
    state = [leaf for leaf in tensors(server.state) if len(leaf) == entries]
    room, copies = server.checkpoint().tensors, [leaf.clone() for leaf in state]

    def checkpoint() -> None:
        assert server.is_sound()
        server.checkpoint(room=room)

    def copy() -> None:
        for target, leaf in zip(copies, state, strict=True):
            target.copy_(leaf)

    def median_of(action: Callable[[], object], times: int = 7) -> float:
        spent = []
        for _ in range(times):
            begin = time.thread_time()
            action()
            spent.append(time.thread_time() - begin)
        return 1e3 * statistics.median(spent)

    costs = (median_of(action) for action in (checkpoint, lambda: [leaf.clone() for leaf in state], copy))
    return Held(1e3 * float(between.median()), 1e3 * float(held_up.median()), *costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    costs: dict[tuple[str, str], list[Measured]] = defaultdict(list)

    def noted(who: str, problem: Problem, prefetch: int) -> float:
        result = ours(problem, options.seconds, prefetch=prefetch)
        costs[str(problem), who].append(result)
        return result.rate

    contenders = {
        "ours": lambda problem: noted("ours", problem, 1),
        "ours, prefetch=0": lambda problem: noted("ours, prefetch=0", problem, 0),
        "lock-free": lambda problem: hogwild(problem, seconds=options.seconds),
        "lock-free, autograd": lambda problem: hogwild_by_autograd(problem, seconds=options.seconds),
        "Ray's pattern": lambda problem: ray_parameter_server(problem, seconds=options.seconds),
    }
    problems = {"softmax": softmax_problem(), "10^6": FreeGradient(10**6), "10^7": FreeGradient(10**7)}
    bandwidth = {threads: copy_bandwidth(threads) for threads in (1, 2)}
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for name, problem in problems.items():
            for who, run in contenders.items():
                if who == "lock-free, autograd" and name != "softmax":
                    continue
                measured[name, who].append(run(problem))
    rates = {key: statistics.median(values) for key, values in measured.items()}
    for name in problems:
        print(name)
        for who in (who for of, who in rates if of == name):
            rate = rates[name, who]
            print(f"  {who:<20}{rate:10,.0f} updates/s   ours is {rates[name, 'ours'] / rate:6.2f}x")
    for name, factor in (("softmax", 5.0), ("10^6", 5.0), ("10^7", 1.0)):
        ratio = rates[name, "ours"] / rates[name, "Ray's pattern"]
        verdict(f"{name}: at least {factor:g}x Ray's pattern ({ratio:.2f}x)", ratio >= factor)
    ratio = rates["softmax", "ours"] / rates["softmax", "lock-free, autograd"]
    verdict(f"softmax: at least 0.9x lock-free SGD as it is usually written ({ratio:.2f}x)", ratio >= 0.9)
    for (problem_name, who), results in costs.items():
        server, worker = (1e3 * statistics.median(column) for column in list(zip(*results, strict=True))[1:])
        print(f"processor time for an update, {problem_name}, {who}: {server:.3f} ms of the server, {worker:.3f} of a "
              f"worker, so that two cores allow {2e3 / (server + worker):,.0f} updates/s")  # fmt: skip
    held = checkpoint_hold(10**7)
    print(f"a checkpoint at 10^7: {held.held_up:.0f} ms between two updates instead of {held.usual:.0f}; the server's "
          f"processor time for it is {held.checkpoint:.0f} ms, for a copy of the state {held.fresh_copy:.0f} into "
          f"fresh memory and {held.copy:.0f} into memory in use")  # fmt: skip
    held_for = held.held_up - held.usual
    verdict(f"10^7: a checkpoint holds the updates up by at most a copy of the state ({held_for:.0f} ms)",
            held_for <= held.fresh_copy)  # fmt: skip
    print(f"copy bandwidth {bandwidth[1] / 1e9:.1f} GB/s on one thread, {bandwidth[2] / 1e9:.1f} on two")
    ceiling = bandwidth[2] / (4 * 10**7 * WORDS_PER_UPDATE)
    allowed = f"what {WORDS_PER_UPDATE} words an entry allow, {ceiling:.0f} updates/s"
    for who in ("ours", "ours, prefetch=0"):
        share = rates["10^7", who] / ceiling
        verdict(f"10^7, {who}: at least half of {allowed} ({share:.2f})", share >= 0.5)


if __name__ == "__main__":
    main()
