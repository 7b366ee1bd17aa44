"""The rules and their baselines, steps frozen, on data that nobody tuned on: tables in minutes on a CPU.

The same runs as `python -m reproduction baselines --scale paper` makes, but only those that the frozen protocol needs:
all learning rates at delay 0, and at the other delays the one of the smallest training loss there. Every contender is
kept in the folder `--out`, so that a second call continues where the first ended.

    python benchmarks/unseen_data.py letters satellite
    python benchmarks/unseen_data.py letters --updates 1500 --sets whole
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from lategrad.problems import SoftmaxRegression
from lategrad.registry import build_rule, parse_set
from lategrad.simulator import simulate
from reproduction import baselines

SETTINGS = {
    setting.data: setting for setting in (*baselines.UNSEEN, baselines.Setting("digits", 20_000, 16, first_seed=100))
}


def finals(problem: SoftmaxRegression, rule: object, delays: list, updates: int, seeds: list[int]) -> Tensor:
    """Loss and accuracy, (2, seeds, delays, knobs, steps, points)."""
    trace = simulate(problem, rule, delays, updates, seed=seeds, record_every=updates, compile=True)
    at_query = torch.stack([problem.loss(trace.query).squeeze(-1), problem.accuracy(trace.query).squeeze(-1)])
    return torch.stack([torch.stack([trace.loss[-1], trace.accuracy[-1]]), at_query], dim=-1)


def measure(problem, contender, domain, updates, seeds) -> list[baselines.Result]:
    scenarios = list(baselines.scenarios_for(problem.outputs).values())
    undelayed = finals(problem, contender.build(domain, 1), scenarios[:1], updates, seeds)
    every = torch.zeros(2, len(seeds), len(scenarios), *undelayed.shape[3:], dtype=undelayed.dtype)
    every[:, :, :1] = undelayed
    for point in (0, 1) if contender.rule == "sgd-linear" else (0,):  # its last iterate has a step of its own
        loss = torch.nan_to_num(undelayed[0, ..., point], nan=torch.inf).mean(0)[0]
        chosen = loss.argmin(-1)  # for each value of the knob
        steps = torch.tensor(contender.steps, dtype=torch.float64)[chosen].view(-1, 1, 1)
        rule = build_rule(contender.rule, steps, parse_set(domain))
        if contender.knob:
            values = torch.tensor(contender.values, dtype=torch.float64).view(-1, 1, 1)
            rule = dataclasses.replace(rule, **{contender.knob: values})
        late = finals(problem, rule, scenarios[1:], updates, seeds)
        for knob, step in enumerate(chosen.tolist()):
            every[:, :, 1:, knob, step] = late[:, :, :, knob, 0]
    finite = torch.isfinite(every[0])
    accuracy = torch.where(finite, every[1], 0.0).unbind(-1)
    loss = torch.where(finite, every[0], torch.inf).unbind(-1)
    rows = len(problem.test)
    own = baselines.Result(contender.rule, contender, contender.steps, accuracy[0], accuracy[1], loss[0], rows)
    last = baselines.Result("sgd", contender, contender.steps, accuracy[1], accuracy[1], loss[1], rows)
    return [last, own] if contender.rule == "sgd-linear" else [own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", choices=sorted(SETTINGS))
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", default=["whole", "ball:10"])
    parser.add_argument("--out", type=Path, default=Path("out/unseen"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.data:
        setting = SETTINGS[name]
        problem = baselines.Config((setting,), args.seeds).problem(setting)
        seeds = [setting.first_seed + k for k in range(args.seeds)]
        for domain in args.sets:
            panel: list[baselines.Result] = []
            for contender in baselines.CONTENDERS:
                words = (name, domain.replace(":", ""), contender.rule, args.updates, args.seeds)
                path = args.out / ("-".join(map(str, words)) + ".pt")
                if not path.exists():
                    found = measure(problem, contender, domain, args.updates, seeds)
                    torch.save([(r.rule, r.accuracy, r.at_query, r.loss) for r in found], path)
                panel += [
                    baselines.Result(rule, contender, contender.steps, *tensors, len(problem.test))
                    for rule, *tensors in torch.load(path)
                ]
            print(f"\n**{name}, {domain}, {args.updates:,} updates**\n")
            table = baselines.table(panel, domain != "whole", "frozen")
            print("| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
            for row in table:
                print("| " + " | ".join(row.values()) + " |")


if __name__ == "__main__":
    main()
