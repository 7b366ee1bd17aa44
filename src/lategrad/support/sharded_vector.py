"""A vector whose entries lie on several ranks, on which rules and constraint sets run as they are.

A rule is written for one flat vector: entry by entry, with reductions over the last dimension. :class:`ShardedVector`
is a tensor with the shape of the whole vector and the memory of this rank's entries. Operations on entries run on
them; reductions are summed over the ranks and give a plain tensor, the same on every rank. Everything else raises
:class:`NotShardedError`: a rule that this module does not understand fails, and never computes a local norm.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import WrapperTensor

Interval = tuple[int, int]
"""Start and stop of consecutive entries."""


class NotShardedError(TypeError):
    """An operation that is not defined on sharded vectors."""


class Shards:
    """Which rank holds which entries of a vector.

    Args:
        intervals: for each rank its entries, in ascending order.
        rank: the present one.
        group: the process group of the ranks; None where one process holds the whole vector. Operations that are not
            defined on sharded vectors then run on plain tensors.

    >>> shards = Shards([[(0, 2), (4, 5)], [(2, 4), (5, 6)]], rank=1)  # parameters of 4 and of 2 entries
    >>> shards.scatter(torch.arange(6.0)).local
    tensor([2., 3., 5.])
    """

    def __init__(self, intervals: Sequence[Sequence[Interval]], rank: int, group: Any = None) -> None:
        self.intervals, self.rank, self.group = intervals, rank, group
        self._starts = [[start for start, _ in own] for own in intervals]
        self._counts = [[0, *accumulate(stop - start for start, stop in own)] for own in intervals]
        self.size: int = sum(counts[-1] for counts in self._counts)

    def _below(self, position: int, rank: int) -> int:
        """The number of a rank's entries before a position of the vector."""
        i = bisect_right(self._starts[rank], position) - 1
        if i < 0:
            return 0
        start, stop = self.intervals[rank][i]
        return self._counts[rank][i] + min(position, stop) - start

    def count(self, segments: Iterable[Interval], rank: int | None = None) -> int:
        """The number of entries that a rank, by default this one, has in some segments."""
        rank = self.rank if rank is None else rank
        return sum(self._below(stop, rank) - self._below(start, rank) for start, stop in segments)

    def vector(self, local: Tensor) -> ShardedVector:
        """The vector of which this rank's entries are ``local``."""
        if local.shape != (self._counts[self.rank][-1],):
            raise ValueError(f"this rank has {self._counts[self.rank][-1]} entries, got {tuple(local.shape)}")
        return ShardedVector(local, self, ((0, self.size),))

    def scatter(self, whole: Tensor) -> ShardedVector:
        """The shards of a vector that every rank has as a whole."""
        return self.vector(torch.cat([whole[:0], *(whole[start:stop] for start, stop in self.intervals[self.rank])]))

    def reduce(self, value: Tensor, op: str) -> Tensor:
        """A value of each rank, reduced over the ranks: "SUM", "MIN" or "MAX"; it is overwritten."""
        if self.group is not None and not value.is_meta:
            import torch.distributed as dist

            dist.all_reduce(value, getattr(dist.ReduceOp, op), group=self.group)
        return value


