"""One optimizer step on a GPU: AnytimeSGD against fused SGD with momentum, and against the memory's bandwidth.

Times are medians over rounds in which the contenders take turns, each with enough steps that the clock does
not matter; "busy" is the time that the GPU worked, from CUDA's events, "wall" includes the launches.
"""

import argparse
import statistics
import time

import torch

import lategrad as lg
from lategrad.optim import AnytimeSGD, FromRule, OptimisticAnytime, StronglyConvexSGD
from lategrad.registry import RULES, build_rule
from lategrad.rules.rule import apply_update, issue_ticket
from timing import report, require_value, verdict

try:
    from schedulefree import SGDScheduleFree
except ImportError:
    SGDScheduleFree = None

LARGE = 200_000_000
WORDS = 5  # AnytimeSGD reads g, w, x and writes w, x
SGD, FREE, OURS = "torch.optim.SGD(momentum=.9, fused=True)", "SGDScheduleFree", "AnytimeSGD"


def parameters(shapes):
    params = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def wall(step, steps):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def busy(step):
    """Seconds that the GPU works on one step, launches excluded: they wait behind a long kernel."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def take_turns(steps, count, rounds=15):
    for step in steps.values():
        for _ in range(3):
            step()
    walls, busies = {name: [] for name in steps}, {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            walls[name].append(wall(step, count))
            busies[name].append(busy(step))
    median = statistics.median
    return {n: median(v) for n, v in walls.items()}, {n: median(v) for n, v in busies.items()}


def first_step(title, optimizer):
    begin = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    print(f"  first step, compilation included: {time.perf_counter() - begin:6.1f} s   {title}")
    return optimizer.step


def contenders(shapes, extra):
    steps = {SGD: torch.optim.SGD(parameters(shapes), lr=0.1, momentum=0.9, fused=True).step}
    if SGDScheduleFree is not None:
        free = SGDScheduleFree(parameters(shapes), lr=0.1)
        free.train()
        steps[FREE] = free.step
    steps[OURS] = first_step(OURS, AnytimeSGD(parameters(shapes), lr=0.1))
    steps["on a ball"] = first_step("on a ball", AnytimeSGD(parameters(shapes), lr=0.1, domain=lg.Ball(1.0)))
    if extra:
        for optimizer in (StronglyConvexSGD(parameters(shapes), 1.0), OptimisticAnytime(parameters(shapes), 1.0)):
            steps[type(optimizer).__name__] = first_step(type(optimizer).__name__, optimizer)
    return steps


def show(title, shapes, count, extra=False):
    print(title)
    steps = contenders(shapes, extra)
    walls, busies = take_turns(steps, count)
    report("  wall", walls, SGD)
    report("  busy", busies, SGD)
    return walls, busies


def check_values():
    """On the GPU, too, every rule is itself: several tensors, a ball, bf16, against the rule on the CPU in float64."""
    torch.manual_seed(0)
    shapes = [(300, 40), (64, 3, 3, 3), (7,), (70_000,)]
    cases = [(name, torch.float32, 1e-4) for name in RULES] + [("anytime-sgd", torch.bfloat16, 2e-2)]
    for name, dtype, tolerance in cases:
        rule = build_rule(name, 0.5, lg.Ball(20.0))
        if hasattr(rule, "blocks"):  # matrix products, not loops: tests/test_gpu.py compares those
            continue
        start = [torch.randn(shape).to(dtype) for shape in shapes]
        params = [torch.nn.Parameter(x.cuda()) for x in start]
        optimizer = FromRule(params, rule, compile=True)
        state = rule.init(torch.cat([x.flatten() for x in start]).double())
        for _ in range(5):
            grads = [torch.randn(shape).to(dtype) for shape in shapes]
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.cuda()
            optimizer.step()
            grad = torch.cat([g.flatten() for g in grads]).double()
            state = apply_update(rule, state, grad, torch.tensor([0]), issue_ticket(rule, state))
        got = torch.cat([p.detach().flatten() for p in params]).double().cpu()
        worst = (got - rule.query(state)).abs().max().item()
        (backend,) = (step.backend for step in optimizer.in_place_steps(0))
        claim = f"{name}, {dtype}, {backend}: the rule's values within {tolerance:g} (worst {worst:.1e})"
        require_value(claim, worst <= tolerance and backend == "loops")


def requested(which):
    """Bytes that tensors have asked for, without what the allocator adds for its own ends."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak_memory(title, shapes, **options):
    params = parameters(shapes)
    one_vector = sum(p.nbytes for p in params)
    optimizer = AnytimeSGD(params, lr=0.1, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    optimizer.step()
    first = (requested("peak") - before) / one_vector
    kept = (requested("current") - before) / one_vector
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    later = (requested("peak") - before) / one_vector
    print(f"memory of AnytimeSGD {title}, in vectors")
    print(f"  kept {kept:.2f}, peak of the first step {first:.2f}, later {later:.2f}")
    verdict("one vector is kept, and nothing more during a step", kept < 1.01 and max(first, later) < 1.02)


def copy_bandwidth():
    source, target = torch.randn(LARGE, device="cuda"), torch.empty(LARGE, device="cuda")
    walls, _ = take_turns({"copy": lambda: target.copy_(source)}, 20)
    return 2 * source.nbytes / walls["copy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that the script works")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    global LARGE
    if options.quick:
        LARGE = 4_000_000
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if SGDScheduleFree is None:
        print("SGDScheduleFree is left out: the package schedulefree is not installed")
    tensors = 40 if options.quick else 400
    many = [(LARGE // tensors,)] * tensors
    first_step(f"AnytimeSGD on {tensors} tensors, nothing compiled before", AnytimeSGD(parameters(many), lr=0.1))
    check_values()
    peak_memory("on one tensor", [(LARGE,)])
    peak_memory(f"on {tensors} tensors", many)
    peak_memory("on one tensor and a ball", [(LARGE,)], domain=lg.Ball(1.0))

    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s, read and written")
    for title, shapes in (("one tensor", [(LARGE,)]), (f"{tensors} tensors", many)):
        walls, _ = show(f"{LARGE:,} float32 parameters, {title}", shapes, 20, extra=len(shapes) == 1)
        verdict("AnytimeSGD takes at most 0.95x of fused SGD with momentum", walls[OURS] <= 0.95 * walls[SGD])
        if FREE in walls:
            verdict("AnytimeSGD takes at most 0.6x of SGDScheduleFree", walls[OURS] <= 0.6 * walls[FREE])
        share = WORDS * 4 * LARGE / walls[OURS] / bandwidth
        verdict(f"AnytimeSGD runs at 0.9 of the copy's bandwidth or more ({share:.2f})", share >= 0.9)
        ratio = walls["on a ball"] / walls[OURS]
        verdict(f"with a ball at most 1.5x of without ({ratio:.2f}x)", ratio <= 1.5)
    walls, _ = show("160 tensors of 64x64x3x3", [(64, 64, 3, 3)] * 160, 100)
    verdict("AnytimeSGD is no slower than fused SGD with momentum", walls[OURS] <= walls[SGD])


if __name__ == "__main__":
    main()
