"""The last layer of a language model with thousands of tokens: as any matrix, with bounded rows, or Adam's update?

A GPT of 2 layers of width 64 (1.15 million parameters, of which 1.05 million are the embedding and the last layer of
8,192 tokens), contexts of 64, 1,000 updates of 16 windows; one seed. Losses on held-out text, in nats a token.

    make tokens
    python -m benchmarks.vocabulary_head   # half an hour on two cores; finished runs stay in out/vocabulary-head.csv
"""

import csv
import itertools
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

import lategrad as lg
from lategrad.rules import AnyRule
from reproduction.deep.large import LargeGPT, train
from reproduction.text import VOCABULARY, load_tokens

UPDATES, BATCH, CONTEXT = 1_000, 16, 64
LRS = (0.0032, 0.01, 0.032)
KEPT = Path("out/vocabulary-head.csv")


class Setting(NamedTuple):
    """A run."""

    rule: str
    head: str  # what the last layer is taken as
    delay: int
    lr: float


SETTINGS = [
    *itertools.starmap(Setting, itertools.product(["steady-muon"], ["matrix", "tokens", "other"], [0, 64], LRS)),
    *itertools.starmap(Setting, itertools.product(["muon", "synchronous-muon"], ["other"], [0, 64], LRS)),
]
RUNS = [s for s in SETTINGS if s.rule == "steady-muon" or (s.rule == "muon") == (s.delay == 0)]


def loss_of(setting: Setting) -> tuple[float, float]:
    """On training and on held-out text, at the end."""
    torch.set_num_threads(1)
    ours, synchronous = setting.rule == "steady-muon", setting.rule == "synchronous-muon"
    rule: AnyRule = lg.SteadyMuon(setting.lr) if ours else lg.baselines.Muon(setting.lr)
    delay, batches = (0, 1 + setting.delay) if synchronous else (setting.delay, 1)
    (losses,) = train(
        LargeGPT(VOCABULARY, CONTEXT), load_tokens(), rule, delay, updates=UPDATES // batches, batch=BATCH,
        context=CONTEXT, evaluate=512, micro_batches=batches, scheduled=not ours,
        kinds={"scores.weight": setting.head},
    )  # fmt: skip
    return losses.train, losses.held_out


def finished() -> dict[Setting, tuple[float, float]]:
    if not KEPT.exists():
        return {}
    with KEPT.open() as lines:
        rows = list(csv.reader(lines))
    return {Setting(rule, head, int(delay), float(lr)): (float(a), float(b)) for rule, head, delay, lr, a, b in rows}


def main() -> None:
    """Run what is missing, and print the table."""
    load_tokens()
    missing = [setting for setting in RUNS if setting not in finished()]
    KEPT.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool, KEPT.open("a", newline="") as file:
        waiting = {pool.submit(loss_of, setting): setting for setting in missing}
        for number, done in enumerate(as_completed(waiting), start=1):
            csv.writer(file).writerow([*waiting[done], *done.result()])
            file.flush()
            print(f"{number} of {len(missing)} runs: {waiting[done]} {done.result()[1]:.3f}", flush=True)
    losses = finished()
    print(f"\n| rule, last layer as | delay | {' | '.join(map(str, LRS))} |\n|{'---|' * (2 + len(LRS))}")
    for rule, head, delay in dict.fromkeys(setting[:3] for setting in RUNS):
        cells = [f"{losses[Setting(rule, head, delay, lr)][1]:.3f}" for lr in LRS]
        print(f"| {rule}, {head} | {delay} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
