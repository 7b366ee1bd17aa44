"""How many stages can a pipeline have? A character GPT, with the delays of its stages.

Without bubbles, a pipeline of P stages applies gradients with a delay of P - 1 updates at its first stage and of 0 at
its last. This trains a small GPT on the source of Python's standard library, with AdamW and with SteadyMuon, at several
depths; and for comparison with the same delay everywhere, as with a parameter server.

    python examples/pipeline_tolerance.py --quick          # seconds
    python examples/pipeline_tolerance.py --out pipeline   # a minute for each seed

The training function is an ordinary one, which the command line takes too:

    lategrad tolerance examples/pipeline_tolerance.py:train --profile stages:8 --delay 0 7 31 --out pipeline
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import lategrad as lg
from lategrad.tolerance_study import Wrap

sys.path.append(str(Path(__file__).parents[1]))  # for the GPT of the study in reproduction/

SOURCES = ("argparse", "ast", "datetime", "decimal", "difflib", "inspect", "pickle", "tarfile", "typing",
           "unittest.mock")  # fmt: skip
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 48, 4, 4, 32, 16
LETTERS = 128
ADAMW_LR, STEADY_LR = 3e-3, 3e-2  # each the best of 3e-3, 1e-2 and 3e-2 without delay


@cache
def text() -> tuple[Tensor, Tensor]:
    """Training and validation text: characters as numbers below 128."""
    paths = [importlib.util.find_spec(name).origin for name in SOURCES]
    whole = torch.tensor([min(byte, LETTERS - 1) for path in paths for byte in Path(path).read_bytes()])
    chunks = whole[: len(whole) // 2000 * 2000].view(-1, 2000)
    held_out = torch.arange(len(chunks)) % 10 == 9  # every tenth piece of 2,000 characters
    return chunks[~held_out].flatten(), chunks[held_out].flatten()


def loss_on(model: nn.Module, source: Tensor, starts: Tensor) -> Tensor:
    windows = source[starts[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(wrap: Wrap, updates: int = 150, records: int = 10) -> Iterator[float]:
    """The whole training; the study needs only the line with ``wrap``."""
    from reproduction.deep.models import GPT

    training, validation = text()
    model = GPT(LETTERS, CONTEXT, LAYERS, WIDTH, HEADS, seed=wrap.seed)
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=ADAMW_LR), model)
    held_out = torch.linspace(0, len(validation) - CONTEXT - 2, 256).long()
    while optimizer.updates < updates:
        starts = torch.randint(len(training) - CONTEXT - 1, (BATCH,))
        optimizer.zero_grad()
        loss_on(model, training, starts).backward()
        optimizer.step()
        if optimizer.updates and optimizer.updates % (updates // records) == 0:
            with torch.no_grad(), optimizer.output():  # with the weights that would be shipped
                yield loss_on(model, validation, held_out).item()


def steady(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return lg.optim.SteadyMuon(params, lr=STEADY_LR)


def main(arguments: list[str] | None = None) -> dict[str, lg.Tolerance]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 updates, two delays")
    parser.add_argument("--seeds", type=int, default=1, help="runs that are in the folder already are not repeated")
    parser.add_argument("--out", type=Path, default=Path("pipeline_tolerance"), help="folder for pages and pictures")
    options = parser.parse_args(arguments)
    run = partial(train, updates=12, records=6) if options.quick else train
    delays = (0, 7) if options.quick else (0, 7, 15)
    results = {}
    for name, profile in (("stages", "stages:8"), ("everywhere", None)):
        result = lg.tolerance(
            run, delays, {"steady-muon": steady}, options.seeds, profile=profile, out=options.out / name
        )
        print(f"delays: {profile or 'the same everywhere'}\n{result.table()}\n")
        result.plot(options.out / f"{name}.png")
        result.to_html(options.out / f"{name}.html")
        results[name] = result
    return results


if __name__ == "__main__":
    main()
