#!/usr/bin/env python3
"""Compute the paths that the interactive picture of docs/why.md shows, with the library itself.

    scripts/make_delay_picture.py            # rewrites docs/_static/delay_paths.js
    scripts/make_delay_picture.py --check    # says whether that file is what this script computes

A noisy quadratic of two variables on a ball. Each rule's learning rate is the best of a grid without delay, and is kept
at all delays. The file is JavaScript and not JSON, so that the page works when it is opened as a file.
"""

import json
import math
import sys
from pathlib import Path

import torch

import lategrad as lg
from lategrad.registry import parse_rule

FILE = Path(__file__).parents[1] / "docs" / "_static" / "delay_paths.js"
RULES = {"sgd": "SGD", "anytime-sgd": "anytime SGD", "steady": "Steady"}
DELAYS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
STEPS = 300
RADIUS = 2.0
GRID = [round(10 ** (k / 8), 4) for k in range(-16, 9)]
SEEDS = range(20)  # for the choice of the learning rate; the picture shows seed 0


def quadratic():
    """An ellipse three times as long as wide, its middle inside the ball, far from the start at 0."""
    return lg.problems.Quadratic(
        dim=2, smoothness=1.0, strong_convexity=0.1, noise=0.2, optimum=torch.tensor([1.2, 0.7])
    )


def path(name, lrs, delay, seed=0):
    """Queries and outputs before update 1, 2, ..., and after the last; for several learning rates, a row for each."""
    problem, rule = quadratic(), parse_rule(f"{name}:lr={'|'.join(map(str, lrs))}", lg.Ball(RADIUS))
    noise = problem.samples(seed, 0, STEPS)
    state = rule.init(problem.start())
    queries, outputs = [rule.query(state)], [rule.output(state)]
    for t in range(STEPS):
        late = min(delay, t)
        state = rule.update(state, problem.gradient(queries[t - late], noise[t]), late)
        queries.append(rule.query(state))
        outputs.append(rule.output(state))
    return torch.stack(queries), torch.stack(outputs)


def best_lr(name):
    """The learning rate of the grid with the least mean loss of the last output, without delay."""
    losses = sum(quadratic().loss(path(name, GRID, 0, seed)[1][-1])[:, 0] for seed in SEEDS)
    return GRID[int(losses.argmin())]


def rounded(points):
    """Coordinates for the page; a pixel is a hundredth."""
    return [[round(float(value), 3) for value in point] for point in points]


def picture():
    """All that the page needs."""
    problem = quadratic()
    rules = []
    for name, title in RULES.items():
        lr = best_lr(name)
        paths = [path(name, [lr], delay) for delay in DELAYS]
        rules.append({
            "name": name,
            "title": title,
            "lr": lr,
            "queries": [rounded(queries) for queries, _ in paths],
            "outputs": [rounded(outputs) for _, outputs in paths],
            "losses": [[float(f"{loss:.3g}") for loss in problem.loss(outputs)[:, 0].tolist()] for _, outputs in paths],
        })  # fmt: skip
    return {
        "delays": DELAYS,
        "steps": STEPS,
        "radius": RADIUS,
        "optimum": rounded([problem.optimum])[0],
        "curvatures": [float(f"{value:.3g}") for value in problem.curvatures.tolist()],
        "rules": rules,
    }


def as_script(content):
    """The file."""
    text = json.dumps(content, separators=(",", ":"))
    return f"// Written by scripts/make_delay_picture.py.\nwindow.delayPaths = {text};\n"


def from_script(text):
    """What a file written by :func:`as_script` holds."""
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def same(a, b):
    """Whether two pictures agree up to the last digit that is written: other machines round differently."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b if isinstance(a, str) else math.isclose(a, b, rel_tol=0.02, abs_tol=2e-3)


def main(arguments):
    """Write the file, or look whether it is right."""
    torch.set_num_threads(1)
    content = picture()
    if arguments == ["--check"]:
        if not same(from_script(FILE.read_text(encoding="utf-8")), content):
            sys.exit(f"{FILE} is not what {Path(__file__).name} computes: run it")
    elif arguments:
        sys.exit(__doc__)
    else:
        FILE.write_text(as_script(content), encoding="utf-8")
        for rule in content["rules"]:
            last = ", ".join(f"{losses[-1]:g}" for losses in rule["losses"])
            print(f"{rule['title']}, lr {rule['lr']:g}: loss after {STEPS} updates {last}")
        print(f"at delays {', '.join(map(str, DELAYS))}")


if __name__ == "__main__":
    main(sys.argv[1:])
