"""Train on a Ray cluster: softmax regression, or a small network, with workers that join and leave with the machines.

    python examples/ray_training.py                                   # a Ray on this machine, digits, seconds
    python examples/ray_training.py --address auto --workers 2:8      # on a machine of a running cluster

On spot machines of a cloud, with the cluster of examples/spot_cluster.yaml (docs/ray.md):

    ray up examples/spot_cluster.yaml
    ray submit examples/spot_cluster.yaml examples/ray_training.py --address auto --workers 2:32 --out runs/spot

Run it again with the same --out after an interruption: it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import lategrad as lg
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths


def problem_of(data: str, network: bool) -> lg.problems.Problem:
    dataset = lg.problems.load(data)
    if not network:
        return lg.problems.SoftmaxRegression(dataset)
    torch.manual_seed(0)
    features, classes = dataset.x_train.shape[1], dataset.classes
    module = torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    return lg.problems.ModuleProblem(module, dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of a running cluster; by default a Ray is started on this machine")
    parser.add_argument("--workers", default="2", help="a number, or a range such as 2:8")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--network", action="store_true", help="a network with one hidden layer")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and the trace")
    options = parser.parse_args()

    problem, rule = problem_of(options.data, options.network), lg.Steady(lr=1.0)
    where = {"engine": "ray", "address": options.address, "workers": options.workers}
    if options.out is not None and checkpoint_paths(options.out):
        trace = lg.resume(options.out, problem, rule, steps=options.steps, **where)
    else:
        trace = lg.train(problem, rule, steps=options.steps, out=options.out, **where)

    delays = trace.delay_summary()
    print(f"{len(trace.delays):,} updates of {len(trace.worker.unique())} workers in {trace.config['seconds']:.1f} s")
    print(f"delays: mean {delays.mean:.1f}, 95% at most {delays.p95:.0f}, max {delays.max}")
    print(f"test accuracy {trace.accuracy[-1].item():.4f}")


if __name__ == "__main__":
    main()
