"""A worker's local steps on one large vector: lategrad's AdamW in place and out of place, and torch.optim.AdamW."""

import time

import torch

import lategrad as lg
from lategrad.problems.local_steps import InnerOptimizer
from timing import report, side_by_side, verdict

DIM, STEPS = 10_000_000, 10
BASELINE = "torch.optim.AdamW"


def out_of_place(rule, x, grad):
    state = rule.init(x)
    for _ in range(STEPS):
        state = rule.update(state, grad, 0)


def main():
    torch.set_num_threads(1)
    x, grad = torch.zeros(DIM), torch.randn(DIM)
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    rule = lg.baselines.AdamW(lr=1e-3)
    inner = InnerOptimizer(rule, x)
    state = inner.init(x)
    contenders = {
        BASELINE: lambda: [optimizer.step() for _ in range(STEPS)],
        "a job, in place": lambda: inner.run(x, state, lambda y, h: grad, STEPS),
        "a job, out of place": lambda: out_of_place(rule, x, grad),
    }
    seconds = side_by_side(contenders, rounds=3, clock=time.thread_time)
    report(f"{STEPS} steps of AdamW on {DIM:,} float32 parameters, 1 thread, processor time", seconds, BASELINE)
    verdict("a job in place is no slower than torch's AdamW", seconds["a job, in place"] <= seconds[BASELINE])


if __name__ == "__main__":
    main()
