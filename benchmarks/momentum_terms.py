"""What Theorems B and C of docs/theory-deep.md say about runs of the library's own rules, beside the truth.

A tanh network without biases on the digits: all its parameters are matrices, and it is smooth on every ball, with an L
that grows with the ball and is not known. The one used is the largest ratio of a difference of true gradients to the
distance of their points that the run meets, which is below L, so that the sums are smaller than what is proved. The
parts mlp and cnn ask whether SteadyMuon in a form whose steps fit the theorems is as good as SteadyMuon, on networks
with biases and ReLU, which no theorem covers.

    python -m benchmarks.momentum_terms terms mlp    # about five minutes on one core
    python -m benchmarks.momentum_terms cnn --lrs 0.003 0.01 0.03 0.1 --seeds 0 1
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad import theory
from lategrad.rules.steady_muon import SteadyMuonState
from reproduction.deep.models import cnn
from reproduction.style import three_digits

BATCH, EVERY, B = 16, 20, 1.16
LENGTH = 6  # memories after which a gradient is forgotten to a quarter of a percent


def network(kind: str) -> lg.problems.ModuleProblem:
    """ "smooth": tanh, no biases; "mlp": ReLU and biases; "cnn": the study's, for images of 8 x 8."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bias, activation = kind == "mlp", nn.ReLU() if kind == "mlp" else nn.Tanh()
        layers = [nn.Linear(64, 32, bias=bias), activation, nn.Linear(32, 10, bias=bias)]
        module = cnn(side=8) if kind == "cnn" else nn.Sequential(*layers)
    return lg.problems.ModuleProblem(module, lg.problems.load("digits"), batch=BATCH)


class Geometry:
    """The norm of a step of length lr: the largest singular value over 0.2 sqrt(max(r, c)), of the largest matrix."""

    def __init__(self, blocks: lg.Blocks) -> None:
        self.shapes = [block.matrix_shape for block in blocks.parts]
        self.scales = [0.2 * math.sqrt(max(shape)) for shape in self.shapes]
        self.A = theory.orthogonal_alignment(max(min(shape) for shape in self.shapes))
        ratios = [s * theory.dual_ratio("spectral", shape) for s, shape in zip(self.scales, self.shapes, strict=True)]
        self.rho = math.hypot(*ratios)

    def _singular(self, x: Tensor) -> list[Tensor]:
        parts = x.split([math.prod(shape) for shape in self.shapes], dim=-1)
        return [torch.linalg.svdvals(p.unflatten(-1, shape)) for p, shape in zip(parts, self.shapes, strict=True)]

    def primal(self, x: Tensor) -> Tensor:
        return torch.stack([v.amax(-1) / s for v, s in zip(self._singular(x), self.scales, strict=True)]).amax(0)

    def dual(self, x: Tensor) -> Tensor:
        return torch.stack([s * v.sum(-1) for v, s in zip(self._singular(x), self.scales, strict=True)]).sum(0)


@dataclass
class Run:
    """What a run shows; arrays have an entry for every EVERY-th update, lrs one for every update."""

    lrs: Tensor  # D_t
    s: Tensor  # root of the sum of squared weights of the momentum
    V: Tensor  # mean distance between its queries and the iterate
    error: Tensor  # dual norm of the true gradient less the momentum
    norm: Tensor  # dual norm of the true gradient at the iterate
    L: float
    sigma: float
    start: float  # loss
    end: float
    accuracy: float  # of the output


