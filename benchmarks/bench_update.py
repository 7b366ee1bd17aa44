"""One server update on 10^7 float32 parameters: the rules in place against torch.optim.SGD with momentum."""

import torch

import lategrad as lg
from timing import report, side_by_side, verdict

DIM = 10_000_000
BASELINE = "torch.optim.SGD(momentum=.9)"


def rule_step(rule, grad, compile=True):
    state = rule.init(torch.zeros(DIM))
    step = lg.in_place(rule, compile=compile)
    delay = torch.tensor(0)
    return lambda: step(state, grad, delay)


def pure_step(rule, grad):
    state = rule.init(torch.zeros(DIM))
    delay = torch.tensor(0)
    return lambda: rule.update(state, grad, delay)


def main():
    grad = torch.randn(DIM)
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    parameter.grad = grad
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    anytime = lg.Anytime(lg.OGD(lr=0.1))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.compiler.reset()  # compiled loops remember the number of threads
        seconds = side_by_side(
            {
                BASELINE: sgd.step,
                "anytime SGD, in place, compiled": rule_step(anytime, grad),
                "anytime SGD, in place, eager": rule_step(anytime, grad, compile=False),
                "anytime SGD, pure, eager": pure_step(anytime, grad),
                "anytime SGD on a ball, compiled": rule_step(lg.Anytime(lg.OGD(0.1, lg.Ball(1.0))), grad),
                "optimistic anytime, compiled": rule_step(lg.Anytime(lg.OptimisticOGD(1.0)), grad),
                "strongly convex, compiled": rule_step(lg.StronglyConvexOGD(1.0), grad),
            }
        )
        report(f"{DIM:,} float32 parameters, {threads} thread(s)", seconds, BASELINE)
        verdict("in place, anytime SGD is no slower than SGD with momentum",
                seconds["anytime SGD, in place, compiled"] <= seconds[BASELINE])  # fmt: skip


if __name__ == "__main__":
    main()
