"""What ``check_optimizer`` finds in our optimizers, torch's and schedulefree's; takes minutes.

python benchmarks/check_optimizers.py [NAME ...] [--skip compiled sharded] [--device cuda]
"""

import argparse
from functools import partial

import torch

import lategrad as lg
from lategrad.checks import check_optimizer

OPTIMIZERS = {
    "SteadyMuon": partial(lg.optim.SteadyMuon, lr=0.01),
    "SteadyAdam": partial(lg.optim.SteadyAdam, lr=0.01),
    "AnytimeSGD": partial(lg.optim.AnytimeSGD, lr=0.1),
    "OptimisticAnytime": partial(lg.optim.OptimisticAnytime, diameter=1.0),
    "StronglyConvexSGD": partial(lg.optim.StronglyConvexSGD, strong_convexity=10.0),
    "Steady": partial(lg.optim.FromRule, rule="steady:lr=1"),
    "torch.optim.SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "torch.optim.AdamW": partial(torch.optim.AdamW, lr=0.01),
    "torch.optim.Muon": partial(torch.optim.Muon, lr=0.01),
}
try:
    import schedulefree
except ImportError:
    print("schedulefree is not installed")
else:
    for name in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"):
        OPTIMIZERS[name] = partial(getattr(schedulefree, name), lr=0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(OPTIMIZERS))
    parser.add_argument("--skip", nargs="+", default=[])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for name in arguments.names or OPTIMIZERS:
        print(f"\n{name}", flush=True)
        try:
            results = check_optimizer(OPTIMIZERS[name], skip=arguments.skip, device=arguments.device)
            remarks = [f"  {check}: {result}" for check, result in results.items() if result != "passed"]
            print("\n".join(remarks or ["  passed"]))
        except AssertionError as error:
            print("  FAILS " + str(error).replace("\n", "\n  FAILS "))


if __name__ == "__main__":
    main()