def observe(problem: lg.problems.ModuleProblem, rule: object, tau: int, N: int, seed: int) -> Run:
    """A run at a constant delay, with the true gradients along it."""
    shape, rows = Geometry(problem.blocks), torch.arange(problem.minibatches.rows)
    steady = isinstance(rule, lg.SteadyMuon)
    samples, state = problem.samples(seed, 0, N), rule.init(problem.start())
    points, used, grads, weights, mean = [rule.query(state)], [], [], torch.zeros(N), 0.0
    found: dict[str, list[Tensor]] = {"s": [], "V": [], "error": [], "norm": []}
    lrs, squares, L = torch.full((N,), float(rule.lr), dtype=torch.float64), [], 0.0
    for t in range(N):
        delay = min(t, tau)
        mean += (delay - mean) / min(t + 1, 32)
        beta = 1 - 1 / (10 + mean) if steady else rule.momentum
        if steady:
            lrs[t] *= (t + 1 - delay) / (t + 1) / math.sqrt(1 + max(mean, delay))
        used.append(points[t - delay])
        grads.append(problem.gradient(used[-1], samples[t]))
        weights *= beta
        weights[t] += 1 - beta
        if t % EVERY == 0:
            z = state.z if steady else state.x
            first = max(0, t - int(LENGTH / (1 - beta)))
            w = beta * weights[first : t + 1]
            w[-1] += 1 - beta
            w = w / w.sum()
            true = problem.gradient(z, rows)
            away = shape.primal(z - torch.stack(used[first:]))
            found["s"].append(w.norm())
            found["V"].append((w * away).sum())
            found["error"].append(shape.dual(true - w @ torch.stack(grads[first:])))
            found["norm"].append(shape.dual(true))
            at_query = problem.gradient(used[-1], rows)
            squares.append((grads[-1] - at_query).square().sum())
            far = [i for i in (len(away) - 1, 0) if away[i] > 1e-6]
            for i in far:
                ratio = shape.dual(true - problem.gradient(used[first + i], rows)) / away[i]
                L = max(L, ratio.item())
        state = rule.update(state, grads[-1], torch.tensor(delay))
        points.append(rule.query(state))
    z = state.z if steady else state.x
    start, end = (problem.loss(x).item() for x in (problem.start(), z))
    arrays = {name: torch.stack(values).double() for name, values in found.items()}
    sigma = torch.stack(squares).mean().sqrt().item()
    return Run(lrs, **arrays, L=L, sigma=sigma, start=start, end=end,
               accuracy=problem.accuracy(rule.output(state)).item())  # fmt: skip


def terms(problem: lg.problems.ModuleProblem, name: str, tau: int, run: Run) -> list[str]:
    """A row: the terms of Theorem C, their sum, the sum with the error measured, and the truth."""
    shape, sampled = Geometry(problem.blocks), run.lrs[::EVERY]
    A, D = shape.A, run.lrs.mean().item()
    ratio = (1 + B / A) / sampled.sum()
    first = (run.start - run.end) / (A * run.lrs.sum().item())
    noise = (ratio * (sampled * shape.rho * run.sigma * run.s).sum()).item()
    drift = (ratio * (sampled * run.L * run.V).sum()).item()
    curve = run.L * B**2 * (run.lrs**2).sum().item() / (2 * A * run.lrs.sum().item())
    known = {"L": run.L, "A": A, "B": B}
    part = (run.start - run.end) * (sampled.sum() / run.lrs.sum()).item()  # the sampled updates' share of the decrease
    measured = theory.normalized_descent(sampled, run.error, decrease=part, **known)
    truth = ((sampled * run.norm).sum() / sampled.sum()).item()
    V = ((sampled * run.V).sum() / sampled.sum()).item()
    numbers = [D, run.L, run.sigma, V / D, first, noise, drift, curve, first + noise + drift + curve, measured, truth]
    return [name, str(tau), *(f"{value:.3g}" for value in numbers), three_digits(run.accuracy)]


@dataclass(frozen=True, eq=False)
class Form(lg.SteadyMuon):
    """SteadyMuon with one or more of its parts in a form that the theorems need, or that bounds V in advance."""

    sign: bool = True
    """Outside matrices the sign of n instead of Adam's direction: this alone is what Theorem C needs."""
    at_iterate: bool = False
    """The query is the iterate, so that V is bounded in advance, and there is no factor s/t."""
    averaged: bool = True
    """The output is the average; else the iterate, which is what the theorems bound."""

    def update(self, state: SteadyMuonState, grad: Tensor, delay: Tensor) -> SteadyMuonState:
        """SteadyMuon's, but for what was changed."""
        n, now = self.momentum(state, grad, delay), super().update(state, grad, delay)
        t, mean, s = now.t, now.mean_delay, (now.t - delay).clamp_min(1)
        others = 0.3 * self._others(n).sign() if self.sign else self._others(n)
        brake = (1 + torch.maximum(mean, delay + 0 * t)).sqrt()
        lr = (self.lr / brake if self.at_iterate else self.lr * s / t / brake).to(n.dtype)
        z = state.z - lr * self._join(self._matrix_direction(n), others)
        x, q = self._average_and_query(state, z, mean, t)
        return now._replace(z=z, x=x, q=z if self.at_iterate else q)

    def output(self, state: SteadyMuonState) -> Tensor:
        return state.x if self.averaged else state.z


