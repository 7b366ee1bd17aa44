"""One optimizer step on a GPU: against torch's fused optimizers and Muon, and against the memory's bandwidth.

Times are medians over rounds in which the contenders take turns, each with enough steps that the clock does
not matter; "busy" is the time that the GPU worked, from CUDA's events, "wall" includes the launches, "host" is what
the launching program takes while the GPU is busy with something else. Parts: values, anytime, adam, muon, memory.
"""

import argparse
import functools
import gc
import math
import statistics
import time

import torch

import lategrad as lg
from lategrad.optim import AnytimeSGD, FromRule, OptimisticAnytime, SteadyAdam, SteadyMuon, StronglyConvexSGD
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
ADAMW, MUON = "torch.optim.AdamW(fused=True)", "torch.optim.Muon"
PARTS = ("values", "anytime", "adam", "muon", "memory")


def gpt2(width, layers, vocabulary=50257, context=1024):
    """The tensors of a GPT-2: (768, 12) has 124 million parameters, (1600, 48) has 1.5 billion."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,), (width,)]
    return [(vocabulary, width), (context, width)], matrices * layers, vectors * layers


def parameters(shapes, dtype=torch.float32):
    params = [torch.nn.Parameter(torch.zeros(shape, device="cuda", dtype=dtype)) for shape in shapes]
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


def host(step):
    """Seconds until the step's launches are queued, and how many kernels and copies there are."""
    torch.cuda._sleep(200_000_000)
    begin = time.perf_counter()
    step()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return seconds, kernels


def show_kernels(title, step):
    seconds, kernels = host(step)
    longest = sorted((event.self_device_time_total for event in kernels), reverse=True)[:4]
    times = ", ".join(f"{value:.0f}" for value in longest)
    print(f"  {title:<40} host {seconds * 1e6:6.0f} us, {len(kernels):4} launches, the longest {times} us")


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
    for name, step in steps.items():
        show_kernels(name, step)
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


def peak_memory(title, shapes, build, limit, dtype=torch.float32):
    """What a step holds beside parameters, gradients and what it keeps, in vectors of the parameters' size."""
    gc.collect()
    params = parameters([shape for part in shapes for shape in part], dtype)
    one_vector = 4 * sum(p.numel() for p in params)
    optimizer = build(params, [len(part) for part in shapes])
    peaks = []
    before = requested("current")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(requested("peak"))
    kept = (requested("current") - before) / one_vector
    first, later = ((peak - requested("current")) / one_vector for peak in (peaks[0], peaks[-1]))
    print(f"  {title:<40} kept {kept:5.2f}, temporaries of the first step {first:5.2f}, of later ones {later:5.2f}")
    verdict(f"temporaries of at most {limit} of a vector", max(first, later) <= limit)


def steady_muon(params, counts):
    kinds = ["embedding"] * counts[0] + ["matrix"] * counts[1] + ["other"] * counts[2]
    return SteadyMuon([{"params": params, "kinds": kinds}])


