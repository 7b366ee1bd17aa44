"""SteadyMuon and its baselines on models and text that nothing was tuned on: tables in minutes on a CPU.

A residual network and an MLP-Mixer on Fashion-MNIST, and a small GPT that reads the Python sources of the standard
library as characters. The protocol is that of `python -m reproduction deep`: learning rates are those of the smallest
training loss without delay, with the first seed; synchronous Muon's are tuned for each delay. What is finished is kept
in the folder `--out`.

    python -m benchmarks.unseen_models resnet mixer python
"""

import argparse
import sysconfig
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from lategrad.problems import LanguageProblem, ModuleProblem, Text
from reproduction.deep.models import GPT
from reproduction.deep.plan import CANDIDATES, DeepSetting
from reproduction.deep.scores import score_rule
from reproduction.deep.study import table, verdicts
from reproduction.study import Task, Workspace, dataset, lr_grid

LRS = {"steady-muon": (-3, -1), "muon": (-3.5, -1.5), "adamw": (-4, -2), "synchronous-muon": (-3, -1)}
"""Of the rules that are compared, log10 of the smallest and the largest learning rate."""
MODULES = (
    "argparse", "ast", "asyncio", "collections", "concurrent", "ctypes", "dataclasses", "difflib", "doctest", "email",
    "enum", "http", "importlib", "inspect", "json", "logging", "multiprocessing", "pickle", "pydoc", "typing",
    "unittest",
)  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with group norm, added to what comes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        norms = [nn.GroupNorm(2, channels) for _ in range(2)]
        self.layers = nn.Sequential(norms[0], nn.ReLU(), convolutions[0], norms[1], nn.ReLU(), convolutions[1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Mixer(nn.Module):
    """A layer of an MLP-Mixer: hidden layers over the patches, then over the channels, each added to what comes in."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()

        def mlp(width: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.over_patches, self.over_channels = mlp(patches), mlp(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).mT).mT
        out: Tensor = x + self.over_channels(self.norms[1](x))
        return out


def resnet() -> nn.Module:
    blocks = [Residual(8) for _ in range(3)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 3, stride=3), *blocks, nn.ReLU(),
                         nn.AvgPool2d(3), nn.Flatten(), nn.Linear(8 * 9, 10))  # fmt: skip


class Transpose(nn.Module):
    """Exchanges the last two dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def mixer() -> nn.Module:
    """Sixteen patches of 7 x 7 pixels."""
    patches = nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 32, 7, stride=7), nn.Flatten(2), Transpose()
    layers = Mixer(16, 32), Mixer(16, 32), nn.LayerNorm(32)
    return nn.Sequential(*patches, *layers, nn.Flatten(), nn.Linear(16 * 32, 10))


@lru_cache(maxsize=1)
def python_text() -> Text:
    """Sources of the standard library, without characters beyond ASCII."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        p for name in MODULES for p in sorted([library / f"{name}.py", *(library / name).rglob("*.py")]) if p.exists()
    ]
    sources = [path.read_text(encoding="utf-8").encode("ascii", "ignore").decode() for path in paths]
    return Text.of_strings("python", [source for source in sources if len(source) > 1000])


class Unseen(DeepSetting):
    """One of the models, under delays of 0, 8 and 64."""

    def __post_init__(self) -> None:
        pass

    @property
    def title(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.updates:,} updates"

    @property
    def by_loss(self) -> bool:
        return self.model == "python"

    def problem(self, batch: int) -> ModuleProblem:
        options = {"batch": batch, "evaluate": self.evaluate, "micro_batch": self.micro_batch}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            if self.model == "python":
                text = python_text()
                gpt = GPT(len(text.vocabulary), context=32, layers=2, width=32)
                return LanguageProblem(gpt, text, context=32, **options)
            module = {"resnet": resnet, "mixer": mixer}[self.model]()
        return ModuleProblem(module, dataset("fashion-mnist", "standardise-globally"), **options)


SETTINGS = {
    name: Unseen(name, 3_000, batch, delays=("0", "8", "64"), tuned_at=("0", "64"), evaluate=evaluate, micro_batch=256)
    for name, batch, evaluate in (("resnet", 32, 10_000), ("mixer", 32, 10_000), ("python", 16, 1_024))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=SETTINGS)
    parser.add_argument("--updates", type=int, default=3_000)
    parser.add_argument("--out", type=Path, default=Path("out/unseen-models"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in args.models:
        setting, panel = replace(SETTINGS[model], updates=args.updates), {}
        for candidate in (c for c in CANDIDATES if c.rule in LRS):
            own = replace(candidate, lrs=lr_grid(*LRS[candidate.rule]))
            panel[candidate.rule] = score_rule(Task(setting, own, 3, Workspace(args.out)))
        print(f"\n**{setting.title}**, {setting.problem(1).dim:,} parameters\n")
        for number, row in enumerate(rows := table(setting, panel, "frozen")):
            if number == 0:
                print(f"| {' | '.join(row)} |\n|{'---|' * len(rows[0])}")
            print(f"| {' | '.join(row.values())} |")
        for found in verdicts(setting, panel, judged=True):
            print(f"- {found.claim}: {found.measured}, {found.outcome}")
        grid = panel["steady-muon"].grids["64"][0]
        print("SteadyMuon at 64, seed 0: " + ", ".join(f"{lr:g}: {score:.3f}" for lr, score in zip(
            panel["steady-muon"].candidate.lrs, grid.tolist(), strict=True)))  # fmt: skip


if __name__ == "__main__":
    main()
