"""Cost of the server when workers take local steps: its share of a worker's time.

A network of 10^7 parameters, H local steps of AdamW a job. A worker's job and a server's update run in one process;
both are measured in processor time, which other load on the machine hardly changes. The server keeps up with 1 / share
workers.

    python benchmarks/bench_local.py [--steps 50] [--measured 5] [--updates 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from lategrad.problems import Dataset, LocalSteps, ModuleProblem
from lategrad.registry import parse_rule
from lategrad.serve import Settings
from lategrad.serve.compression import Compression
from lategrad.serve.messages import Job, JobInfo
from lategrad.serve.server import Server
from lategrad.serve.worker import Oracle, Streams
from timing import verdict

RULES = ("nesterov", "delayed-nesterov", "fed-buff", "steady-adam", "steady-muon")
TARGET = 0.02


def problem_of(steps: int) -> LocalSteps:
    """A network of 10^7 parameters on noise: accuracy does not matter here."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2048, 784, generator=generator), torch.randint(0, 10, (2048,), generator=generator)
    width = 2048
    layers = [nn.Linear(784, width), *(nn.Linear(width, width) for _ in range(2)), nn.Linear(width, 10)]
    network = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    data = Dataset("noise", x, y, x[:256], y[:256], 10)
    return LocalSteps(ModuleProblem(network, data, batch=32, evaluate=256), steps, inner="adamw:lr=0.001")


def job_seconds(problem: LocalSteps, measured: int) -> tuple[float, torch.Tensor]:
    """A worker's processor time for a whole job, extrapolated from ``measured`` steps; and its pseudo-gradient."""
    fewer = LocalSteps(problem.problem, measured, inner=problem.inner)
    oracle = Oracle(fewer, Streams(0), {}, torch.device("cpu"))
    query = problem.start()
    oracle.answer(Job(0, 0, 0, query))  # a warm-up
    begin = time.process_time()
    answer = oracle.answer(Job(0, 1, 0, query))
    return (time.process_time() - begin) * problem.local_steps / measured, answer.message


def send_seconds(compression: Compression, grad: torch.Tensor) -> tuple[float, torch.Tensor]:
    """A worker's processor time to compress a pseudo-gradient; and the message."""
    if compression.exact:
        return 0.0, grad
    begin = time.process_time()
    message = compression.send(grad, torch.zeros_like(grad)).message
    return time.process_time() - begin, message


def update_seconds(problem: LocalSteps, rule: str, compression: str, message: torch.Tensor, updates: int) -> float:
    """The server's processor time for an update, the next query written."""
    shaped = rule == "steady-muon"
    settings = Settings(steps=10**9, compression=compression, compile=not shaped, record_every=10**9)
    server = Server(problem, parse_rule(f"{rule}:lr=0.1"), settings)
    room = torch.empty(server.dim)
    job = server.join(0, out=room)
    times = []
    for k in range(updates + 2):
        assert job is not None
        begin = time.process_time()
        info = JobInfo(problem.local_steps, k - 1)
        job = server.deliver(0, job.version, job.sequence, message, room, checked=True, info=info)
        times.append(time.process_time() - begin)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--measured", type=int, default=5, help="local steps that are measured")
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    problem = problem_of(options.steps)
    print(f"{problem.dim:,} parameters, {options.steps} steps of AdamW a job")
    steps, grad = job_seconds(problem, options.measured)
    for compression, rules in (("bfloat16", ("nesterov",)), ("int8", ("nesterov",)), ("none", RULES)):
        send, message = send_seconds(Compression(compression, problem.dim, grad.dtype), grad)
        job = steps + send
        print(f"{compression}: a job takes a worker {job:.2f} s, {message.nbytes / 1e6:.1f} MB are sent")
        for rule in rules:
            update = update_seconds(problem, rule, compression, message, options.updates)
            share = update / job
            verdict(f"{rule}: {1e3 * update:.0f} ms an update, {share:.2%} of a worker's time (at most {TARGET:.0%})",
                    share <= TARGET)  # fmt: skip


if __name__ == "__main__":
    main()
