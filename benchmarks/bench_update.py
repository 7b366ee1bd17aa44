"""One server update in place: every backend at three sizes, and the rules against torch.optim.SGD with momentum."""

import torch

import lategrad as lg
from timing import report, side_by_side, verdict

DIM = 10_000_000
BASELINE = "torch.optim.SGD(momentum=.9)"
BACKENDS = ("eager", "compile", "loops")


def rule_step(rule, grad, backend=None, calls=1, writes_query=False):
    state = rule.init(torch.zeros_like(grad))
    step = lg.in_place(rule, state, backend=backend)
    query = torch.empty_like(grad) if writes_query else None

    def run():
        for _ in range(calls):
            step(grad, 0, None, query)

    run()
    assert backend in (None, step.backend)
    return run


def pure_step(rule, grad):
    state = rule.init(torch.zeros(DIM))
    return lambda: rule.update(state, grad, 0)


def compare_backends():
    """Microseconds of an update that also writes the next query, as a server makes it."""
    for dim, calls in ((7_850, 200), (1_000_000, 5), (DIM, 1)):
        for title, domain in (("", lg.WholeSpace()), (" on a ball", lg.Ball(1.0))):
            rule, grad = lg.Anytime(lg.OGD(0.1, domain)), torch.randn(dim)
            seconds = side_by_side({b: rule_step(rule, grad, b, calls, writes_query=True) for b in BACKENDS}, rounds=9)
            shown = ", ".join(f"{name} {value / calls * 1e6:,.1f}" for name, value in seconds.items())
            print(f"{dim:>10,} entries{title}, 1 thread, us: {shown}")
            if not title:
                verdict("loops are no slower than torch.compile", seconds["loops"] <= 1.05 * seconds["compile"])


def main():
    torch.set_num_threads(1)
    compare_backends()
    grad = torch.randn(DIM)
    parameter = torch.nn.Parameter(torch.zeros(DIM))
    parameter.grad = grad
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    anytime = lg.Anytime(lg.OGD(lr=0.1))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = side_by_side(
            {
                BASELINE: sgd.step,
                "anytime SGD, in place": rule_step(anytime, grad),
                "anytime SGD, in place, eager": rule_step(anytime, grad, "eager"),
                "anytime SGD, pure, eager": pure_step(anytime, grad),
                "anytime SGD on a ball": rule_step(lg.Anytime(lg.OGD(0.1, lg.Ball(1.0))), grad),
                "optimistic anytime": rule_step(lg.Anytime(lg.OptimisticOGD(1.0)), grad),
                "strongly convex": rule_step(lg.StronglyConvexOGD(1.0), grad),
            }
        )
        report(f"{DIM:,} float32 parameters, {threads} thread(s)", seconds, BASELINE)
        verdict("in place, anytime SGD is no slower than SGD with momentum",
                seconds["anytime SGD, in place"] <= seconds[BASELINE])  # fmt: skip


if __name__ == "__main__":
    main()
