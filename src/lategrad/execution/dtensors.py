"""Parameters that are sharded over ranks: DTensors, as ``fully_shard`` makes them.

Each rank works on its own part of them, in place. The state beside a DTensor is made of DTensors like it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lategrad.support.sharded_vector import Interval, Shards


def is_dtensor(tensor: Any) -> TypeGuard[Any]:
    """Whether it is a DTensor; where their module, which takes a second to import, is not imported there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; a plain tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor


def like_dtensor(local: Tensor, tensor: Tensor) -> Tensor:
    """A part in the form of another tensor: a DTensor of the same mesh and placements, or the plain part."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                              stride=tensor.stride())  # fmt: skip


def part_of(value: Tensor, tensor: Any) -> Tensor:
    """This rank's part of a gradient or saved state of a tensor; for a DTensor, a value may also be a whole tensor.

    Raises a ValueError for a DTensor of another mesh or other placements.
    """
    if not is_dtensor(value):
        if not is_dtensor(tensor) or value.shape != tensor.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    form = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else ("no mesh", "a plain parameter")
    if (value.device_mesh, value.placements) != form:
        raise ValueError(f"a gradient or state has placements {value.placements} on {value.device_mesh}, its parameter "
                         f"{form[1]} on {form[0]}")  # fmt: skip
    return local_part(value)


def check_sharding(name: str, params: Sequence[Tensor]) -> None:
    """Raise a ValueError for parameters of one group that cannot be trained together."""
    if any(getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False) for p in params):
        raise ValueError(f"{name} does not support FullyShardedDataParallel, whose shards look like whole parameters: "
                         f"use fully_shard (FSDP2)")  # fmt: skip
    sharded = [p for p in params if is_dtensor(p)]
    if not sharded:
        return
    if len(sharded) < len(params):
        raise ValueError(f"{name} got {len(sharded)} DTensors and {len(params) - len(sharded)} plain parameters in one "
                         f"group: give those that fully_shard did not shard a group of their own")  # fmt: skip
    first: Any = sharded[0]
    for p in sharded:
        if p.device_mesh != first.device_mesh:
            raise ValueError(f"{name} needs one mesh for the parameters of a group, got {first.device_mesh} and "
                             f"{p.device_mesh}: give each mesh a group of its own")  # fmt: skip
        if p.placements != first.placements:
            raise ValueError(f"{name} needs the same placements for the parameters of a group, got {first.placements} "
                             f"and {p.placements}: give each a group of its own")  # fmt: skip
    _shard_dim(name, first)


def _shard_dim(name: str, tensor: Any) -> int | None:
    """The dimension of the mesh that shards a DTensor; None for one that is replicated."""
    from torch.distributed.tensor import Replicate, Shard

    dims = [i for i, placement in enumerate(tensor.placements) if type(placement) is Shard and placement.dim == 0]
    others = [p for i, p in enumerate(tensor.placements) if i not in dims and type(p) is not Replicate]
    if others or len(dims) > 1:
        raise ValueError(
            f"{name} does not support a parameter of shape {tuple(tensor.shape)} with placements {tensor.placements}: "
            f"it takes Shard(0) on one dimension of the mesh and Replicate() on all others, as fully_shard makes "
            f"them; tensor parallelism, several sharded dimensions and partial sums are not supported"
        )
    return dims[0] if dims else None


def shards_of(tensors: Sequence[Tensor]) -> Shards | None:
    """Which rank holds which entries of the vector that the tensors make up; None when every rank has all of it."""
    first: Any = tensors[0]
    dim = _shard_dim("lategrad", first) if is_dtensor(first) else None
    if dim is None:
        return None
    ranks = first.device_mesh.size(dim)
    intervals: list[list[Interval]] = [[] for _ in range(ranks)]
    start = 0
    for tensor in tensors:
        rows, row = tensor.shape[0], tensor.numel() // max(tensor.shape[0], 1)
        share = -(-rows // ranks)  # all ranks but the last ones have as many rows
        for rank, own in enumerate(intervals):
            low, high = min(rank * share, rows), min((rank + 1) * share, rows)
            if low < high:
                own.append((start + low * row, start + high * row))
        start += tensor.numel()
    return Shards(intervals, first.device_mesh.get_local_rank(dim), first.device_mesh.get_group(dim))


def largest_over_ranks(tensor: Any, numbers: Sequence[float]) -> list[float]:
    """The largest of each number over the ranks that share a DTensor; for a plain tensor, the numbers themselves."""
    if not is_dtensor(tensor):
        return list(numbers)
    import torch.distributed as dist

    largest = torch.tensor(numbers, dtype=torch.float64, device=tensor.device)
    for group in tensor.device_mesh.get_all_groups():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    result: list[float] = largest.tolist()
    return result
