"""Train a small language model that FSDP2 has sharded over ranks, and resume from a checkpoint.

Each rank has a part of every parameter and of the optimizer's state, and reads its own share of the batches. The text
is made of words of a few letters, so that there is something to learn. On a machine with GPUs each rank takes one.

    torchrun --nproc-per-node 2 examples/fsdp_training.py --save DIR       # two CPU ranks, seconds
    torchrun --nproc-per-node 3 examples/fsdp_training.py --resume DIR     # continue on another number of ranks
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lategrad as lg

WORDS = ("late ", "gradient ", "rule ", "server ", "worker ")
LETTERS = sorted(set("".join(WORDS)))
CONTEXT = 4


class NextLetter(nn.Module):
    """A multilayer perceptron that predicts a letter from the ones before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 8)
        self.layers = nn.ModuleList([nn.Linear(CONTEXT * 8, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embedding(letters).flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random places in a random text: the letters before each, and the letter there."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(WORDS), (size, 3), generator=generator)
    texts = ["".join(WORDS[i] for i in row) for row in chosen.tolist()]
    ends = torch.randint(CONTEXT, min(map(len, texts)), (size,), generator=generator).tolist()
    pieces = [text[end - CONTEXT : end + 1] for text, end in zip(texts, ends, strict=True)]
    letters = torch.tensor([[LETTERS.index(letter) for letter in piece] for piece in pieces])
    return letters[:, :-1], letters[:, -1]


def validate(model: nn.Module, device: torch.device) -> float:
    x, y = batch(500, seed=-1 % 2**31)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x.to(device)), y.to(device)).item()


def train(options: argparse.Namespace, mesh: DeviceMesh) -> float:
    """Train on the ranks of a mesh; returns the loss of the weights to ship, the same on every rank."""
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    torch.manual_seed(0)  # all ranks start from the same weights
    model = NextLetter().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # After fully_shard: the optimizer must see the sharded parameters.
    optimizer = lg.optim.SteadyMuon(model, lr=0.02)
    done = 0
    if options.resume:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        progress = {**states, "updates": 0}
        dcp.load(progress, checkpoint_id=options.resume, process_group=mesh.get_group())
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        done = progress["updates"]

    for update in range(done, done + options.updates):
        x, y = batch(32, seed=update * mesh.size() + mesh.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()  # step(delay=3) if the gradients were computed 3 updates ago

    with optimizer.output():  # inside, the parameters are the weights to ship
        loss = validate(model, device)
    if options.save:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        progress = {**states, "updates": done + options.updates}
        dcp.save(progress, checkpoint_id=options.save, process_group=mesh.get_group())
    return loss


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", help="folder of a checkpoint to continue from")
    return parser.parse_args(arguments)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = DeviceMesh("cuda" if cuda else "cpu", list(range(dist.get_world_size())))
    loss = train(parse(), mesh)
    if dist.get_rank() == 0:
        print(f"loss of the output on {mesh.size()} ranks: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
