"""Actors behind the learner: a policy gradient from trajectories of an older policy.

A chain of eight states: at its right end, with a slip now and then, lies a reward of 1; going left pays .02 at once.
Actors play with the policy of ``delay`` updates ago; the learner takes its gradient at the present policy. A gradient
of old trajectories is biased. "plain" ignores that, "weighted" multiplies each action's gradient with the ratio of
its present and its old probability, cut at 2. Two optimizers: Adam and SteadyAdam.

    python examples/delayed_actors.py --quick
    python examples/delayed_actors.py --out actors   # writes a table and a picture
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
MAX_WEIGHT = 2.0

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.3),
    "SteadyAdam": lambda params: lg.optim.SteadyAdam(params, lr=1.0),
}


@dataclass(frozen=True)
class Config:
    """Size of the experiment."""

    delays: tuple[int, ...] = (0, 1, 4, 16)
    updates: int = 80
    seeds: int = 3


QUICK = Config(delays=(0, 4), updates=40, seeds=2)


class Episodes(NamedTuple):
    """Trajectories, ``(episodes, horizon)``."""

    states: Tensor
    actions: Tensor
    returns: Tensor
    """The reward from each step on."""
    log_probabilities: Tensor
    version: int


def play(logits: Tensor, version: int, generator: torch.Generator) -> Episodes:
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
    return Episodes(seen, chosen, returns, old, version)


def run(build: Callable[..., torch.optim.Optimizer], delay: int, weighted: bool, seed: int, updates: int) -> tuple:
    """One learner: its mean return over the whole run, which slow learning lowers, and the record of its delays."""
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Parameter(torch.zeros(STATES, 2))
    optimizer, recorder = build([policy]), lg.DelayRecorder()
    baseline = torch.zeros(HORIZON)
    in_flight: deque[Episodes] = deque()
    scores = []
    for update in range(updates):
        while len(in_flight) <= delay:
            in_flight.append(play(policy.detach(), update, generator))
        played = in_flight.popleft()
        if update % 4 == 0:
            scores.append(play(policy.detach(), update, generator).returns[:, 0].mean())
        now = policy.log_softmax(-1)[played.states].gather(-1, played.actions[..., None])[..., 0]
        ratio = (now - played.log_probabilities).exp().detach().clamp(max=MAX_WEIGHT)
        advantage = played.returns - baseline
        baseline = 0.9 * baseline + 0.1 * played.returns.mean(0)
        optimizer.zero_grad()
        (-(ratio if weighted else 1.0) * advantage * now).sum(1).mean().backward()
        recorder.observe(played.version, update, policy.grad, weight=float(ratio.mean()) if weighted else 1.0)
        optimizer.step()
    return torch.stack(scores).mean().item(), recorder


Results = dict[tuple[str, str], dict[int, Tensor]]
"""For each optimizer and kind of gradient, and each delay, the returns of the seeds."""


def run_all(config: Config) -> Results:
    results: Results = {}
    for name, build in OPTIMIZERS.items():
        for kind in ("plain", "weighted"):
            by_delay = {}
            for delay in config.delays:
                ends = [run(build, delay, kind == "weighted", seed, config.updates) for seed in range(config.seeds)]
                by_delay[delay] = torch.tensor([score for score, _ in ends])
                assert ends[0][1].summary().max == min(delay, config.updates - 1)
                print(f"{name}, {kind}, delay {delay}: {by_delay[delay].tolist()}", flush=True)
            results[name, kind] = by_delay
    print(ends[0][1].histogram())
    return results


def table(results: Results, config: Config) -> str:
    lines = [
        "| | " + " | ".join(f"delay {delay}" for delay in config.delays) + " |",
        "|---|" + "---|" * len(config.delays),
    ]
    for (name, kind), by_delay in results.items():
        cells = [f"{returns.mean():.2f} ± {returns.std():.2f}" for returns in by_delay.values()]
        lines.append(f"| {name}, {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(results: Results, config: Config, path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = drawing.add_subplot()
    for (name, kind), by_delay in results.items():
        means = [returns.mean() for returns in by_delay.values()]
        axis.plot(
            config.delays, means, marker="o", linestyle="-" if kind == "weighted" else "--", label=f"{name}, {kind}"
        )
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks(config.delays, [str(delay) for delay in config.delays])
    axis.minorticks_off()
    axis.set(xlabel="delay of the actors' policy (updates)", ylabel="mean return")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    drawing.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two delays, two seeds, 40 updates")
    parser.add_argument("--out", type=Path, default=Path("delayed_actors"), help="folder for table and picture")
    options = parser.parse_args(arguments)
    config = QUICK if options.quick else Config()
    results = run_all(config)
    print(table(results, config))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "delayed_actors.md").write_text(table(results, config) + "\n")
    figure(results, config, options.out / "delayed_actors.png")
    return results


if __name__ == "__main__":
    main()
