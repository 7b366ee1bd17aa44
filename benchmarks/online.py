"""OnlineToNonconvex beside other rules: a small MLP on digits at delays 0, 16 and 64.

The learning rate, and for OnlineToNonconvex also the radius and the period, are those of the smallest training loss at
delay 0 with seed 0, or at each delay; the table has training loss and test accuracy, means of seeds 1 to 3. A second
table holds Theorem A against runs of OnlineToNonconvex that were tuned at their delay, with the largest gradient and
the largest noise that were met as G and sigma. That is no certificate: gradients may be larger where the run was not,
and one draw of the places on the steps stands for an expectation.

    python -m benchmarks.online
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad import theory
from lategrad.problems import ModuleProblem, load
from lategrad.rules import AnyRule
from reproduction.style import three_digits

DELAYS, UPDATES, BATCH, HIDDEN, SEEDS = [0, 16, 64], 3072, 16, 16, [1, 2, 3]
RATES = {
    "sgd": (-2.5, 0.5), "sgd-momentum": (-3.5, -0.5), "adamw": (-3.5, -0.5), "steady-adam": (-3.5, -0.5),
    "steady-muon": (-3.0, 0.0), "online-to-nonconvex": (-4.0, -1.0),
}  # fmt: skip
"""Powers of ten between which learning rates are tried, a factor of sqrt(10) apart."""
PERIODS, RADII = (16, 64, 256), (0.03, 0.1, 0.3)


def make_problem() -> ModuleProblem:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    return ModuleProblem(module, load("digits"), batch=BATCH)


def texts(name: str, rates: list[float]) -> list[str]:
    """Rules with several learning rates each; of OnlineToNonconvex one for each period and radius."""
    lrs = "|".join(f"{lr:.3g}" for lr in rates)
    if name != "online-to-nonconvex":
        return [f"{name}:lr={lrs}"]
    return [f"{name}:period={period},radius={radius},lr={lrs}" for period in PERIODS for radius in RADII]


def choose(problem: ModuleProblem, name: str) -> list[str]:
    """For each delay, the rule with the options of the smallest training loss there."""
    low, high = RATES[name]
    rates = [10 ** (low + k / 2) for k in range(round(2 * (high - low)) + 1)]
    best = [(math.inf, "")] * len(DELAYS)
    for text in texts(name, rates):
        trace = lg.simulate(problem, text, DELAYS, UPDATES, seed=0, record_every=UPDATES, progress=False)
        losses, which = torch.nan_to_num(trace.loss[-1].view(len(DELAYS), -1), nan=math.inf).min(-1)
        found = zip(losses.tolist(), which.tolist(), strict=True)
        options = text.partition("lr=")[0]
        best = [min(old, (loss, f"{options}lr={rates[k]:.3g}")) for old, (loss, k) in zip(best, found, strict=True)]
    return [text for _, text in best]


def at_the_end(problem: ModuleProblem, text: str, tau: int) -> str:
    """Training loss and test accuracy, means over the seeds."""
    trace = lg.simulate(problem, text, tau, UPDATES, seed=SEEDS, record_every=UPDATES, progress=False)
    assert trace.accuracy is not None
    return f"{trace.loss[-1].mean().item():.2g}, {three_digits(trace.accuracy[-1].mean().item())}"


def certificate(problem: ModuleProblem, rule: AnyRule[Any], tau: int) -> str:
    """Theorem A on one run: what it bounds, and the bound with constants that are measured on that run."""
    assert isinstance(rule, lg.OnlineToNonconvex)
    K, samples, everything = rule.period, problem.samples(1, 0, UPDATES), torch.arange(len(problem.splits.loss_rows))
    state = rule.init(problem.start())
    gap = problem.loss(problem.start()).item()  # the loss is not negative
    queries: list[Tensor] = []
    exact: list[Tensor] = []
    noise = 0.0
    for t in range(UPDATES):
        queries.append(rule.query(state))
        exact.append(problem.gradient(queries[-1], everything))
        asked = max(0, t - tau)
        grad = problem.gradient(queries[asked], samples[t])
        noise = max(noise, (grad - exact[asked]).norm().item())
        state = rule.update(state, grad, torch.tensor(t - asked))
    gradients, points = (torch.stack(each).view(-1, K, problem.dim) for each in (exact, queries))
    G = gradients.norm(dim=-1).max().item()
    bound = theory.theorem_a(
        UPDATES, K=K, D=float(rule.radius), lr=float(rule.lr), gap=gap, G=G, sigma=noise, W=tau
    )  # fmt: skip
    spread = (points - points.mean(1, keepdim=True)).norm(dim=-1).max().item()
    cells = (
        gradients.norm(dim=-1).mean().item(),
        gradients.mean(1).norm(dim=-1).mean().item(),
        bound,
        G,
        noise,
        spread,
    )
    return f"| {tau} | " + " | ".join(f"{cell:.3g}" for cell in cells) + f" | {(K + 1) * float(rule.radius) / 2:.3g} |"


def main() -> None:
    torch.set_num_threads(1)
    problem = make_problem()
    print("| rule | " + " | ".join(f"delay {tau}" for tau in DELAYS) + " |\n|" + "---|" * (1 + len(DELAYS)))
    for name in RATES:
        tuned = choose(problem, name)
        cells = [at_the_end(problem, tuned[0], tau) for tau in DELAYS]
        print(f"| `{tuned[0]}` | " + " | ".join(cells) + " |", flush=True)
        again = [f"{at_the_end(problem, text, tau)} (`{text.partition(':')[2]}`)"
                 for text, tau in zip(tuned[1:], DELAYS[1:], strict=True)]  # fmt: skip
        print(f"| {name}, tuned at each delay | | " + " | ".join(again) + " |", flush=True)
    print("\n| delay | mean gradient norm | mean over periods of the norm of the mean gradient | Theorem A | G | sigma "
          "| largest distance of a query from its period's mean | its bound |\n|" + "---|" * 8)  # fmt: skip
    for tau in DELAYS:
        print(certificate(problem, lg.parse_rule(tuned[DELAYS.index(tau)]), tau), flush=True)


if __name__ == "__main__":
    main()
