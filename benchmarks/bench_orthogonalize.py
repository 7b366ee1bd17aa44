"""The orthogonal factor of matrices on a CPU: ours against Muon's iteration (five steps with fixed coefficients)."""

import argparse

import torch
from torch import Tensor

from lategrad.rules._orthogonalize import orthogonalise
from timing import side_by_side

SHAPES = {
    "a layer of a GPT of width 256": [(4, 256, 256), (1, 1024, 256), (1, 256, 1024)],
    "4 of 512 x 512": [(4, 512, 512)],
    "a layer of a GPT of width 768": [(4, 768, 768), (1, 3072, 768), (1, 768, 3072)],
    "10 of 1000 x 1000": [(10, 1000, 1000)],
}


def muons(x: Tensor) -> Tensor:
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, shapes in SHAPES.items():
            torch.manual_seed(0)
            batches = [torch.randn(shape) for shape in shapes]
            seconds = side_by_side({"muon": lambda b=batches: [muons(x) for x in b],
                                    "ours": lambda b=batches: [orthogonalise(x) for x in b]}, rounds)  # fmt: skip
            size = sum(x.numel() for x in batches)
            print(f"{threads} thread(s), {name}, {size:,} entries: {1e3 * seconds['muon']:.0f} ms and "
                  f"{1e3 * seconds['ours']:.0f} ms, {seconds['muon'] / seconds['ours']:.1f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
