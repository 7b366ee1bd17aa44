"""Which rows each gradient uses: i.i.d. minibatches (the paper's model) or shuffled epochs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lategrad.support.seeds import Stream
from lategrad.support.seeds import torch_generator as seeded
from lategrad.support.validation import require, require_choice, require_count

_BLOCK = 256  # samples drawn from one generator: a stream can be entered anywhere at the cost of one block


def noise(seed: int, first: int, count: int, width: int) -> Tensor:
    """Standard normal vectors number ``first, ...`` of a stream, float64, shape ``(count, width)``."""

    def draw(block: int) -> Tensor:
        return torch.randn(_BLOCK, width, generator=seeded(seed, Stream.NOISE, block), dtype=torch.float64)

    return _in_blocks(draw, first, count)


def _in_blocks(draw: Callable[[int], Tensor], first: int, count: int) -> Tensor:
    blocks = range(first // _BLOCK, -(-(first + count) // _BLOCK))
    rows = torch.cat([draw(block) for block in blocks])
    return rows[first - blocks.start * _BLOCK :][:count]


@dataclass(frozen=True)
class Minibatches:
    """Rows of a data set for each gradient.

    Args:
        rows: size of the data set.
        batch: rows in a minibatch.
        sampling: "iid", every row drawn at random with replacement, as the paper assumes; or "epochs",
            random permutations of the data set one after the other (a minibatch may span two).

    >>> Minibatches(rows=4, batch=2, sampling="epochs").draw(seed=0, first=0, count=2).flatten().sort().values
    tensor([0, 1, 2, 3])
    """

    rows: int
    batch: int
    sampling: str = "iid"

    def __post_init__(self) -> None:
        require_count("batch", self.batch, low=1)
        require_choice("sampling", self.sampling, ("iid", "epochs"))

    def draw(self, seed: int, first: int, count: int) -> Tensor:
        """Minibatches number ``first, ...`` of the stream of a seed; int64, shape ``(count, batch)``."""

        def draw(block: int) -> Tensor:
            return torch.randint(self.rows, (_BLOCK, self.batch), generator=seeded(seed, Stream.IID_ROWS, block))

        if self.sampling == "iid":
            return _in_blocks(draw, first, count)
        begin, end = first * self.batch, (first + count) * self.batch
        epochs = range(begin // self.rows, -(-end // self.rows))
        order = torch.cat([torch.randperm(self.rows, generator=seeded(seed, Stream.EPOCHS, e)) for e in epochs])
        return order[begin - epochs.start * self.rows :][: end - begin].reshape(count, self.batch)

    def draw_from(self, rows: range, seed: int, first: int, count: int) -> Tensor:
        """The same with only these rows as the data set.

        >>> Minibatches(rows=9, batch=2, sampling="epochs").draw_from(range(1, 9, 3), seed=0, first=0, count=3).unique()
        tensor([1, 4, 7])
        """
        require("data_shards", rows.step, len(rows) > 0, f"at most {self.rows}, the rows of the data set")
        return rows.start + rows.step * replace(self, rows=len(rows)).draw(seed, first, count)
