"""Actors behind the learner: a policy gradient from trajectories that an older policy has played.

A chain of eight states: at its right end, with a slip now and then, lies a reward of 1; going left pays .02 at once.
Actors play with the policy of ``age`` updates ago; the learner takes its gradient at the present policy. A gradient
of old trajectories is biased. "plain" ignores that, "weighted" multiplies each action's gradient with the ratio of
its present and its old probability, cut at 2. Two optimizers: Adam, and one of our rules.

    python examples/stale_actors.py --quick
    python examples/stale_actors.py --out actors   # writes a table and a picture
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import lategrad as lg

STATES, HORIZON, EPISODES, SLIP = 8, 24, 64, 0.1
MOST_WEIGHT = 2.0

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.3),
    "SteadyAdam": lambda params: lg.optim.SteadyAdam(params, lr=1.0),
}


@dataclass(frozen=True)
class Config:
    """What is run."""

    ages: tuple[int, ...] = (0, 1, 4, 16)
    updates: int = 80
    seeds: int = 3


QUICK = Config(ages=(0, 4), updates=40, seeds=2)


class Played(NamedTuple):
    """What actors have seen, ``(episodes, horizon)``."""

    states: Tensor
    actions: Tensor
    returns: Tensor
    """The reward from each step on."""
    log_probabilities: Tensor
    version: int


def play(logits: Tensor, version: int, generator: torch.Generator) -> Played:
    """All episodes at once; action 1 goes right, 0 goes left."""
    state = torch.zeros(EPISODES, dtype=torch.int64)
    states, actions, rewards = [], [], []
    for _ in range(HORIZON):
        action = torch.multinomial(logits[state].softmax(-1), 1, generator=generator)[:, 0]
        slipped = torch.rand(EPISODES, generator=generator) < SLIP
        states.append(state)
        actions.append(action)
        rewards.append(torch.where(action == 0, 0.02, torch.where(state == STATES - 1, 1.0, 0.0)))
        state = (state + torch.where((action == 1) & ~slipped, 1, -1)).clamp(0, STATES - 1)
    seen, chosen = torch.stack(states, 1), torch.stack(actions, 1)
    returns = torch.stack(rewards, 1).flip(1).cumsum(1).flip(1)
    old = logits.log_softmax(-1)[seen].gather(-1, chosen[..., None])[..., 0]
    return Played(seen, chosen, returns, old, version)


def run(build: Callable[..., torch.optim.Optimizer], age: int, weighted: bool, seed: int, updates: int) -> tuple:
    """One learner; the mean return over its whole life, which slow learning lowers, and how stale it was."""
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Parameter(torch.zeros(STATES, 2))
    optimizer, staleness = build([policy]), lg.Staleness()
    baseline = torch.zeros(HORIZON)
    on_their_way: deque[Played] = deque()
    scores = []
    for update in range(updates):
        while len(on_their_way) <= age:
            on_their_way.append(play(policy.detach(), update, generator))
        played = on_their_way.popleft()
        if update % 4 == 0:
            scores.append(play(policy.detach(), update, generator).returns[:, 0].mean())
        now = policy.log_softmax(-1)[played.states].gather(-1, played.actions[..., None])[..., 0]
        ratio = (now - played.log_probabilities).exp().detach().clamp(max=MOST_WEIGHT)
        advantage = played.returns - baseline
        baseline = 0.9 * baseline + 0.1 * played.returns.mean(0)
        optimizer.zero_grad()
        (-(ratio if weighted else 1.0) * advantage * now).sum(1).mean().backward()
        staleness.observe(played.version, update, policy.grad, weight=float(ratio.mean()) if weighted else 1.0)
        optimizer.step()
    return torch.stack(scores).mean().item(), staleness


Results = dict[tuple[str, str], dict[int, Tensor]]
"""For each optimizer and kind of gradient, and each age, the returns of the seeds."""


def run_all(config: Config) -> Results:
    results: Results = {}
    for name, build in OPTIMIZERS.items():
        for kind in ("plain", "weighted"):
            by_age = {}
            for age in config.ages:
                ends = [run(build, age, kind == "weighted", seed, config.updates) for seed in range(config.seeds)]
                by_age[age] = torch.tensor([score for score, _ in ends])
                assert ends[0][1].summary().max == min(age, config.updates - 1)
                print(f"{name}, {kind}, age {age}: {by_age[age].tolist()}", flush=True)
            results[name, kind] = by_age
    print(ends[0][1].histogram())
    return results


def table(results: Results, config: Config) -> str:
    lines = ["| | " + " | ".join(f"age {age}" for age in config.ages) + " |", "|---|" + "---|" * len(config.ages)]
    for (name, kind), by_age in results.items():
        cells = [f"{returns.mean():.2f} ± {returns.std():.2f}" for returns in by_age.values()]
        lines.append(f"| {name}, {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(results: Results, config: Config, path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = drawing.add_subplot()
    for (name, kind), by_age in results.items():
        means = [returns.mean() for returns in by_age.values()]
        axis.plot(
            config.ages, means, marker="o", linestyle="-" if kind == "weighted" else "--", label=f"{name}, {kind}"
        )
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks(config.ages, [str(age) for age in config.ages])
    axis.minorticks_off()
    axis.set(xlabel="age of the actors' policy (updates)", ylabel="mean return")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    drawing.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ages, two seeds, 40 updates")
    parser.add_argument("--out", type=Path, default=Path("stale_actors"), help="folder for table and picture")
    options = parser.parse_args(arguments)
    config = QUICK if options.quick else Config()
    results = run_all(config)
    print(table(results, config))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stale_actors.md").write_text(table(results, config) + "\n")
    figure(results, config, options.out / "stale_actors.png")
    return results


if __name__ == "__main__":
    main()
