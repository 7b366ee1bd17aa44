"""What each backend is worth: updates of ``lg.train``, steps of an optimizer, and when compiling pays.

    python benchmarks/bench_backends.py [--rounds 3] [--cuda]

With an empty folder as ``TORCHINDUCTOR_CACHE_DIR`` the seconds to the first step include all of compiling. ``--cuda``
adds the optimizer's steps on a GPU. ``lategrad.execution.codegen`` and ``lategrad.execution.backend`` quote them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

import lategrad as lg
from async_baselines import FreeGradient, softmax_problem
from lategrad.delays import Constant
from lategrad.execution.backend import BACKENDS, COMPILE_SECONDS, SAVED_PER_ENTRY, SAVED_PER_UPDATE
from lategrad.problems import Problem, Quadratic, SoftmaxRegression, load
from lategrad.simulator import Simulation
from timing import side_by_side, verdict

RULE = lg.Anytime(lg.OGD(lr=1e-3))
SHAPES = {
    "1 x 7,850": [(7_850,)],
    "1 x 10^7": [(10**7,)],
    "400 x 25,000": [(25_000,)] * 400,
    "400 x 256": [(256,)] * 400,
}


def train_rate(problem: Problem, backend: str, updates: int) -> float:
    """Updates per second of ``lg.train`` in the second half of a run."""
    with mock.patch(
        "lategrad.serve.server.in_place", lambda rule, state, **_: lg.in_place(rule, state, backend=backend)
    ):
        trace = lg.train(problem, RULE, steps=updates, workers=2, prefetch=1, record_every=updates, progress=False)
    half = trace.time[updates // 2 :]
    return (len(half) - 1) / float(half[-1] - half[0])


def report_training(rounds: int) -> None:
    print(f"updates/s of lg.train, two workers   {'   '.join(BACKENDS)}")
    problems = {"softmax, 7,850": (softmax_problem(), 8_000), "free gradients, 10^6": (FreeGradient(10**6), 1_000)}
    for title, (problem, updates) in problems.items():
        rates: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for _ in range(rounds):
            for backend, values in rates.items():
                values.append(train_rate(problem, backend, updates))
        medians = {backend: statistics.median(values) for backend, values in rates.items()}
        print(f"  {title:<34} " + "   ".join(f"{rate:,.0f}" for rate in medians.values()))
        verdict("loops make the most updates", medians["loops"] == max(medians.values()))


def parameters(shapes: list[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def foreach_step(shapes: list[tuple[int, ...]], device: str) -> Callable[[], None]:
    """Anytime SGD written a second time, with torch's foreach functions."""
    params = parameters(shapes, device)
    x, grads = [p.detach() for p in params], [p.grad for p in params]
    w, t = [p.clone() for p in x], 0

    def step() -> None:
        nonlocal t
        t += 1
        torch._foreach_add_(w, grads, alpha=-0.1 / t**0.5)
        torch._foreach_lerp_(x, w, 2 / (t + 2))

    return step


def report_steps(device: str) -> None:
    def synchronized(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            function()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    print(f"ms of a step on {device} (seconds to the first one)")
    for title, shapes in SHAPES.items():
        steps, first = {}, {}
        for backend in BACKENDS:
            params, begin = parameters(shapes, device), time.perf_counter()
            step = lg.in_place(RULE, None, tensors=params, backend=backend)
            steps[backend] = synchronized(partial(step, [p.grad for p in params], 0))
            steps[backend]()
            first[backend] = f" ({time.perf_counter() - begin:.1f})"
        steps["foreach"] = synchronized(foreach_step(shapes, device))
        steps["AnytimeSGD"] = synchronized(lg.optim.AnytimeSGD(parameters(shapes, device), lr=0.1).step)
        sgd = torch.optim.SGD(parameters(shapes, device), lr=0.1, momentum=0.9)
        steps["torch SGD, momentum"] = synchronized(sgd.step)
        clock = time.thread_time if device == "cpu" else time.perf_counter  # steadier on a busy machine
        seconds = side_by_side(steps, rounds=9, clock=clock)
        print(f"  {title:<14} " + ", ".join(f"{n} {s * 1e3:.3g}{first.get(n, '')}" for n, s in seconds.items()))
        verdict("loops are no slower than torch.compile", seconds["loops"] <= 1.05 * seconds["compile"])


def simulation(problem: Problem, rule: object, seeds: int, compile: bool, updates: int) -> tuple[Simulation, float]:
    """A simulation after its first two updates, and the seconds that those took."""
    draws = [[Constant(5).draw(updates, seed)] for seed in range(seeds)]
    begin = time.perf_counter()
    one = Simulation(problem, rule, draws, tuple(range(seeds)), share_samples=True, compile=compile)
    one.run(0, 2, lambda done: None)
    return one, time.perf_counter() - begin


def report_when_compiling_pays(rounds: int = 5, updates: int = 100) -> None:
    """The ground for the constants of ``lategrad.execution.compiling_pays``, on the simulator."""
    simulation(Quadratic(), lg.SGD(0.1), 1, compile=True, updates=2)  # imports the compiler
    print("entries   eager us  compiled us  saved us  compiling s  pays from  estimated from")
    for problem in (Quadratic(noise=0.1), SoftmaxRegression(load("digits"))):
        for seeds, lrs in ((1, 1), (20, 10)):
            lr = 0.1 if lrs == 1 else torch.logspace(-3, 0, lrs, dtype=torch.float64).unsqueeze(-1)
            rule = lg.Anytime(lg.OGD(lr, lg.Ball(10.0)))
            both = [simulation(problem, rule, seeds, compile, 2 + rounds * updates) for compile in (False, True)]
            seconds: list[list[float]] = [[], []]
            for first in range(2, 2 + rounds * updates, updates):
                for (one, _), values in zip(both, seconds, strict=True):
                    begin = time.perf_counter()
                    one.run(first, first + updates, lambda done: None)
                    values.append((time.perf_counter() - begin) / updates)
            eager, compiled = map(statistics.median, seconds)
            compiling, entries = both[1][1] - both[0][1], problem.start().numel() * seeds * lrs
            estimate = COMPILE_SECONDS["compile"] / (SAVED_PER_UPDATE + SAVED_PER_ENTRY * entries)
            pays = f"{compiling / (eager - compiled):,.0f}" if eager > compiled else "never"
            print(f"{entries:7,} {eager * 1e6:10.0f} {compiled * 1e6:12.0f} {(eager - compiled) * 1e6:9.0f} "
                  f"{compiling:12.1f} {pays:>10} {estimate:15,.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of lg.train per backend")
    parser.add_argument("--cuda", action="store_true", help="also measure the optimizer's steps on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report_steps("cpu")
    if options.cuda:
        report_steps("cuda")
    report_when_compiling_pays()
    report_training(options.rounds)


if __name__ == "__main__":
    main()
