"""What late gradients do to the training of a network: any optimizer, wrapped in one line.

An MLP and a small CNN on Fashion-MNIST, with SGD, AdamW, SGDScheduleFree (if it is installed) and rules of lategrad.
Every learning rate is tuned without delay, on a grid, and then fixed. All runs make the same number of updates.
Writes a table (Markdown) and a figure (PNG) into a folder.

    python examples/delayed_training.py --quick            # digits, seconds
    python examples/delayed_training.py --out results      # Fashion-MNIST, minutes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad.optim import AnytimeSGD, Delayed, FromRule
from lategrad.problems.data import Dataset, load

try:
    from schedulefree import SGDScheduleFree
except ImportError:
    SGDScheduleFree = None

Build = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


def schedule_free(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    optimizer = SGDScheduleFree(params, lr=lr)
    optimizer.train()
    return optimizer


OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "SGDScheduleFree": schedule_free,
    "AnytimeSGD": lambda params, lr: AnytimeSGD(params, lr=lr),
    "AnytimeSGD, interpolation .9": lambda params, lr: AnytimeSGD(params, lr=lr, interpolation=0.9),
    "Steady": lambda params, lr: FromRule(params, lg.Steady(lr=lr)),
}
if SGDScheduleFree is None:
    del OPTIMIZERS["SGDScheduleFree"]


@dataclass(frozen=True)
class Config:
    """Size of the experiment."""

    data: str = "fashion-mnist"
    delays: tuple[int, ...] = (0, 8, 64, 256)
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    updates: int = 2000
    batch: int = 32
    seed: int = 0


QUICK = Config(data="digits", delays=(0, 8), rates=(0.01, 0.3), updates=100)


def mlp(side: int) -> nn.Module:
    return nn.Sequential(nn.Linear(side * side, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 8, 3, stride=3 if side > 8 else 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


MODELS = {"MLP": mlp, "CNN": cnn}


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def run(kind: str, name: str, rate: float, delay: int, data: Dataset, config: Config) -> tuple[float, float]:
    """Train once; the loss on the training data and the accuracy on the test data at the end."""
    torch.manual_seed(config.seed)
    model = MODELS[kind](round(data.x_train.shape[1] ** 0.5))
    model(data.x_train[:1])  # lazy layers get their sizes
    optimizer = Delayed(OPTIMIZERS[name](model.parameters(), rate), delay)
    batches = torch.Generator().manual_seed(config.seed)
    while optimizer.updates < config.updates:
        rows = torch.randint(len(data.x_train), (config.batch,), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        optimizer.step()
    with optimizer.output(), torch.no_grad():  # with the weights that would be shipped
        loss = nn.functional.cross_entropy(model(data.x_train[:10_000]), data.y_train[:10_000]).item()
        return loss, accuracy(model, data.x_test, data.y_test)


def tune_rate(kind: str, name: str, data: Dataset, config: Config) -> float:
    """The rate with the smallest training loss without delay."""

    def final_loss(rate: float) -> float:
        loss, _ = run(kind, name, rate, 0, data, config)
        return loss if loss == loss else float("inf")

    return min(config.rates, key=final_loss)


Results = dict[str, dict[str, tuple[float, list[float]]]]
"""For each model and optimizer, the tuned rate and the accuracies at the delays."""


def run_all(config: Config) -> Results:
    data = load(config.data, preprocessing="standardise-globally")
    results: Results = {kind: {} for kind in MODELS}
    for kind in MODELS:
        for name in OPTIMIZERS:
            begin = time.perf_counter()
            rate = tune_rate(kind, name, data, config)
            accuracies = [run(kind, name, rate, delay, data, config)[1] for delay in config.delays]
            results[kind][name] = rate, accuracies
            cells = "  ".join(f"{delay}: {value:.3f}" for delay, value in zip(config.delays, accuracies, strict=True))
            print(f"{kind:<4} {name:<29} lr {rate:<6g} {cells}   ({time.perf_counter() - begin:.0f} s)", flush=True)
    return results


def table(results: Results, config: Config) -> str:
    head = "| | lr | " + " | ".join(f"delay {delay}" for delay in config.delays) + " |"
    lines = []
    for kind, rows in results.items():
        lines += [f"**{kind}**", "", head, "|---|---|" + "---|" * len(config.delays)]
        for name, (rate, values) in rows.items():
            lines.append(f"| {name} | {rate:g} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        lines.append("")
    return "\n".join(lines)


def figure(results: Results, config: Config, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(results), figsize=(10, 5), sharey=True, squeeze=False)
    for axis, (kind, rows) in zip(axes[0], results.items(), strict=True):
        for name, (rate, values) in rows.items():
            axis.plot(config.delays, values, marker="o", label=f"{name} (lr {rate:g})")
        axis.set(title=f"{kind} on {config.data}", xlabel="delay (updates)", xscale="symlog", xticks=config.delays)
        axis.set_xticklabels(config.delays)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncol=2)
    axes[0][0].set_ylabel("test accuracy")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(arguments: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits, 100 updates, two delays")
    parser.add_argument("--out", type=Path, default=Path("delayed_training"), help="folder for table and figure")
    options = parser.parse_args(arguments)
    config = QUICK if options.quick else Config()
    results = run_all(config)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "delayed_training.md").write_text(table(results, config))
    figure(results, config, options.out / "delayed_training.png")
    return results


if __name__ == "__main__":
    main()
