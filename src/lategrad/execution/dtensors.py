"""Parameters that are sharded over ranks: DTensors, as ``fully_shard`` makes them, with a state of DTensors."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from lategrad.support.sharded_vector import Interval, Shards


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor; there are none until their module is imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_parts(tensors: list[Any]) -> list[Tensor]:
    """This rank's parts of DTensors, in their memory, which FSDP may move between two steps; plain tensors as given."""
    if not tensors or not is_dtensor(tensors[0]):
        return tensors
    with torch.no_grad():
        return [tensor.to_local() for tensor in tensors]


def local_part_of(value: Any, tensor: Any) -> Tensor:
    """This rank's part of a DTensor's gradient or saved state, which may also be a whole tensor."""
    if is_dtensor(tensor) and not is_dtensor(value) and value.shape == tensor.shape:
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    ours, theirs = ((tuple(t.shape), *((t.placements, t.device_mesh) if is_dtensor(t) else ("a plain tensor",)))
                    for t in (tensor, value))  # fmt: skip
    if ours != theirs:
        raise ValueError(f"a gradient or saved state is {theirs}, its parameter {ours}")
    return local_parts([value])[0]


def like_dtensor(local: Tensor, tensor: Any) -> Tensor:
    """A DTensor like another one, with this local part; beside a plain tensor, the part itself."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                              stride=tensor.stride())  # fmt: skip


def check_sharding(name: str, params: Sequence[Any]) -> None:
    """Raise a ValueError for parameters that an optimizer cannot train in one group."""
    if any(getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False) for p in params):
        raise ValueError(f"{name} does not support FullyShardedDataParallel, whose shards look like whole parameters: "
                         f"use fully_shard (FSDP2)")  # fmt: skip
    sharded = [p for p in params if is_dtensor(p)]
    if sharded and len(sharded) < len(params):
        raise ValueError(f"{name} got {len(sharded)} DTensors and {len(params) - len(sharded)} plain parameters in one "
                         f"group: give those that fully_shard did not shard a group of their own")  # fmt: skip
    forms = list(dict.fromkeys((p.placements, p.device_mesh) for p in sharded))
    if len(forms) > 1:
        raise ValueError(f"{name} needs one mesh and the same placements in a group, got {forms[0]} and {forms[1]}: "
                         f"make a group for each")  # fmt: skip
    shards_of(params)


def shards_of(tensors: Sequence[Any]) -> Shards | None:
    """Which rank holds which entries of the vector that the tensors make up; None when every rank has all of it."""
    if not tensors or not is_dtensor(tensors[0]):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    dims = [i for i, placement in enumerate(placements) if type(placement) is not Replicate]
    if dims and (len(dims) > 1 or type(placements[dims[0]]) is not Shard or placements[dims[0]].dim != 0):
        raise ValueError(f"parameters with placements {placements} are not supported: Shard(0) on one dimension of the "
                         f"mesh and Replicate() on all others are, as fully_shard makes them; tensor parallelism, "
                         f"several sharded dimensions and partial sums are not")  # fmt: skip
    if not dims:
        return None
    intervals: list[list[Interval]] = [[] for _ in range(mesh.size(dims[0]))]
    start = 0
    for tensor in tensors:
        rows, row = tensor.shape[0], tensor.numel() // max(tensor.shape[0], 1)
        share = -(-rows // len(intervals))  # the rows of a rank; the last ranks have fewer, or none
        for rank, own in enumerate(intervals):
            low, high = min(rank * share, rows), min((rank + 1) * share, rows)
            own.extend([(start + low * row, start + high * row)] if low < high else [])
        start += tensor.numel()
    return Shards(intervals, mesh.get_local_rank(dims[0]), mesh.get_group(dims[0]))


def max_over_ranks(tensor: Any, numbers: Sequence[float]) -> list[float]:
    """The largest of each number over the ranks that share a DTensor; for a plain tensor, the numbers themselves."""
    if not is_dtensor(tensor):
        return list(numbers)
    import torch.distributed as dist

    largest = torch.tensor(numbers, dtype=torch.float64, device=tensor.device)
    for group in tensor.device_mesh.get_all_groups():
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [float(number) for number in largest]


class GatherAnew:
    """Makes every FSDP module that runs gather its shards anew, until and after :meth:`close`.

    After a pass without a backward pass FSDP keeps the root's gathered parameters, and would use them in the next pass
    although the shards have changed.
    """

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, _: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(module, FSDPModule) and module not in self._modules:
            module.reshard()
            self._modules.append(module)

    def close(self) -> None:
        self._hook.remove()
        for module in self._modules:
            module.reshard()
