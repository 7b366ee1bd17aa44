"""One step of SteadyAdam and SteadyMuon on the CPU: what a server pays for an update; bench_optim_gpu.py is for GPUs.

A model of square matrices with 10^5, 10^6 and 10^7 parameters. AdamW is torch's own.
"""

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


if __name__ == "__main__":
    on_the_cpu()
