"""A worker's local steps on one large vector: lategrad's AdamW in place and out of place, and torch.optim.AdamW."""

import time

import torch

import lategrad as lg
from lategrad.problems.inner import InnerOptimizer
from timing import report, side_by_side, verdict

DIM, STEPS = 10_000_000, 10
BASELINE = "torch.optim.AdamW"


class Pure(InnerOptimizer):
    """With fresh memory for every operation."""

    def _pays_in_place(self, x):
        return False


def job(inner, x, grad):
    memory = inner.memory(x)
    return lambda: inner.walk(x, memory, lambda y, h: grad, STEPS)


def main():
    torch.set_num_threads(1)
    x, grad = torch.zeros(DIM), torch.randn(DIM)
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    rule = lg.baselines.AdamW(lr=1e-3)
    contenders = {
        BASELINE: lambda: [optimizer.step() for _ in range(STEPS)],
        "a job, in place": job(InnerOptimizer(rule, x), x, grad),
        "a job, out of place": job(Pure(rule, x), x, grad),
    }
    seconds = side_by_side(contenders, rounds=3, clock=time.thread_time)
    report(f"{STEPS} steps of AdamW on {DIM:,} float32 parameters, 1 thread, processor time", seconds, BASELINE)
    verdict("a job in place is no slower than torch's AdamW", seconds["a job, in place"] <= seconds[BASELINE])


if __name__ == "__main__":
    main()