class ShardedVector(WrapperTensor):
    """A vector, or a part or reshaped part of one; see the module.

    Args:
        local: this rank's entries, flat.
        shards: of the whole vector.
        segments: the entries of the whole vector that this part consists of.
        shape: by default flat.
    """

    local: Tensor
    shards: Shards
    segments: tuple[Interval, ...]

    @staticmethod
    def __new__(
        cls: type[ShardedVector], local: Tensor, shards: Shards, segments: tuple[Interval, ...],
        shape: Sequence[int] | None = None,
    ) -> ShardedVector:  # fmt: skip
        size = sum(stop - start for start, stop in segments)
        vector: ShardedVector = cls.allocate((size,) if shape is None else shape, local)
        vector.local, vector.shards, vector.segments = local, shards, segments
        return vector

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedVector({tuple(self.shape)}, here {self.local!r})"

    def like(self, local: Tensor, shape: Sequence[int] | None = None) -> ShardedVector:
        """Other values of the same entries."""
        if local.shape != self.local.shape:
            raise NotShardedError(f"an operation on entries gave {tuple(local.shape)} of {tuple(self.local.shape)}")
        return ShardedVector(local, self.shards, self.segments, self.shape if shape is None else shape)

    def whole(self) -> Tensor:
        """All entries, flat, on every rank."""
        shards, ranks = self.shards, range(len(self.shards.intervals))
        if shards.group is None:
            return self.local
        counts = [shards.count(self.segments, rank) for rank in ranks]
        whole = self.local.new_empty(sum(counts))
        if whole.is_meta:
            return whole
        import torch.distributed as dist

        padded = self.local.new_zeros(max(counts))  # gloo gathers equal sizes only
        padded[: self.local.numel()] = self.local
        gathered = self.local.new_empty(len(counts) * max(counts))
        dist.all_gather_into_tensor(gathered, padded, group=shards.group)
        for rank, entries in zip(ranks, gathered.split(max(counts)), strict=True):
            done, read = 0, 0
            for start, stop in self.segments:
                for low, high in shards.intervals[rank]:
                    low, high = max(low, start), min(high, stop)
                    if low < high:
                        place = done + low - start
                        whole[place : place + high - low] = entries[read : read + high - low]
                        read += high - low
                done += stop - start
        return whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        define = _OPERATIONS.get(func.overloadpacket)
        if define is not None:
            return define(func, *args, **kwargs)
        if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
            return _on_entries(func, *args, **kwargs)
        return _not_sharded(func, args, kwargs)


def _not_sharded(func: Any, args: Any, kwargs: Any, why: str = "") -> Any:
    """Raise; where one process has the whole vector, run on plain tensors."""
    if any(arg.shards.group is not None for arg in tensors((args, kwargs)) if isinstance(arg, ShardedVector)):
        raise NotShardedError(
            f"{func} is not defined on a vector that is sharded over ranks{why}. Rules and constraint sets may use "
            f"operations on entries, split, cat, sort, and sum, mean, norm, amax, amin, all, any over the vector"
        )
    args, kwargs = map_tensors(lambda x: x.local.view(x.shape) if isinstance(x, ShardedVector) else x, (args, kwargs))
    return func(*args, **kwargs)


