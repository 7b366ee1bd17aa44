"""Matrices that are sharded over ranks: each goes to one rank, its owner, which computes with the whole of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lategrad.rules.blocks import Block, Blocks


def work_of(block: Block) -> int:
    return block.size * min(block.matrix_shape[-2:])


def choose_owners(blocks: Blocks, ranks: int) -> list[list[int]]:
    """The matrices that each rank owns: the largest first, each to the rank with the least work.

    >>> tensors = [torch.zeros(8, 8), torch.zeros(5), torch.zeros(4, 4), torch.zeros(4, 4)]
    >>> choose_owners(Blocks.of_tensors(tensors), 2)
    [[0], [2, 3]]
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    costs = {i: work_of(block) for i, block in enumerate(blocks.parts) if block.is_matrix}
    for i in sorted(costs, key=lambda i: -costs[i]):
        owner = work.index(min(work))
        owned[owner].append(i)
        work[owner] += costs[i]
    return owned


def at_owners(
    function: Callable[[Blocks, Sequence[Tensor]], list[Tensor]], blocks: Blocks, parts: Sequence[Any]
) -> list[Tensor]:
    """``function(blocks, parts)``, which replaces matrices by matrices, for sharded parts.

    Every rank sends its rows of each matrix to the owner, which calls ``function`` on all that it owns and sends the
    rows of the results back.
    """
    shards, like = parts[0].shards, parts[0].local
    if like.is_meta:
        return list(parts)
    import torch.distributed as dist

    owned = choose_owners(blocks, len(shards.intervals))
    mine, order = owned[shards.rank], [i for own in owned for i in own]
    sizes = [[shards.count(parts[i].segments, rank) for i in mine] for rank in range(len(owned))]
    counts = [sum(parts[i].local.numel() for i in own) for own in owned], [sum(own) for own in sizes]

    def exchange(entries: Sequence[Tensor], sent: list[int], received: list[int]) -> Tensor:
        result: Tensor = like.new_empty(sum(received))
        dist.all_to_all_single(result, torch.cat([like[:0], *entries]), received, sent, group=shards.group)
        return result

    rows = list(exchange([parts[i].local for i in order], *counts).split([size for own in sizes for size in own]))
    matrices = [torch.cat(rows[k :: len(mine)]).view(parts[i].shape) for k, i in enumerate(mine)]
    rows.clear()  # whole matrices are what takes memory
    results = function(Blocks(tuple(blocks.parts[i] for i in mine)), matrices)
    matrices.clear()
    pieces = [result.flatten().split([own[k] for own in sizes]) for k, result in enumerate(results)]
    results.clear()
    returned = exchange([piece[rank] for rank in range(len(owned)) for piece in pieces], *reversed(counts))
    steps = dict(zip(order, returned.split([parts[i].local.numel() for i in order]), strict=True))
    return [part.like(steps[i]) if i in steps else part for i, part in enumerate(parts)]
