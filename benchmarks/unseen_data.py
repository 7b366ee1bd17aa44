"""The rules and their baselines, learning rates frozen, on data that nothing was tuned on: tables in minutes on a CPU.

The same runs as `python -m reproduction baselines --scale paper` makes, but only those that the frozen protocol needs:
all learning rates at delay 0, and at the other delays the one of the smallest training loss there. Every rule is
kept in the folder `--out`, so that a second call continues where the first ended.

    python -m benchmarks.unseen_data letters satellite
    python -m benchmarks.unseen_data letters --updates 1500 --sets whole
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.mlbench import UNSEEN
from lategrad.problems import SoftmaxRegression
from lategrad.simulator import simulate
from reproduction.baselines.plan import CANDIDATES, SoftmaxSetting, scenarios_for
from reproduction.baselines.scores import SoftmaxScores, split_points
from reproduction.baselines.study import table
from reproduction.study import Candidate, column

SETTINGS = {setting.data: setting for setting in (*UNSEEN, SoftmaxSetting("digits", 20_000, 16))}
FIRST_SEED = 100  # nothing was chosen with these seeds


def finals(problem: SoftmaxRegression, rule: object, delays: list, updates: int, seeds: list[int]) -> Tensor:
    """Loss and accuracy, (2, seeds, delays, knobs, lrs, points)."""
    trace = simulate(problem, rule, delays, updates, seed=seeds, record_every=updates, compile=True)
    at_query = torch.stack([problem.loss(trace.query).squeeze(-1), problem.accuracy(trace.query).squeeze(-1)])
    return torch.stack([torch.stack([trace.loss[-1], trace.accuracy[-1]]), at_query], dim=-1)


def frozen_scores(
    problem: SoftmaxRegression, candidate: Candidate, domain: str, updates: int, seeds: list[int]
) -> tuple[Tensor, Tensor]:
    """Losses and accuracies, (seeds, delays, knobs, lrs, points); zero where nothing was run."""
    scenarios = list(scenarios_for(problem.outputs).values())
    rule = candidate.build(column(candidate.lrs).unsqueeze(0), domain)
    undelayed = finals(problem, rule, scenarios[:1], updates, seeds)
    every = torch.zeros(2, len(seeds), len(scenarios), *undelayed.shape[3:], dtype=undelayed.dtype)
    every[:, :, :1] = undelayed
    for point in (0, 1) if candidate.rule == "sgd-linear" else (0,):  # its last iterate has a rate of its own
        loss = torch.nan_to_num(undelayed[0, ..., point], nan=torch.inf).mean(0)[0]
        chosen = loss.argmin(-1)  # for each value of the knob
        rule = candidate.build(torch.tensor(candidate.lrs, dtype=torch.float64)[chosen].view(-1, 1, 1), domain)
        late = finals(problem, rule, scenarios[1:], updates, seeds)
        for knob, lr in enumerate(chosen.tolist()):
            every[:, :, 1:, knob, lr] = late[:, :, :, knob, 0]
    return every[0], every[1]


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
        problem, seeds = setting.problem(), list(range(FIRST_SEED, FIRST_SEED + args.seeds))
        for domain in args.sets:
            panel: list[SoftmaxScores] = []
            for candidate in CANDIDATES:
                words = (name, domain.replace(":", ""), candidate.rule, args.updates, args.seeds)
                path = args.out / ("-".join(map(str, words)) + ".pt")
                if not path.exists():
                    torch.save(frozen_scores(problem, candidate, domain, args.updates, seeds), path)
                panel += split_points(candidate, *torch.load(path), len(problem.test))
            print(f"\n**{name}, {domain}, {args.updates:,} updates**\n")
            rows = table(panel, domain != "whole", "frozen")
            print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
            for row in rows:
                print("| " + " | ".join(row.values()) + " |")


if __name__ == "__main__":
    main()
