"""Matrices that are sharded over ranks: each goes to one rank, its owner, which computes with the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lategrad.rules.blocks import Blocks
from lategrad.support.sharded_vector import ShardedVector


def choose_owners(blocks: Blocks, ranks: int) -> list[int | None]:
    """The owner of each matrix, None for other tensors: the largest first, each to the rank with the least work.

    >>> tensors = [torch.zeros(8, 8), torch.zeros(5), torch.zeros(4, 4), torch.zeros(4, 4)]
    >>> choose_owners(Blocks.of_tensors(tensors), 2)
    [0, None, 1, 1]
    """
    owners: list[int | None] = [None] * len(blocks.parts)
    work = [0] * ranks
    costs = [block.size * min(block.matrix_shape) if block.kind == "matrix" else 0 for block in blocks.parts]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if costs[i]:
            owners[i] = work.index(min(work))
            work[owners[i]] += costs[i]  # type: ignore[index]
    return owners


def at_owners(
    function: Callable[[Blocks, Sequence[Tensor]], list[Tensor]], blocks: Blocks, parts: Sequence[Tensor]
) -> list[Tensor]:
    """``function(blocks, parts)`` for one that replaces each matrix by another and leaves other tensors as they are.

    Every rank sends its rows of each matrix to the owner, which calls ``function`` on all that it owns and sends the
    rows of the results back.
    """
    import torch.distributed as dist

    shards = [part for part in parts if isinstance(part, ShardedVector)]
    if len(shards) < len(parts):
        raise TypeError("some parts of the vector are sharded, others are not")
    if not parts or shards[0].local.is_meta:
        return list(parts)
    of, ranks = shards[0].shards, range(len(shards[0].shards.intervals))
    owners = choose_owners(blocks, len(ranks))
    owned_by = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    mine = owned_by[of.rank]
    rows = [[of.count(shards[i].segments, rank) for i in mine] for rank in ranks]
    send = [shards[i].local for places in owned_by for i in places]
    send_sizes = [sum(shards[i].local.numel() for i in places) for places in owned_by]
    receive_sizes = [sum(sizes) for sizes in rows]

    def exchange(entries: Sequence[Tensor], receive: Sequence[int], sent: Sequence[int]) -> Tensor:
        received = shards[0].local.new_empty(sum(receive))
        dist.all_to_all_single(received, torch.cat(list(entries)), list(receive), list(sent), group=of.group)
        return received

    received = exchange([shards[0].local[:0], *send], receive_sizes, send_sizes).split([n for r in rows for n in r])
    whole = [torch.cat(received[k :: len(mine)]).view(shards[i].shape) for k, i in enumerate(mine)]
    results = function(Blocks(tuple(blocks.parts[i] for i in mine)), whole)
    pieces = [result.reshape(-1).split([sizes[k] for sizes in rows]) for k, result in enumerate(results)]
    back = [piece[rank] for rank in ranks for piece in pieces]
    returned = exchange([shards[0].local[:0], *back], send_sizes, receive_sizes)
    places = [i for places in owned_by for i in places]
    steps = dict(zip(places, returned.split([shards[i].local.numel() for i in places]), strict=True))
    return [shards[i].like(steps[i]) if i in steps else part for i, part in enumerate(parts)]
