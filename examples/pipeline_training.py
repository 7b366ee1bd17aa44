"""Train a character GPT as an asynchronous pipeline: one stage on each rank, none of which ever waits for a flush.

    torchrun --nproc-per-node 2 examples/pipeline_training.py                        # a minute
    torchrun --nproc-per-node 2 --max-restarts 3 examples/pipeline_training.py --checkpoints run   # survives a death

The first stage gets gradients that are one update late (with P ranks: P - 1); SteadyMuon is told, and keeps the
learning rate that is best without delay. With ``--checkpoints`` a run that is started again continues.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import lategrad as lg
from pipeline_tolerance import CONTEXT, HEADS, LETTERS, WIDTH, text

BATCH = 16


class Embedding(nn.Module):
    """Characters and their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.characters(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Causal attention and a hidden layer, each added to what came in."""

    def __init__(self, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.writes = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.hidden, self.back = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.writes(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.back(gelu(self.hidden(self.norms[1](h))))


def gpt(layers: int = 4, width: int = WIDTH, seed: int = 0) -> nn.Sequential:
    """A GPT as a sequence of layers, which can be cut anywhere."""
    torch.manual_seed(seed)
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(Embedding(width), *blocks, nn.LayerNorm(width), nn.Linear(width, LETTERS, bias=False))


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def windows(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Characters from each start, and the ones that follow them."""
    found = source[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def batch(t: int, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """Batch number t, the same on all ranks and after a restart."""
    training, _ = text()
    generator = torch.Generator().manual_seed(t)
    return windows(training, torch.randint(len(training) - CONTEXT - 1, (rows,), generator=generator))


def held_out() -> tuple[Tensor, Tensor]:
    _, validation = text()
    return windows(validation, torch.linspace(0, len(validation) - CONTEXT - 2, 256).long())


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is complete: its metadata are written at the end."""
    found = sorted(folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
    return found[-1].parent if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", type=Path, help="save every 50 steps, and continue from the newest")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--die-at", type=int, help="kill the last rank once, to see the restart")
    options = parser.parse_args()
    lg.pipeline.connect()
    stages = lg.pipeline.cut(gpt(), dist.get_world_size())
    pipe = lg.pipeline.Pipeline(stages, loss, lambda stage: lg.optim.SteadyMuon(stage, lr=0.03), timeout=60.0)
    last = pipe.index == pipe.count - 1
    if options.checkpoints and (found := newest(options.checkpoints)):
        dcp.load({"pipe": pipe}, checkpoint_id=found)
        if last:
            print(f"continues from step {pipe.steps}", flush=True)
    while pipe.steps < options.steps:
        value = pipe.step(*batch(pipe.steps))
        if last and pipe.steps % 50 == 0:
            print(f"step {pipe.steps:4}  training loss {value:.3f}", flush=True)
        if options.checkpoints and pipe.steps % options.save_every == 0:
            dcp.save({"pipe": pipe}, checkpoint_id=options.checkpoints / str(pipe.steps))
        if last and pipe.steps == options.die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    held_out_loss = pipe.evaluate(*held_out())  # with the weights that ship
    if last:
        print(f"held-out loss {held_out_loss:.4f}")
    print(f"stage {pipe.index}: delay {pipe.delays[-1]}, busy {pipe.busy:.0%} of the time, "
          f"{pipe.stash_bytes / 1e6:.1f} MB of stashed weights")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (lg.pipeline.PipelineError, KeyboardInterrupt) as error:
        sys.exit(f"rank {os.environ['RANK']}: {str(error) or 'interrupted'}")