FORMS = {
    "SteadyMuon": {},
    "sign outside matrices (Theorem C)": {"sign": True},
    "and gradients of the iterate, one lr; average": {"sign": True, "at_iterate": True},
    "the same; iterate (Theorem C, V bounded in advance)": {"sign": True, "at_iterate": True, "averaged": False},
}


def forms(kind: str, delays: list[int], N: int, seeds: list[int], lrs: list[float]) -> list[list[str]]:
    """Accuracy at each delay with the learning rate of the smallest loss at delay 0, and with the best one there."""
    problem, rates = network(kind), torch.tensor(lrs).unsqueeze(-1)
    rows = []
    for name, parts in FORMS.items():
        rule = Form(rates, **parts) if parts else lg.SteadyMuon(rates)
        trace = lg.simulate(problem, rule, delays, N, seed=seeds, record_every=N)
        loss = torch.nan_to_num(trace.loss[-1], nan=torch.inf).mean(0)  # (delays, rates)
        accuracy, frozen = trace.accuracy[-1].mean(0), int(loss[0].argmin())
        best = [accuracy[i, int(loss[i].argmin())].item() for i in range(len(delays))]
        cells = [f"{three_digits(accuracy[i, frozen].item())} / {three_digits(best[i])}" for i in range(len(delays))]
        rows.append([name, f"{lrs[frozen]:g}", *cells])
    return rows


def table(heads: list[str], rows: list[list[str]]) -> None:
    for row in (heads, ["---"] * len(heads), *rows):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def theorems(delays: list[int], N: int) -> None:
    """Print the terms of Theorem C, and Theorem B's best learning rate."""
    problem, rows, best, memory = network("smooth"), [], [], 20
    shape = Geometry(problem.blocks)
    for tau in delays:
        muon = lg.baselines.Muon(0.003, momentum=1 - 1 / memory, weight_decay=0.0, blocks=problem.blocks)
        steady = lg.SteadyMuon(0.01, blocks=problem.blocks)
        runs = {"Muon": observe(problem, muon, tau, N, 0), "SteadyMuon": observe(problem, steady, tau, N, 0)}
        rows += [terms(problem, name, tau, run) for name, run in runs.items()]
        run = runs["Muon"]
        known = {"L": run.L, "Delta": run.start, "memory": memory, "outstanding": tau + 1, "nesterov": True}
        known |= {"A": shape.A, "B": B}
        lr = theory.normalized_lr(N, **known)
        bounds = [theory.normalized_momentum(N, **known, sigma=run.sigma, rho=shape.rho, lr=D) for D in (lr, 0.003)]
        there = observe(problem, dataclasses.replace(muon, lr=lr), tau, N, 0)
        numbers = [lr, bounds[0], there.norm.mean().item(), 0.003, bounds[1], run.norm.mean().item()]
        accuracies = [three_digits(one.accuracy) for one in (there, run)]
        best.append([str(tau), *(f"{value:.3g}" for value in numbers), *accuracies])
    first = shape.dual(problem.gradient(problem.start(), torch.arange(problem.minibatches.rows)))
    print(f"**The terms of Theorem C**, {N:,} updates, one seed; the norm at the start is {first.item():.3g}\n")
    table(["rule", "delay", "mean D", "L seen", "sigma", "V/D", "decrease", "noise", "drift", "curvature", "sum",
           "sum with the error measured", "true mean", "accuracy"], rows)  # fmt: skip
    print(f"**Theorem B's best learning rate** for Muon with Nesterov's form and memory {memory}, and the one used\n")
    table(["delay", "best lr", "bound", "true mean", "lr used", "bound", "true mean", "accuracy, best lr",
           "accuracy, lr used"], best)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["terms", "mlp", "cnn"], default="terms", help="what to print")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 16, 64])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in [args.parts] if isinstance(args.parts, str) else args.parts:
        if part == "terms":
            theorems(args.delays, args.updates)
            continue
        print(f"**SteadyMuon in forms whose steps fit**, {part}, {args.updates:,} updates, seeds {args.seeds}: "
              "accuracy at the learning rate of delay 0 / at the best one\n")  # fmt: skip
        rows = forms(part, args.delays, args.updates, args.seeds, args.lrs)
        table(["form", "lr", *(f"delay {tau}" for tau in args.delays)], rows)


if __name__ == "__main__":
    main()