def _on_entries(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on each entry, with numbers and tensors of one number, which are the same on every rank."""
    first = next(arg for arg in tensors((args, kwargs)) if isinstance(arg, ShardedVector))
    in_place = func.overloadpacket.__name__.endswith("_")
    if in_place and not isinstance(args[0], ShardedVector):
        return _not_sharded(func, args, kwargs, ": it writes a sharded vector into a plain one")
    for arg in tensors((args, kwargs)):
        if isinstance(arg, ShardedVector):
            if (arg.segments, arg.shape) != (first.segments, first.shape):
                return _not_sharded(func, args, kwargs, ": it combines different entries")
        elif arg.numel() != 1:
            return _not_sharded(func, args, kwargs, f": it has a plain vector of shape {tuple(arg.shape)}, too")

    def local(arg: Tensor) -> Tensor:
        if isinstance(arg, ShardedVector):
            return arg.local
        return arg.reshape(1) if arg.dim() else arg  # a tensor without dimensions has a weaker dtype

    local_args, local_kwargs = map_tensors(local, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    return args[0] if in_place else first.like(result)


def _with_shape(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
    """The same entries in the same order, in another shape."""
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    if math.prod(shape) != x.numel():
        return _not_sharded(func, (x, *args), kwargs)
    return x.like(x.local, shape)


def _cut(x: ShardedVector, sizes: Sequence[int]) -> list[ShardedVector]:
    """Consecutive parts of a vector, as views."""
    cuts: list[tuple[Interval, ...]] = []
    remaining = list(reversed(x.segments))
    for size in sizes:
        part: list[Interval] = []
        while size > 0:
            start, stop = remaining.pop()
            if stop - start > size:
                remaining.append((start + size, stop))
                stop = start + size
            part.append((start, stop))
            size -= stop - start
        cuts.append(tuple(part))
    pieces = x.local.split([x.shards.count(segments) for segments in cuts])
    return [ShardedVector(piece, x.shards, segments) for piece, segments in zip(pieces, cuts, strict=True)]


def _is_flat(x: ShardedVector, dim: Any) -> bool:
    return x.dim() == 1 and dim in (None, 0, -1, (), [], [0], [-1])


def _split(func: Any, x: ShardedVector, sizes: Sequence[int], dim: int = 0) -> Any:
    return _cut(x, sizes) if _is_flat(x, dim) else _not_sharded(func, (x, sizes, dim), {})


def _slice(func: Any, x: ShardedVector, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if not _is_flat(x, dim) or step != 1:
        return _not_sharded(func, (x, dim, start, end, step), {})
    start, end, _ = slice(start, end).indices(x.numel())
    return _cut(x, [start, max(0, end - start), x.numel() - max(start, end)])[1]


def _cat(func: Any, parts: Sequence[Any], dim: int = 0) -> Any:
    if not all(isinstance(part, ShardedVector) and _is_flat(part, dim) for part in parts):
        return _not_sharded(func, (parts, dim), {})
    segments: list[Interval] = []
    for start, stop in (segment for part in parts for segment in part.segments):
        if segments and segments[-1][1] == start:
            start = segments.pop()[0]
        segments.append((start, stop))
    return ShardedVector(torch.cat([part.local for part in parts]), parts[0].shards, tuple(segments))


def _sort(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
    """Sorted as a whole, on every rank: a plain vector."""
    return func(x.whole(), *args, **kwargs) if x.dim() == 1 else _not_sharded(func, (x, *args), kwargs)


# ---- Reductions


def _reduction(
    of_entries: Callable[..., Tensor], op: str, finish: Callable[[Tensor, int], Tensor] | None = None
) -> Callable[..., Any]:
    """A reduction over the vector: of each rank's entries, then over the ranks, then to the result's form."""

    def reduce(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
        if func.overloadpacket is torch.ops.aten.linalg_vector_norm:
            order, *args_left = args or (2,)
            if order != 2:
                return _not_sharded(func, (x, *args), kwargs, ": only the Euclidean norm is")
        else:
            args_left = list(args)
        dim, keepdim = [*args_left, *[None, False][len(args_left) :]]
        if not _is_flat(x, dim):
            return _not_sharded(func, (x, *args), kwargs)
        value = x.shards.reduce(of_entries(x.local, kwargs.get("dtype")), op)
        value = value if finish is None else finish(value, x.numel())
        return value.reshape(1 if keepdim else ())

    return reduce


def _extreme(largest: bool) -> Callable[[Tensor, torch.dtype | None], Tensor]:
    def extreme(local: Tensor, _: torch.dtype | None) -> Tensor:
        padded = torch.cat([local, local.new_full((1,), -math.inf if largest else math.inf)])
        return padded.amax() if largest else padded.amin()

    return extreme


def _sum(local: Tensor, dtype: torch.dtype | None) -> Tensor:
    return local.sum(dtype=dtype)


def _squares(local: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.linalg.vector_norm(local, dtype=dtype) ** 2


_aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([_aten.copy_, _aten.zero_, _aten.fill_, _aten._to_copy, _aten.detach, _aten.alias, _aten.zeros_like,
                     _aten.ones_like, _aten.empty_like, _aten.full_like], _on_entries),
    **dict.fromkeys([_aten.view, _aten._unsafe_view, _aten.squeeze, _aten.unsqueeze, _aten.expand], _with_shape),
    _aten.split_with_sizes: _split,
    _aten.slice: _slice,
    _aten.cat: _cat,
    _aten.sort: _sort,
    _aten.sum: _reduction(_sum, "SUM"),
    _aten.mean: _reduction(_sum, "SUM", lambda total, size: total / size),
    _aten.linalg_vector_norm: _reduction(_squares, "SUM", lambda total, _: total.sqrt()),
    _aten.amax: _reduction(_extreme(True), "MAX"),
    _aten.amin: _reduction(_extreme(False), "MIN"),
    _aten.all: _reduction(lambda local, _: local.all().to(torch.uint8), "MIN", lambda value, _: value.bool()),
    _aten.any: _reduction(lambda local, _: local.any().to(torch.uint8), "MAX", lambda value, _: value.bool()),
}  # fmt: skip
"""What the operations do that are not on entries."""
