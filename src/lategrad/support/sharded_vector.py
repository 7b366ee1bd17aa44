"""A vector whose entries lie on several ranks, on which rules and constraint sets run as they are.

A rule is written for one flat vector: entry by entry, with reductions over the last dimension. :class:`ShardedVector`
is a tensor with the shape of the whole vector and the memory of this rank's entries. Operations on entries run on
them; reductions are summed over the ranks and give a plain tensor, the same on every rank. Everything else raises
:class:`NotShardedError`: a rule that does not fit fails, and never computes a norm of one rank's entries.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import WrapperTensor

Interval = tuple[int, int]  # start and stop of consecutive entries


class NotShardedError(RuntimeError):
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
        self._counts = [[0, *accumulate(stop - start for start, stop in own)] for own in intervals]
        self.size: int = sum(counts[-1] for counts in self._counts)

    def count(self, segments: Iterable[Interval], rank: int | None = None) -> int:
        """The number of entries that a rank, by default this one, has in some segments."""
        rank = self.rank if rank is None else rank

        def below(position: int) -> int:
            i = bisect_right(self.intervals[rank], (position, self.size)) - 1
            start, stop = self.intervals[rank][i] if i >= 0 else (position, position)
            return self._counts[rank][max(i, 0)] + min(position, stop) - start

        return sum(below(stop) - below(start) for start, stop in segments)

    def vector(self, local: Tensor) -> "ShardedVector":
        """The vector of which this rank's entries are ``local``."""
        if local.shape != (self._counts[self.rank][-1],):
            raise ValueError(f"this rank has {self._counts[self.rank][-1]} entries, got {tuple(local.shape)}")
        return ShardedVector(local, self, ((0, self.size),))

    def scatter(self, whole: Tensor) -> "ShardedVector":
        """The shards of a vector that every rank has as a whole."""
        return self.vector(torch.cat([whole[:0], *(whole[start:stop] for start, stop in self.intervals[self.rank])]))

    def reduce(self, value: Tensor, op: str) -> Tensor:
        """A value of each rank, reduced over the ranks: "SUM", "MIN" or "MAX"; it is overwritten."""
        if self.group is not None and not value.is_meta:
            import torch.distributed as dist

            dist.all_reduce(value, getattr(dist.ReduceOp, op), group=self.group)
        return value


