"""Gradients per second of asynchronous training on one GPU, against a plain synchronous loop with the same batch.

The study's GPT of 34 million parameters in bfloat16 autocast, batches of 16 windows of 256 tokens. Four worker
processes and the server share the GPU; vectors are handed over in its memory. Tokens are random: only speed is
measured. Then a worker is killed, and the server, and the run is resumed.

    python benchmarks/bench_train_gpu.py [--seconds 10] [--layers 8] [--width 512]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
from torch import nn

import lategrad as lg
from lategrad.problems import ModuleProblem
from lategrad.serve import Settings, Training
from timing import verdict

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of the study, which is not installed
from reproduction.deep.large import LargeGPT

CONTEXT, VOCABULARY, BATCH = 256, 8192, 16


def build_problem(layers: int, width: int) -> ModuleProblem:
    windows = torch.randint(VOCABULARY, (256, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:])
    return ModuleProblem(LargeGPT(VOCABULARY, CONTEXT, layers, width, heads=8), rows, batch=BATCH, evaluate=BATCH)


def synchronous(problem: ModuleProblem, optimizer_of, seconds: float) -> float:
    """Gradients per second of forward, backward and step, one after another."""
    module = problem.to("cuda").module
    optimizer = optimizer_of(module)
    inputs, targets = (part.cuda() for part in problem.splits.train.rows(torch.arange(BATCH)))
    count, begin = 0, 0.0
    while count < 20 or time.perf_counter() - begin < seconds:
        if count == 10:  # the allocator and the library's choices are warm
            torch.cuda.synchronize()
            begin, count = time.perf_counter(), 10
        loss = nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += 1
    torch.cuda.synchronize()
    return (count - 10) / (time.perf_counter() - begin)


def asynchronous(problem: ModuleProblem, seconds: float, workers: int, prefetch: int) -> float:
    """Updates per second of a run on the GPU, after its start."""
    settings = Settings(steps=10**9, workers=workers, prefetch=prefetch, device="cuda", server_device="cuda",
                        record_every=10**9, progress=False)  # fmt: skip
    training = Training(problem, lg.SteadyMuon(lr=0.001), settings)

    def end() -> None:
        while training.version < 20 * workers or len(training.workers) < workers:
            time.sleep(0.05)
        time.sleep(seconds)
        training.stop()

    threading.Thread(target=end, daemon=True).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = training.run().time
    measured = times[times > times[-1] - seconds]
    return (len(measured) - 1) / float(measured[-1] - measured[0])


def survive(layers: int, width: int) -> None:
    """Kill a worker, then the server, and resume: every gradient in the log is in the parameters once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--victim", folder, "--layers", str(layers), "--width", str(width)]
        victim = subprocess.Popen(command)
        while not (Path(folder) / "killed").exists() and victim.poll() is None:
            time.sleep(0.1)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        trace = lg.resume(folder, build_problem(layers, width), lg.SteadyMuon(lr=0.001), progress=False)
    order = list(zip(trace.worker.tolist(), trace.sequence.tolist(), strict=True))
    verdict(f"a worker and the server were killed; resumed to update {len(order)} of 300, none twice",
            trace.complete and len(order) == len(set(order)) == 300)  # fmt: skip


def victim(folder: str, layers: int, width: int) -> None:
    """A run of 300 updates that kills one of its workers, and says so once another has taken its place."""
    settings = Settings(steps=300, workers=4, device="cuda", server_device="cuda", out=folder, checkpoint_every=20,
                        record_every=1000, progress=False)  # fmt: skip
    training = Training(build_problem(layers, width), lg.SteadyMuon(lr=0.001), settings)

    def kill() -> None:
        while training.version < 40:
            time.sleep(0.01)
        pid = training.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        while 0 not in training.workers or training.workers[0].pid == pid or training.version < 120:
            time.sleep(0.01)
        (Path(folder) / "killed").touch()
        time.sleep(60)

    threading.Thread(target=kill, daemon=True).start()
    training.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--victim", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here")
        return
    if options.victim:
        victim(options.victim, options.layers, options.width)
        return
    problem = build_problem(options.layers, options.width)
    print(f"{problem.dim:,} parameters, {torch.cuda.get_device_name()}")
    loops = {
        "SteadyMuon": lambda module: lg.optim.SteadyMuon(module.named_parameters(), lr=0.001),
        "AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True),
    }
    rates = {name: synchronous(problem, loop, options.seconds) for name, loop in loops.items()}
    for name, rate in rates.items():
        print(f"  synchronous loop, {name:<14}{rate:8.1f} gradients/s")
    for workers, prefetch in ((1, 0), (2, 0), (4, 0), (4, 1)):
        rate = asynchronous(problem, options.seconds, workers, prefetch)
        share = rate / rates["SteadyMuon"]
        print(f"  {workers} workers, prefetch={prefetch}: {rate:8.1f} updates/s, {share:.2f} of the loop")
        if workers == 4:
            verdict(f"4 workers, prefetch={prefetch}: at least .8 of the synchronous loop ({share:.2f})", share >= 0.8)
    survive(options.layers, options.width)


if __name__ == "__main__":
    main()