def show_memory(sizes):
    tensors = 40 if LARGE < 10**8 else 400
    for title, shapes in (("one tensor", [(LARGE,)]), (f"{tensors} tensors", [(LARGE // tensors,)] * tensors)):
        for name, options in (("AnytimeSGD", {}), ("AnytimeSGD on a ball", {"domain": lg.Ball(1.0)})):
            build = functools.partial(lambda options, params, _: AnytimeSGD(params, lr=0.1, **options), options)
            peak_memory(f"{name}, {title}", [shapes], build, 0.02)
    for width, layers in sizes:
        shapes = gpt2(width, layers)
        count = sum(math.prod(shape) for part in shapes for shape in part)
        print(f"GPT-2 of {count:,} parameters: vectors of float32")
        peak_memory("SteadyAdam", shapes, lambda params, _: SteadyAdam(params), 0.35)
        peak_memory("SteadyMuon", shapes, steady_muon, 0.35)
        peak_memory("SteadyMuon, bfloat16 parameters", shapes, steady_muon, 0.35, torch.bfloat16)
        peak_memory("torch.optim.AdamW, fused", shapes, lambda params, _: torch.optim.AdamW(params, fused=True), 0.35)
        matrices = [[], shapes[1], []]
        peak_memory("torch.optim.Muon, the matrices alone", matrices, lambda params, _: torch.optim.Muon(params), 0.35)


def show_adam():
    for title, shapes in (("one tensor", [(LARGE,)]), ("400 tensors", [(LARGE // 400,)] * 400)):
        steps = {ADAMW: torch.optim.AdamW(parameters(shapes), fused=True).step,
                 "SteadyAdam": SteadyAdam(parameters(shapes)).step}  # fmt: skip
        walls, busies = take_turns(steps, 20)
        print(f"{LARGE:,} float32 parameters, {title}")
        report("  wall", walls, ADAMW)
        report("  busy", busies, ADAMW)
        for name, step in steps.items():
            show_kernels(name, step)
        ratio = walls["SteadyAdam"] / walls[ADAMW]
        verdict(f"SteadyAdam takes at most 1.05x of fused AdamW ({ratio:.2f}x)", ratio <= 1.05)


def show_muon():
    for title, shapes in (
        ("100 matrices of 1024 x 1024", [(1024, 1024)] * 100),
        ("the matrices of a GPT-2 of 124 million parameters", gpt2(768, 12)[1]),
        ("12 of the 48 layers of a GPT-2 of 1.5 billion parameters", gpt2(1600, 12)[1]),
    ):
        steps = {MUON: torch.optim.Muon(parameters(shapes)).step, "SteadyMuon": SteadyMuon(parameters(shapes)).step}
        walls, busies = take_turns(steps, 5)
        print(title)
        report("  wall", walls, MUON)
        report("  busy", busies, MUON)
        for name, step in steps.items():
            show_kernels(name, step)
        ratio = walls["SteadyMuon"] / walls[MUON]
        verdict(f"SteadyMuon takes at most 0.4x of torch.optim.Muon ({ratio:.2f}x)", ratio <= 0.4)


def copy_bandwidth():
    source, target = torch.randn(LARGE, device="cuda"), torch.empty(LARGE, device="cuda")
    walls, _ = take_turns({"copy": lambda: target.copy_(source)}, 20)
    return 2 * source.nbytes / walls["copy"]


def show_anytime():
    tensors = 40 if LARGE < 10**8 else 400
    many = [(LARGE // tensors,)] * tensors
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s, read and written")
    for title, shapes in (("one tensor", [(LARGE,)]), (f"{tensors} tensors", many)):
        walls, _ = show(f"{LARGE:,} float32 parameters, {title}", shapes, 20, extra=len(shapes) == 1)
        ratio = walls[OURS] / walls[SGD]
        verdict(f"AnytimeSGD takes at most 0.95x of fused SGD with momentum ({ratio:.2f}x)", ratio <= 0.95)
        if FREE in walls:
            verdict("AnytimeSGD takes at most 0.6x of SGDScheduleFree", walls[OURS] <= 0.6 * walls[FREE])
        share = WORDS * 4 * LARGE / walls[OURS] / bandwidth
        verdict(f"AnytimeSGD runs at 0.9 of the copy's bandwidth or more ({share:.2f})", share >= 0.9)
        ratio = walls["on a ball"] / walls[OURS]
        verdict(f"with a ball at most 1.5x of without ({ratio:.2f}x)", ratio <= 1.5)
    walls, _ = show("160 tensors of 64x64x3x3", [(64, 64, 3, 3)] * 160, 100)
    verdict("AnytimeSGD is no slower than fused SGD with momentum", walls[OURS] <= walls[SGD])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that the script works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
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
    run = {"values": check_values, "anytime": show_anytime, "adam": show_adam, "muon": show_muon,
           "memory": lambda: show_memory([(256, 4)] if options.quick else [(768, 12), (1600, 48)])}  # fmt: skip
    for part in options.parts:
        run[part]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
