"""One optimizer step on the CPU: AnytimeSGD against torch.optim.SGD with momentum and SGDScheduleFree."""

import time

import torch

import lategrad as lg
from lategrad.optim import AnytimeSGD, OptimisticAnytime, StronglyConvexSGD
from timing import report, side_by_side, verdict

try:
    from schedulefree import SGDScheduleFree
except ImportError:
    SGDScheduleFree = None

DIM = 10_000_000
ONE = [(DIM,)]
MANY = [(DIM // 20,)] * 20 + [(64,)] * 60  # a network: large weights, small biases
SMALL = [(64, 64, 3, 3)] * 160
SGD, FREE, OURS = "torch.optim.SGD(momentum=.9)", "SGDScheduleFree", "AnytimeSGD"


def parameters(shapes):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def schedule_free_step(shapes):
    optimizer = SGDScheduleFree(parameters(shapes), lr=0.1)
    optimizer.train()
    return optimizer.step


def contenders(shapes, extra):
    steps = {SGD: torch.optim.SGD(parameters(shapes), lr=0.1, momentum=0.9).step}
    if SGDScheduleFree is not None:
        steps[FREE] = schedule_free_step(shapes)
    steps[OURS] = AnytimeSGD(parameters(shapes), lr=0.1).step
    if extra:
        steps["torch.optim.SGD(momentum=.9, fused=True)"] = torch.optim.SGD(
            parameters(shapes), lr=0.1, momentum=0.9, fused=True
        ).step
        steps["AnytimeSGD, interpolation .9"] = AnytimeSGD(parameters(shapes), lr=0.1, interpolation=0.9).step
        steps["AnytimeSGD on a ball"] = AnytimeSGD(parameters(shapes), lr=0.1, domain=lg.Ball(1.0)).step
        steps["AnytimeSGD, eager"] = AnytimeSGD(parameters(shapes), lr=0.1, compile=False).step
        steps["StronglyConvexSGD"] = StronglyConvexSGD(parameters(shapes), 1.0).step
        steps["OptimisticAnytime"] = OptimisticAnytime(parameters(shapes), 1.0).step
    return steps


def main():
    if SGDScheduleFree is None:
        print("SGDScheduleFree is left out: the package schedulefree is not installed")
    for threads in (1, 2):
        torch.set_num_threads(threads)  # before anything is compiled: compiled loops keep their threads
        for title, shapes, extra in (("one tensor", ONE, True), ("20 + 60 tensors", MANY, False)):
            seconds = side_by_side(contenders(shapes, extra))
            report(f"{DIM:,} float32 parameters, {title}, {threads} thread(s)", seconds, SGD)
            verdict("AnytimeSGD is no slower than SGD with momentum", seconds[OURS] <= seconds[SGD])
            if FREE in seconds:
                ratio = seconds[OURS] / seconds[FREE]
                verdict(f"AnytimeSGD takes at most 0.7x of SGDScheduleFree ({ratio:.2f}x)", ratio <= 0.7)
    seconds = side_by_side(contenders(SMALL, extra=False))
    report("160 tensors of 64x64x3x3, 2 threads", seconds, SGD)
    begin = time.perf_counter()
    AnytimeSGD(parameters([(DIM + 1,)]), lr=0.1).step()
    print(f"first step of AnytimeSGD on one tensor, compilation included: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
