"""The simulator on Fashion-MNIST: against a plain PyTorch loop, small batches, over delays, and its memory."""

import subprocess
import sys
import time

import torch

import lategrad as lg
from lategrad import delays as d
from lategrad.problems import SoftmaxRegression, load
from lategrad.simulator import Simulation
from timing import report, side_by_side, verdict

BATCH, FEW, RUNS, STEPS = 64, 4, 48, 48
PLAIN = "plain loop, one run, 1 thread"


def plain_loop(data, batch=BATCH):
    """SGD as one writes it: nn.Linear, cross-entropy, torch.optim.SGD, minibatches by index, no delay."""
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        torch.set_num_threads(1)
        for _ in range(STEPS):
            rows = torch.randint(len(data.x_train), (batch,))
            loss = torch.nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.set_num_threads(2)

    return run


def sweep(problem, rule, *delays):
    """The inner loop of `lg.simulate`, warmed up past the delays, as a function of no arguments."""
    draws = [[d.Constant(delay).draw(100_000, 0) for delay in delays]]
    simulation = Simulation(problem, rule, draws, (0,), share_samples=True, compile=True)
    at = max(delays) + 100
    simulation.run(0, at, lambda done: None)

    def run():
        nonlocal at
        simulation.run(at, at + STEPS, lambda done: None)
        at += STEPS

    return run


def matrix_products(problem):
    """The two products that a gradient of all runs cannot do without."""
    x, rows = torch.randn(RUNS * 10, 785), torch.randn(BATCH, 785)

    def run():
        for _ in range(STEPS):
            (x @ rows.mT) @ rows

    return run


def speed(data, problem):
    lrs = torch.logspace(-3, 1, RUNS).unsqueeze(-1)
    rules = {
        "SGD": lg.SGD(lrs),
        "anytime SGD": lg.Anytime(lg.OGD(lrs)),
        "anytime SGD, ball": lg.Anytime(lg.OGD(lrs, lg.Ball(5.0))),
    }
    contenders = {PLAIN: plain_loop(data), "the two matrix products alone": matrix_products(problem)}
    contenders |= {f"{name}, {RUNS} runs, delay 500": sweep(problem, rule, 500) for name, rule in rules.items()}
    seconds = side_by_side(contenders)
    report(f"{STEPS} steps, batch {BATCH}", seconds, PLAIN)
    floor = seconds["the two matrix products alone"]
    for name in list(contenders)[2:]:
        speedup = RUNS * seconds[PLAIN] / seconds[name]
        print(f"  {name}: {speedup:.1f}x the run-steps per second; matrix products take {floor / seconds[name]:.0%}")
    name = f"anytime SGD, {RUNS} runs, delay 500"
    verdict("at least 16x the plain loop", RUNS * seconds[PLAIN] / seconds[name] >= 16)


def small_batches(data):
    """Runs under delays up to 1,000; their bytes: the late query, the next one, and each vector of the state twice."""
    torch.set_num_threads(1)
    problem, delays = SoftmaxRegression(data, batch=FEW), (0, 100, 500, 1000)
    lrs, ball = torch.logspace(-3, 0, RUNS // len(delays)).unsqueeze(-1), lg.Ball(5.0)
    rules = {
        "SGD with its average": (lg.SGD(lrs, average="uniform"), 2),
        "SGD with its average, ball": (lg.SGD(lrs, ball, average="uniform"), 2),
        "anytime SGD": (lg.Anytime(lg.OGD(lrs)), 2),
        "anytime SGD, ball": (lg.Anytime(lg.OGD(lrs, ball)), 2),
        "optimistic anytime, ball": (lg.Anytime(lg.OptimisticOGD(lrs, ball)), 4),
        "Steady, ball": (lg.Steady(lrs, ball), 2),
    }
    source, target = torch.ones(2, 64 * 2**20).unbind()  # 256 MiB each: in no cache
    contenders = {PLAIN: plain_loop(data, FEW), "copy": lambda: target.copy_(source)}
    contenders |= {name: sweep(problem, rule, *delays) for name, (rule, _) in rules.items()}
    seconds = side_by_side(contenders, clock=time.thread_time)
    plain, bandwidth = seconds[PLAIN] / STEPS, 2 * source.nbytes / seconds["copy"]
    print(f"batch {FEW}, {RUNS} runs, delays {delays}, processor time; the plain loop takes {plain * 1e6:.0f} us an "
          f"update, a copy moves {bandwidth / 1e9:.0f} GB/s")  # fmt: skip
    for name, (_, vectors) in rules.items():
        cost, moved = seconds[name] / STEPS / RUNS, (2 + 2 * vectors) * 4 * problem.dim / bandwidth
        print(f"  {name:<28} {cost * 1e6:5.1f} us a run-step, 1/{plain / cost:.0f} of the plain loop; "
              f"its bytes at the bandwidth of a copy {moved * 1e6:.1f} us")  # fmt: skip
    slowest = max(seconds[name] for name in rules if name.startswith(("SGD", "anytime"))) / STEPS / RUNS
    verdict("SGD and anytime SGD at most 8 us a run-step", slowest <= 8e-6)
    torch.set_num_threads(2)


def delays(problem):
    rule = lg.Anytime(lg.OGD(torch.logspace(-3, 1, RUNS).unsqueeze(-1)))
    seconds = side_by_side({f"delay {tau}": sweep(problem, rule, tau) for tau in (0, 100, 500, 1000)})
    report(f"anytime SGD, {RUNS} runs, {STEPS} steps", seconds, "delay 0")
    verdict("delay 1000 within 1.3x of delay 0", seconds["delay 1000"] <= 1.3 * seconds["delay 0"])


MEMORY = """
import re, torch, lategrad as lg
from lategrad.problems import SoftmaxRegression, load
problem = SoftmaxRegression(load("fashion-mnist", "standardise-globally"))
rule = lg.Anytime(lg.OGD(torch.logspace(-4, 4, 18).unsqueeze(-1), lg.Ball(5.0)))
trace = lg.simulate(problem, rule, "lognormal:7,0.4", 8000, seed=[0, 1, 2], record_every=8000)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2**20
print(f"{peak:.2f} {trace.delay_summary().max} {trace.config['run_steps_per_second']:.0f}")
"""


def memory():
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    peak, longest, rate = done.stdout.split()
    print(f"lognormal(7, 0.4), 54 runs, 8000 steps: peak {peak} GiB, longest delay {longest}, "
          f"{rate} run-steps/s, {time.perf_counter() - begin:.0f} s")  # fmt: skip
    verdict("under 6 GiB", float(peak) < 6)


def main():
    torch.set_num_threads(2)
    data = load("fashion-mnist", "standardise-globally")
    problem = SoftmaxRegression(data, batch=BATCH)
    speed(data, problem)
    small_batches(data)
    delays(problem)
    memory()


if __name__ == "__main__":
    main()
