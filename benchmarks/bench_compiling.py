"""When compiling pays: seconds of compiling, and what a compiled update of the simulator saves.

``lategrad.execution.pays`` has the constants that this prints the ground for. With an empty folder as
``TORCHINDUCTOR_CACHE_DIR`` nothing has been compiled before.
"""

import statistics
import time

import torch

import lategrad as lg
from lategrad.delays import Constant
from lategrad.execution.pays import SAVED_PER_ENTRY, SAVED_PER_UPDATE, SECONDS
from lategrad.problems import Quadratic, SoftmaxRegression, load
from lategrad.simulator.oracle import Simulation

ROUNDS, UPDATES = 5, 100


def started(problem, rule, seeds, compile):
    """A simulation after its first two updates, and the seconds that those took."""
    draws = [[Constant(5).draw(2 + ROUNDS * UPDATES, seed)] for seed in range(seeds)]
    begin = time.perf_counter()
    simulation = Simulation(problem, rule, draws, tuple(range(seeds)), share_samples=True, compile=compile)
    simulation.run(0, 2, lambda done: None)
    return simulation, time.perf_counter() - begin


def main():
    torch.set_num_threads(1)
    started(Quadratic(), lg.SGD(0.1), 1, compile=True)  # imports the compiler
    print("entries   eager us  compiled us  saved us  compiling s  pays from  estimated from")
    for problem in (Quadratic(noise=0.1), SoftmaxRegression(load("digits"))):
        for seeds, lrs in ((1, 1), (20, 10)):
            lr = 0.1 if lrs == 1 else torch.logspace(-3, 0, lrs, dtype=torch.float64).unsqueeze(-1)
            rule = lg.Anytime(lg.OGD(lr, lg.Ball(10.0)))
            made = {compile: started(problem, rule, seeds, compile) for compile in (False, True)}
            seconds = {False: [], True: []}
            for first in range(2, 2 + ROUNDS * UPDATES, UPDATES):
                for compile, (simulation, _) in made.items():
                    begin = time.perf_counter()
                    simulation.run(first, first + UPDATES, lambda done: None)
                    seconds[compile].append((time.perf_counter() - begin) / UPDATES)
            eager, compiled = (statistics.median(seconds[compile]) for compile in (False, True))
            compiling, entries = made[True][1] - made[False][1], problem.start().numel() * seeds * lrs
            estimate = SECONDS["compile"] / (SAVED_PER_UPDATE + SAVED_PER_ENTRY * entries)
            pays = f"{compiling / (eager - compiled):,.0f}" if eager > compiled else "never"
            print(f"{entries:7,} {eager * 1e6:10.0f} {compiled * 1e6:12.0f} {(eager - compiled) * 1e6:9.0f} "
                  f"{compiling:12.1f} {pays:>10} {estimate:15,.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
