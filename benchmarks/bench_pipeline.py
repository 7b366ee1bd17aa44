"""Two stages on two cores: a pipeline that never flushes against torch's own 1F1B schedule, and what both learn.

    python benchmarks/bench_pipeline.py                                  # speed, a minute
    python benchmarks/bench_pipeline.py --figure docs/figures/pipeline-busy.svg
    python benchmarks/bench_pipeline.py --pauses                         # the schedules alone, also on a busy machine
    python benchmarks/bench_pipeline.py --learning docs/figures/pipeline-learning.svg   # minutes
    python benchmarks/bench_pipeline.py --device cuda                    # values and memory; ranks share the GPU

Both pipelines run in the same two processes and take turns, so that a busy machine disturbs both alike. A batch is 4
microbatches; 1F1B makes one update for it, ours four. Being busy means: in a forward or a backward pass or an update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lategrad as lg
import lategrad.optim
from lategrad.pipeline import Span
from timing import require_value, verdict

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # for the GPT of the example

from pipeline_training import batch, gpt, held_out, loss

MICROBATCHES, ROWS = 4, 32
LAYERS, WIDTH = 6, 128
ROUNDS, BATCHES = 5, 6
PAUSE = 0.02
LEARNING, LEARNING_ROWS = {"layers": 4, "width": 64}, 16
RANKS = 2


class Flushing:
    """One stage of torch's own schedule, with a timeline."""

    def __init__(
        self, stages: list[nn.Module], optimizers: list[torch.optim.Optimizer], objective: Callable[..., Tensor] = loss
    ) -> None:
        self.rank = dist.get_rank()
        stage = PipelineStage(stages[self.rank], self.rank, len(stages), torch.device("cpu"))
        self.optimizers, self.timeline = optimizers, []
        stage.forward_one_chunk = self.timed("forward", stage.forward_one_chunk)
        stage.backward_one_chunk = self.timed("backward", stage.backward_one_chunk)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=objective)

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(number: int, *arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = call(number, *arguments, **options)
            self.timeline.append(Span(kind, number, begin, time.perf_counter()))
            return result

        return run

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.schedule.step(*([inputs] if self.rank == 0 else []), **({"target": targets} if self.rank else {}))
        begin = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.timeline.append(Span("update", -1, begin, time.perf_counter()))


def busy(timeline: list[Span], begin: float, end: float) -> float:
    return sum(span.end - span.begin for span in timeline if span.begin >= begin and span.end <= end) / (end - begin)


class Pause(torch.autograd.Function):
    """Passes that take the time of passes on a device, without using a core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2 * PAUSE)
        return grad


class Pausing(nn.Linear):
    """A small layer with long passes."""

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(super().forward(x))


def speed(out: dict[str, Any], pauses: bool) -> None:
    """Samples a second and busy shares of both, taking turns."""

    def model() -> nn.Sequential:
        return nn.Sequential(Pausing(8, 8), Pausing(8, 8)) if pauses else gpt(LAYERS, WIDTH)

    def adamw(stage: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(stage.parameters(), lr=1e-3)

    objective = nn.functional.mse_loss if pauses else loss
    ours = lg.pipeline.Pipeline(lg.pipeline.cut(model(), RANKS), objective, adamw, microbatches=MICROBATCHES,
                                record_timeline=True)  # fmt: skip
    stages = lg.pipeline.cut(model(), RANKS)
    torchs = Flushing(stages, [adamw(stages[dist.get_rank()])], objective)
    contenders = {"lategrad.pipeline": ours, "Schedule1F1B": torchs}
    rows = torch.ones(MICROBATCHES * ROWS, 8)
    data = [(rows, rows) if pauses else batch(t, MICROBATCHES * ROWS) for t in range(BATCHES)]
    measured: dict[str, Any] = {name: {"seconds": [], "cpu": [], "busy": []} for name in contenders}
    for turn in range(ROUNDS + 1):
        for name, pipe in contenders.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            for inputs, targets in data:
                pipe.step(inputs, targets)
            mine, cpu = time.perf_counter(), time.process_time() - cpu
            dist.barrier()
            if turn:  # the first is for warming up
                measured[name]["seconds"].append(time.perf_counter() - begin)
                measured[name]["cpu"].append(cpu)
                measured[name]["busy"].append(busy(pipe.timeline, begin, mine))
                measured[name]["spans"] = [span for span in pipe.timeline if begin <= span.begin <= mine]
    out |= measured
    out["stash"] = ours.stash_bytes / sum(p.nbytes for p in ours.module.parameters())
    ours.drain()
    ours.close()


def report_speed(of_ranks: list[dict[str, Any]], pauses: bool) -> None:
    names = ("lategrad.pipeline", "Schedule1F1B")
    samples = BATCHES * MICROBATCHES * ROWS
    passes = f"that pause {PAUSE:g} s and {2 * PAUSE:g} s" if pauses else f"of a GPT, {LAYERS} layers of width {WIDTH}"
    print(f"{RANKS} stages {passes}, {MICROBATCHES} microbatches of {ROWS} rows")
    for name in names:
        seconds = statistics.median(of_ranks[0][name]["seconds"])
        shares = [statistics.median(of_rank[name]["busy"]) for of_rank in of_ranks]
        cpu = [1e3 * statistics.median(of_rank[name]["cpu"]) / BATCHES for of_rank in of_ranks]
        print(f"  {name:<20} {samples / seconds:8.1f} samples/s, stages busy {shares[0]:.2f}, {shares[1]:.2f}; "
              f"processor time of a batch {cpu[0]:.0f}, {cpu[1]:.0f} ms")  # fmt: skip
    pairs = zip(*(of_ranks[0][name]["seconds"] for name in names), strict=True)
    ratios = [torchs / ours for ours, torchs in pairs]
    print(f"  {'ratio':<20} {statistics.median(ratios):8.2f}, rounds {', '.join(f'{r:.2f}' for r in ratios)}")
    print(
        f"  {'stashed weights':<20} " + ", ".join(f"{of_rank['stash']:.0f} copies of a stage" for of_rank in of_ranks)
    )
    least = min(statistics.median(of_rank[names[0]]["busy"]) for of_rank in of_ranks)
    verdict("at least 1.15 times the samples per second of torch's 1F1B", statistics.median(ratios) >= 1.15)
    verdict("every stage is busy at least 0.9 of the time", least >= 0.9)
    load = os.getloadavg()[0]
    if load > RANKS + 0.5 and not pauses:
        print(f"  the load of this machine was {load:.1f}: more processes than cores, so these times mean little")


def draw_busy(of_ranks: list[dict[str, Any]], path: Path) -> None:
    """Who was busy when: a row for each stage, both pipelines above each other, on one scale."""
    from matplotlib.figure import Figure

    colours = {"forward": "tab:blue", "backward": "tab:green", "update": "tab:orange"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for ax, name in zip(axes, ("lategrad.pipeline", "Schedule1F1B"), strict=True):
        start = min(span.begin for of_rank in of_ranks for span in of_rank[name]["spans"])
        for k, of_rank in enumerate(of_ranks):
            for kind, colour in colours.items():
                bars = [(s.begin - start, s.end - s.begin) for s in of_rank[name]["spans"] if s.kind == kind]
                ax.broken_barh(bars, (k - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3,
                               label=kind if k == 0 else None)  # fmt: skip
        shares = ", ".join(f"{statistics.median(of_rank[name]['busy']):.0%}" for of_rank in of_ranks)
        ax.set(yticks=range(RANKS), yticklabels=[f"stage {k}" for k in range(RANKS)])
        ax.set_title(f"{name}: busy {shares}", loc="left")
        ax.invert_yaxis()
    seconds = statistics.median(of_ranks[0]["Schedule1F1B"]["seconds"])
    axes[-1].set(xlabel="seconds", xlim=(0, seconds / BATCHES * 4))
    axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small", frameon=False)  # above the bars
    figure.savefig(path)
    print(f"  picture: {path}")


# ---- What both learn


def muon(stage: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """torch's Muon for matrices and AdamW for all else, with updates of the same size."""
    embeddings = {p for module in stage.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [p for p in stage.parameters() if p.dim() == 2 and p not in embeddings]
    others = [p for p in stage.parameters() if p.dim() != 2 or p in embeddings]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    ]
    return [*optimizers, torch.optim.AdamW(others, lr=lr, weight_decay=0.0)] if others else optimizers


LEARNERS = {
    "SteadyMuon, never flushed, update for each microbatch": ("steady-muon", LEARNING_ROWS),
    "SteadyMuon, never flushed, update for each batch": ("steady-muon", MICROBATCHES * LEARNING_ROWS),
    "Muon, 1F1B": ("muon", MICROBATCHES * LEARNING_ROWS),
}
"""The optimizer of each, and the rows behind one of its updates."""


def without_delay(optimizer: str, rows: int, lr: float, samples: int) -> float:
    """The held-out loss of one process that trains without delay, with as many rows for each update."""
    model = gpt(**LEARNING)
    optimizers = [lg.optim.SteadyMuon(model, lr=lr)] if optimizer == "steady-muon" else muon(model, lr)
    decays = linear_decay(optimizers, samples // rows) if optimizer == "muon" else []
    for t in range(samples // rows):
        inputs, targets = batch(t, rows)
        loss(model(inputs), targets).backward()
        for one in [*optimizers, *decays]:
            one.step()
        model.zero_grad()
    with torch.no_grad(), lg.optim.delayed.output_of(optimizers[0]):
        return loss(model(held_out()[0]), held_out()[1]).item()


def linear_decay(optimizers: list[torch.optim.Optimizer], updates: int) -> list[Any]:
    """Muon ends with a small learning rate; SteadyMuon ships an average instead."""
    return [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, updates) for optimizer in optimizers]


def learn(out: dict[str, Any], lrs: dict[str, float], samples: int, records: int = 12) -> None:
    """Held-out loss over seconds of training, taking turns from record to record."""
    rank, batches = dist.get_rank(), samples // (MICROBATCHES * LEARNING_ROWS)
    whole = gpt(**LEARNING)
    pipes: dict[str, Any] = {}
    decays: list[Any] = []
    for name, (optimizer, rows) in LEARNERS.items():
        if optimizer == "muon":
            stages = lg.pipeline.cut(whole, RANKS)
            pipes[name] = Flushing(stages, muon(stages[rank], lrs[name]))
            decays = linear_decay(pipes[name].optimizers, batches)
        else:
            stages_of_own = lg.pipeline.cut(gpt(**LEARNING), RANKS)
            pipes[name] = lg.pipeline.Pipeline(
                stages_of_own, loss, lambda stage, lr=lrs[name]: lg.optim.SteadyMuon(stage, lr=lr),
                microbatches=MICROBATCHES, update_every=rows // LEARNING_ROWS,
            )  # fmt: skip

    def whole_loss() -> float | None:
        for p in stages[-1].parameters():
            dist.broadcast(p.data, RANKS - 1)
        with torch.no_grad():
            return loss(whole(held_out()[0]), held_out()[1]).item() if rank == 0 else None

    seconds = dict.fromkeys(pipes, 0.0)
    curves: dict[str, list[tuple[float, float | None]]] = {name: [] for name in pipes}
    for chunk in torch.arange(batches).chunk(records):
        for name, pipe in pipes.items():
            data = [batch(t, MICROBATCHES * LEARNING_ROWS) for t in chunk.tolist()]
            dist.barrier()
            begin = time.perf_counter()
            for inputs, targets in data:
                pipe.step(inputs, targets)
                for decay in decays if isinstance(pipe, Flushing) else []:
                    decay.step()
            dist.barrier()
            seconds[name] += time.perf_counter() - begin
            value = whole_loss() if isinstance(pipe, Flushing) else pipe.evaluate(*held_out())
            curves[name].append((seconds[name], None if value is None else float(value)))
    out |= curves


def report_learning(of_ranks: list[dict[str, Any]], lrs: dict[str, float], path: Path) -> None:
    from matplotlib.figure import Figure

    curves = {name: of_ranks[0 if kind == "muon" else -1][name] for name, (kind, _) in LEARNERS.items()}
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    ax = figure.add_subplot()
    for name, curve in curves.items():
        ax.plot(*zip(*curve, strict=True), marker=".", label=name)
        print(f"  {name}, lr {lrs[name]:g}: " + "  ".join(f"{seconds:.1f} s {value:.3f}" for seconds, value in curve))
    ax.set(xlabel="seconds of training", ylabel="held-out loss", yscale="log")
    for axis_format in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        axis_format("{x:.1f}")
    ax.legend(fontsize="small")
    figure.savefig(path)
    print(f"  picture: {path}")
    *ours, torchs = curves
    for name in ours:
        reached = next((seconds for seconds, value in curves[name] if value <= curves[torchs][-1][1]), None)
        share = "not at all" if reached is None else f"in {reached / curves[torchs][-1][0]:.2f} of its time"
        print(f"  {name} reached the last loss of {torchs} {share}")


# ---- On one GPU


def on_gpu(out: dict[str, Any]) -> None:
    """With and without stashing, ranks that share one GPU: values against the CPU's, delays, peaks of memory."""
    rank = dist.get_rank()
    torch.cuda.set_device(0)
    for stashing in (True, False):
        vectors = {}
        for device in ("cpu", "cuda"):
            model = gpt(2 * RANKS, WIDTH).double().to(device)
            stages = lg.pipeline.cut(model, dist.get_world_size())
            pipe = lg.pipeline.Pipeline(stages, loss, lg.optim.SteadyMuon, stashing=stashing)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for t in range(20):
                pipe.step(*batch(t, ROWS))
            trace = pipe.trace()
            vectors[device] = None if trace is None else trace.output
            size = sum(p.nbytes for p in pipe.module.parameters())
            if device == "cuda":
                peak = torch.cuda.max_memory_allocated() / 2**20
                print(f"stage {rank}, stashing {stashing}: delays {sorted(set(pipe.delays))}, "
                      f"{pipe.stash_bytes / size:.0f} copies stashed, peak {peak:.1f} MiB, parameters "
                      f"{size / 2**20:.1f} MiB", flush=True)  # fmt: skip
            pipe.close()
        if rank == 0:
            out[f"stashing {stashing}"] = (vectors["cpu"] - vectors["cuda"]).abs().max().item()


# ---- Ranks


@contextmanager
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    dist.destroy_process_group()


def run_rank(rank: int, folder: str, task: str, arguments: dict[str, Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    out: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.pop("ranks"))
    with one_thread():
        {"speed": speed, "learn": learn, "on_gpu": on_gpu}[task](out, **arguments)
    torch.save(out, f"{folder}/{rank}")


def run(task: str, ranks: int = RANKS, **arguments: Any) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, task, {"ranks": ranks, **arguments}), nprocs=ranks)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="draw who was busy when")
    parser.add_argument(
        "--pauses", action="store_true", help="stages that wait instead of computing: the schedule alone"
    )
    parser.add_argument("--learning", type=Path, help="compare what both learn, and draw it there")
    parser.add_argument("--samples", type=int, default=19_200, help="windows that both learn from")
    parser.add_argument(
        "--lrs", type=json.loads, help="JSON: the learning rate of each, instead of a search without delay"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda":
        for ranks in (2, 4):
            print(f"{ranks} stages share one GPU")
            for name, difference in run("on_gpu", ranks)[0].items():
                require_value(f"{name}: as on the CPU to 1e-8, got {difference:.1e}", difference < 1e-8)
        return
    if options.learning:
        torch.set_num_threads(1)
        lrs = options.lrs or {}
        for name, (optimizer, rows) in () if lrs else LEARNERS.items():
            found = {lr: without_delay(optimizer, rows, lr, options.samples) for lr in (0.01, 0.03, 0.1)}
            losses = ", ".join(f"lr {lr:g} {value:.3f}" for lr, value in found.items())
            print(f"  without delay, {optimizer}, {rows} rows for each update: {losses}", flush=True)
            lrs[name] = min(found, key=found.__getitem__)
        report_learning(run("learn", lrs=lrs, samples=options.samples), lrs, options.learning)
        return
    of_ranks = run("speed", pauses=options.pauses)
    report_speed(of_ranks, options.pauses)
    if options.figure:
        draw_busy(of_ranks, options.figure)


if __name__ == "__main__":
    main()