class ShardedVector(WrapperTensor):
    """A vector, or a part or reshaped part of one: those entries of the whole that are in ``segments``.

    ``local`` are this rank's entries, flat; ``shards`` are those of the whole vector.
    """

    local: Tensor
    shards: Shards
    segments: tuple[Interval, ...]

    @staticmethod
    def __new__(
        cls: "type[ShardedVector]", local: Tensor, shards: Shards, segments: tuple[Interval, ...],
        shape: Sequence[int] | None = None,
    ) -> "ShardedVector":  # fmt: skip
        size = sum(stop - start for start, stop in segments)
        vector: ShardedVector = cls.allocate((size,) if shape is None else shape, local)
        vector.local, vector.shards, vector.segments = local, shards, segments
        return vector

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedVector({tuple(self.shape)}, here {self.local!r})"

    def like(self, local: Tensor, shape: Sequence[int] | None = None) -> "ShardedVector":
        """Other values of the same entries."""
        if local.shape != self.local.shape:
            raise NotShardedError(f"an operation on entries gave {tuple(local.shape)} of {tuple(self.local.shape)}")
        return ShardedVector(local, self.shards, self.segments, self.shape if shape is None else shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        run: Any = _OPERATIONS.get(func.overloadpacket, _on_entries if pointwise else _refuse)
        return run(func, *args, **(kwargs or {}))


def local_of(vector: Tensor) -> Tensor:
    return vector.local if isinstance(vector, ShardedVector) else vector


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise; where one process has the whole vector, run on plain tensors."""
    if any(arg.shards.group is not None for arg in tensors((args, kwargs)) if isinstance(arg, ShardedVector)):
        raise NotShardedError(f"{func} with these arguments is not defined on a vector that is sharded over ranks. "
                              f"Rules and constraint sets may use operations on entries, with other sharded vectors "
                              f"and with single numbers; split, cat and sort; and sum, mean, Euclidean norm, amax, "
                              f"amin, all and any over the vector")  # fmt: skip
    args, kwargs = map_tensors(lambda x: x.local.view(x.shape) if isinstance(x, ShardedVector) else x, (args, kwargs))
    return func(*args, **kwargs)


def _on_entries(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on each entry, with numbers and tensors of one number, which are the same on every rank."""
    operands = tensors((args, kwargs))
    first = next(arg for arg in operands if isinstance(arg, ShardedVector))
    in_place = func.overloadpacket.__name__.endswith("_")
    for arg in operands:
        same = isinstance(arg, ShardedVector) and (arg.segments, arg.shape) == (first.segments, first.shape)
        if not same and (isinstance(arg, ShardedVector) or arg.numel() != 1 or (in_place and arg is args[0])):
            return _refuse(func, *args, **kwargs)

    def local(arg: Tensor) -> Tensor:
        if isinstance(arg, ShardedVector):
            return arg.local
        return arg.reshape(1) if arg.dim() else arg  # a tensor without dimensions has a weaker dtype

    local_args, local_kwargs = map_tensors(local, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    return args[0] if in_place else first.like(result)


def _with_shape(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    return x.like(x.local, shape) if math.prod(shape) == x.numel() else _refuse(func, x, *args, **kwargs)


def _is_flat(x: Any, dim: Any) -> bool:
    return isinstance(x, ShardedVector) and x.dim() == 1 and dim in (None, 0, -1, (), [], [0], [-1])


def _split(func: Any, x: ShardedVector, sizes: Sequence[int], dim: int = 0) -> Any:
    """Consecutive parts of a vector, as views."""
    if not _is_flat(x, dim):
        return _refuse(func, x, sizes, dim)
    parts: list[tuple[Interval, ...]] = []
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
        parts.append(tuple(part))
    pieces = x.local.split([x.shards.count(segments) for segments in parts])
    return [ShardedVector(piece, x.shards, segments) for piece, segments in zip(pieces, parts, strict=True)]


def _slice(func: Any, x: ShardedVector, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if not _is_flat(x, dim) or step != 1:
        return _refuse(func, x, dim, start, end, step)
    start, end, _ = slice(start, end).indices(x.numel())
    return _split(func, x, [start, max(0, end - start), x.numel() - max(start, end)])[1]


def _cat(func: Any, parts: Sequence[Any], dim: int = 0) -> Any:
    if not all(_is_flat(part, dim) for part in parts):
        return _refuse(func, parts, dim)
    segments: list[Interval] = []
    for start, stop in (segment for part in parts for segment in part.segments):
        if segments and segments[-1][1] == start:
            start = segments.pop()[0]
        segments.append((start, stop))
    return ShardedVector(torch.cat([part.local for part in parts]), parts[0].shards, tuple(segments))


def _sort(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
    """The sorted values as a plain vector on every rank; without indices, which would be those of another order."""
    if x.dim() != 1 or x.shards.group is None:
        return _refuse(func, x, *args, **kwargs)
    counts = [x.shards.count(x.segments, rank) for rank in range(len(x.shards.intervals))]
    gathered = [x.local.new_empty(max(counts)) for _ in counts]  # gloo gathers equal sizes only
    if not x.local.is_meta:
        import torch.distributed as dist

        padded = torch.nn.functional.pad(x.local, (0, max(counts) - x.local.numel()))
        dist.all_gather(gathered, padded, group=x.shards.group)
    whole = torch.cat([entries[:count] for entries, count in zip(gathered, counts, strict=True)])
    values, indices = func(whole, *args, **kwargs)
    return values, indices[:0]


# ---- Reductions over the vector, to one number that is the same on every rank


def _norm(x: ShardedVector, dtype: torch.dtype | None) -> Tensor:
    own = torch.linalg.vector_norm(x.local, dtype=dtype)
    return x.shards.reduce(own.double() ** 2, "SUM").sqrt().to(own.dtype)


def _largest(x: ShardedVector, sign: int) -> Tensor:
    """The largest entry, or the smallest for sign -1; a rank without entries has none."""
    entries = torch.cat([sign * x.local, x.local.new_full((1,), -math.inf)])
    return sign * x.shards.reduce(entries.amax(), "MAX")


_aten = torch.ops.aten
_REDUCTIONS: dict[Any, Callable[[ShardedVector, Any], Tensor]] = {
    _aten.sum: lambda x, dtype: x.shards.reduce(x.local.sum(dtype=dtype), "SUM"),
    _aten.mean: lambda x, dtype: x.shards.reduce(x.local.sum(dtype=dtype), "SUM") / x.numel(),
    _aten.linalg_vector_norm: _norm,
    _aten.amax: lambda x, _: _largest(x, 1),
    _aten.amin: lambda x, _: _largest(x, -1),
    _aten.all: lambda x, _: x.shards.reduce(x.local.all().int(), "MIN").bool(),
    _aten.any: lambda x, _: x.shards.reduce(x.local.any().int(), "MAX").bool(),
}


def _reduce(func: Any, x: ShardedVector, *args: Any, **kwargs: Any) -> Any:
    is_norm = func.overloadpacket is _aten.linalg_vector_norm
    dim, keepdim = (*args[is_norm:], None, None)[:2]
    if not _is_flat(x, dim) or (is_norm and args[:1] not in ((), (2,))):
        return _refuse(func, x, *args, **kwargs)
    return _REDUCTIONS[func.overloadpacket](x, kwargs.get("dtype")).reshape(1 if keepdim else ())


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([_aten.copy_, _aten.zero_, _aten.fill_, _aten._to_copy, _aten.detach, _aten.alias, _aten.zeros_like,
                     _aten.ones_like, _aten.empty_like, _aten.full_like], _on_entries),
    **dict.fromkeys([_aten.view, _aten._unsafe_view, _aten.squeeze, _aten.unsqueeze, _aten.expand], _with_shape),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    _aten.split_with_sizes: _split, _aten.slice: _slice, _aten.cat: _cat, _aten.sort: _sort,
}  # fmt: skip
"""The operations that torch does not mark as pointwise."""
