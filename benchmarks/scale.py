"""How many workers can one server feed, and what do the delays of so many workers do? Measured, derived, simulated.

    python benchmarks/scale.py             # both parts, minutes
    python benchmarks/scale.py --simulate  # the second only: no Ray needed

1. In one Ray, the cost of an update at the server is measured with workers that do nothing else (they saturate it), for
   several lengths d of the vector: s(d). From it follows the number of workers that one server can feed, g / s + 1 if
   they take g seconds for a gradient and its way, and the rate of W of them, min(W / (g + s), 1 / s), which is
   compared with that of workers that are slow on purpose.
2. Clusters of 10 to 10,000 workers in virtual time: their delays are about the number of workers; what that does to
   accuracy after a fixed number of updates on the digits.
"""

from __future__ import annotations

import argparse
import warnings
from typing import NamedTuple

import numpy as np
import torch

import lategrad as lg
from async_baselines import FreeGradient, local_ray
from lategrad.delays.clocks import Cluster, LogNormalTime, Worker
from timing import verdict

INLINE = 65_536  # bytes of a vector that travels inside the call


def measured_rate(problem, workers, steps, slow=None):
    """Updates per second in the second half of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = lg.train(problem, lg.Anytime(lg.OGD(lr=1e-3)), steps=steps, workers=workers, engine="ray",
                         compile=True, slow=slow, progress=False)  # fmt: skip
    half = trace.time[len(trace.time) // 2 :]
    return (len(half) - 1) / float(half[-1] - half[0])


class Cost(NamedTuple):
    """Seconds of one update at a busy server: a constant for vectors inside the call, a line for longer ones."""

    inline: float
    stored: float
    per_entry: float

    def of(self, dim):
        """For a vector of so many float32."""
        return self.inline if 4 * dim <= INLINE else self.stored + self.per_entry * dim


def server_cost(saturating=2):
    """The cost of an update, measured and fitted."""
    seconds = {}
    for dim, steps in ((1_000, 2000), (10_000, 2000), (300_000, 600), (1_000_000, 400), (4_000_000, 120)):
        seconds[dim] = 1 / measured_rate(FreeGradient(dim), saturating, steps)
        megabytes = 4 * dim / 1e6
        print(f"  d = {dim:>9,}: {1e3 * seconds[dim]:7.2f} ms for an update, {megabytes:6.2f} MB each way", flush=True)
    inside = [value for dim, value in seconds.items() if 4 * dim <= INLINE]
    beside = np.array([item for item in seconds.items() if 4 * item[0] > INLINE])
    slope, start = np.polyfit(*beside.T, 1, w=1 / beside[:, 1])  # equal relative errors count equally
    cost = Cost(float(np.mean(inside)), float(start), float(slope))
    print(f"  fitted: {1e3 * cost.inline:.2f} ms inside the call; through the object store {1e3 * cost.stored:.2f} ms "
          f"+ {1e9 * cost.per_entry:.2f} ns for each entry")  # fmt: skip
    return cost


def predicted_rate(workers, gradient, cost):
    """A closed queue: as fast as the workers return, until the server is busy all the time."""
    return min(workers / (gradient + cost), 1 / cost)


def check_formula(cost):
    """Slow workers against the formula."""
    print("workers with gradients of g seconds: measured and predicted updates per second")
    for dim, workers, milliseconds in ((10_000, 1, 20), (10_000, 4, 20), (10_000, 8, 20), (1_000_000, 4, 100)):
        rate = measured_rate(FreeGradient(dim), workers, 60 * workers, slow=f"constant:{milliseconds}")
        expected = predicted_rate(workers, milliseconds / 1e3, cost.of(dim))
        print(f"  d = {dim:>9,}, {workers} workers, g = {milliseconds} ms: {rate:7.1f}, {expected:7.1f}", flush=True)
        verdict("the formula is within 40%", 0.6 < rate / expected < 1.4)


def print_capacity(cost):
    """How many workers keep one server just busy."""
    print("workers that one server can feed")
    for dim in (10_000, 1_000_000, 100_000_000):
        for gradient in (0.1, 1.0, 10.0):
            print(f"  d = {dim:>11,}, a gradient takes {gradient:4.1f} s: {gradient / cost.of(dim) + 1:8,.0f}")


def simulate(steps=20_000):
    """What the delays of many workers do to the accuracy on the digits."""
    problem = lg.problems.SoftmaxRegression(lg.problems.load("digits"))
    rules = {
        "sgd": lg.SGD(lr=torch.tensor([[0.03], [0.1], [0.3], [1.0]])),
        "anytime-sgd": lg.Anytime(lg.OGD(lr=torch.tensor([[1.0], [3.0], [10.0], [30.0]]))),
        "steady": lg.Steady(lr=torch.tensor([[0.3], [1.0], [3.0], [10.0]])),
    }
    print(f"test accuracy on the digits after {steps:,} updates; the step that is best without delay, then left alone")
    frozen = {}
    for workers in (1, 10, 100, 1_000, 10_000):
        cluster = Cluster([Worker(distribution=LogNormalTime(0.4))] * workers)
        line = []
        for name, rule in rules.items():
            trace = lg.simulate(problem, rule, delays=[cluster], steps=steps, seed=[0, 1], progress=False)
            accuracy = trace.accuracy[-1].mean(0).flatten()
            best = frozen.setdefault(name, int(accuracy.argmax()))
            line.append(f"{name} {accuracy[best]:.3f} (best step here {accuracy.max():.3f})")
        delays = trace.delays.double()
        late = f"mean delay {delays.mean():7,.0f}, max {delays.max():7,.0f}"
        print(f"  {workers:>6,} workers, {late}: {', '.join(line)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulate", action="store_true", help="leave out what needs Ray")
    if not parser.parse_args().simulate:
        with local_ray(cpus=8):
            print("an update at a server that two workers keep busy")
            cost = server_cost()
            check_formula(cost)
        print_capacity(cost)
    simulate()


if __name__ == "__main__":
    main()
