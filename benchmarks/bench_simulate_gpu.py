"""The simulator on a GPU: microseconds per run-step of a Fashion-MNIST-sized sweep, and CPU = GPU."""

import sys
import time

import torch

import lategrad as lg
from lategrad.delays import Constant
from lategrad.problems import Dataset, SoftmaxRegression
from lategrad.simulator import Simulation
from lategrad.support.runs import map_tensors
from timing import verdict

RUNS, DELAY, STEPS = 256, 500, 4000


def data(rows=60_000):
    """Random data of the shape of Fashion-MNIST: the time does not depend on the values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 784, generator=generator)
    y = torch.randint(10, (rows,), generator=generator)
    return Dataset("random", x, y, x[:1000], y[:1000], 10)


def seconds_per_step(problem, rule, delay):
    """Of the inner loop, after compiling and capturing; samples are drawn and copied as in a real run."""
    arrivals = [[Constant(delay).draw(2 * STEPS, 0)]]
    on_gpu = map_tensors(lambda leaf: leaf.cuda(), rule)
    simulation = Simulation(problem.to("cuda"), on_gpu, arrivals, (0,), share_samples=True, compile=True)
    simulation.run(0, STEPS, lambda done: None)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    simulation.run(STEPS, 2 * STEPS, lambda done: None)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS


def main():
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "python", sys.version.split()[0])
    problem = SoftmaxRegression(data())
    lrs = torch.logspace(-3, 1, RUNS).unsqueeze(-1)
    rules = {
        "SGD": lg.SGD(lrs),
        "anytime SGD": lg.Anytime(lg.OGD(lrs)),
        "anytime SGD, ball": lg.Anytime(lg.OGD(lrs, lg.Ball(5.0))),
        "optimistic anytime, ball": lg.Anytime(lg.OptimisticOGD(lrs, lg.Ball(5.0))),
    }
    for name, rule in rules.items():
        step = seconds_per_step(problem, rule, DELAY)
        print(
            f"  {name:<28} {RUNS} runs, delay {DELAY}: {step * 1e6:7.1f} us a step, "
            f"{step / RUNS * 1e6:.3f} us a run-step"
        )
        if name == "anytime SGD":
            verdict("at most 1.0 us per run-step", step / RUNS <= 1e-6)


if __name__ == "__main__":
    main()
