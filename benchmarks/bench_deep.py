"""One step of SteadyAdam and SteadyMuon: on the CPU, what a server pays for an update; with --cuda, on a GPU.

A model of square matrices: 10^5, 10^6 and 10^7 parameters on the CPU, 2 x 10^8 in 400 tensors and 100 matrices of
1024 x 1024 on a GPU. AdamW and Muon are torch's own.
"""

import argparse
import time

import torch

from lategrad.optim import SteadyAdam, SteadyMuon
from timing import report, side_by_side, verdict

try:
    from schedulefree import AdamWScheduleFree
except ImportError:
    AdamWScheduleFree = None

ADAMW, MUON, FREE = "torch.optim.AdamW", "torch.optim.Muon", "AdamWScheduleFree"


def parameters(shapes, device):
    params = [torch.nn.Parameter(torch.randn(shape, device=device) / 30) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def schedule_free(shapes, device):
    optimizer = AdamWScheduleFree(parameters(shapes, device), lr=0.01)
    optimizer.train()
    return optimizer.step


def synchronised(step, device):
    if device == "cpu":
        return step

    def run():
        step()
        torch.cuda.synchronize()

    return run


def on_the_cpu():
    for count, side in ((6, 128), (4, 512), (10, 1000)):
        shapes = [(side, side)] * count
        title = f"{count} matrices of {side} x {side} on the CPU, {torch.get_num_threads()} threads"
        steps = {ADAMW: torch.optim.AdamW(parameters(shapes, "cpu")).step,
                 "SteadyAdam": SteadyAdam(parameters(shapes, "cpu"), compile=True).step}  # fmt: skip
        seconds = side_by_side(steps, rounds=9)
        ratio = seconds["SteadyAdam"] / seconds[ADAMW]
        begin = time.perf_counter()
        muon = SteadyMuon(parameters(shapes, "cpu"))
        muon.step()
        begin = time.perf_counter()
        muon.step()
        seconds["SteadyMuon"] = time.perf_counter() - begin
        report(title, seconds, ADAMW)
        verdict(f"SteadyAdam is no slower than AdamW ({ratio:.2f}x)", ratio <= 1)
        print(f"  a server makes at most {1 / seconds['SteadyMuon']:.1f} updates/s of SteadyMuon")


def on_a_gpu():
    many = [(500_000,)] * 400
    fused = "torch.optim.AdamW(fused=True)"
    steps = {fused: torch.optim.AdamW(parameters(many, "cuda"), fused=True).step,
             "SteadyAdam": SteadyAdam(parameters(many, "cuda")).step}  # fmt: skip
    if AdamWScheduleFree is not None:
        steps[FREE] = schedule_free(many, "cuda")
    seconds = side_by_side({name: synchronised(step, "cuda") for name, step in steps.items()})
    report("2 x 10^8 parameters in 400 tensors on a GPU", seconds, fused)
    ratio = seconds["SteadyAdam"] / seconds[fused]
    verdict(f"SteadyAdam takes at most 1.1x of fused AdamW ({ratio:.2f}x)", ratio <= 1.1)
    if FREE in seconds:
        ratio = seconds["SteadyAdam"] / seconds[FREE]
        verdict(f"SteadyAdam takes at most half of AdamWScheduleFree ({ratio:.2f}x)", ratio <= 0.5)
    matrices = [(1024, 1024)] * 100
    steps = {MUON: torch.optim.Muon(parameters(matrices, "cuda")).step,
             "SteadyMuon": SteadyMuon(parameters(matrices, "cuda")).step}  # fmt: skip
    seconds = side_by_side({name: synchronised(step, "cuda") for name, step in steps.items()})
    report("100 matrices of 1024 x 1024 on a GPU", seconds, MUON)
    verdict("SteadyMuon is no slower than torch.optim.Muon", seconds["SteadyMuon"] <= seconds[MUON])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true")
    on_a_gpu() if parser.parse_args().cuda else on_the_cpu()
