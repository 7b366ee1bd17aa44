"""One vector that lies in many tensors, so that a rule can be run on a model's parameters where they are.

A rule works on a vector of shape ``(d,)``; a model keeps its parameters in many tensors. :class:`Pieces` is a
tensor of shape ``(d,)`` that holds such tensors. What works entry by entry is done tensor by tensor, norms
and sums are combined, and everything else (sorting, slicing) is done on the concatenated vector. So a rule's
own ``update`` runs unchanged, and only what needs the whole vector at once makes a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten


def is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill their memory without gaps, in some order of the dimensions."""
    return tensor.permute(memory_order(tensor)).is_contiguous()


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest; 0, 1, 2, ... when contiguous."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda i: (-strides[i], i)))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the entries of a vector lie: the vector is its tensors, flattened row by row, one after another.

    A block is what is handled at once: one tensor where it is, its entries in memory order, or a copy of
    several tensors, one after another. Copies cost bandwidth and blocks cost compilation time.
    """

    shapes: tuple[torch.Size, ...]
    orders: tuple[tuple[int, ...], ...]
    """The memory order of each tensor."""
    blocks: tuple[tuple[int, ...], ...]
    """The tensors of each block."""
    packed: tuple[bool, ...]
    """Whether each block is a copy."""

    @staticmethod
    def of(tensors: Sequence[Tensor], most_blocks: int, smallest: int = 0) -> Layout:
        """Tensors of at least ``smallest`` entries lie where they are, the others share one block.

        The smallest of more than ``most_blocks`` do, too, and those with gaps in their memory.
        """
        by_size = sorted(range(len(tensors)), key=lambda i: -tensors[i].numel())
        alone = [i for i in by_size if tensors[i].numel() >= smallest and is_dense(tensors[i])]
        if not len(alone) == len(tensors) <= most_blocks:
            alone = alone[: most_blocks - 1]
        rest = sorted(set(by_size) - set(alone))
        return Layout(
            shapes=tuple(t.shape for t in tensors),
            orders=tuple(memory_order(t) for t in tensors),
            blocks=(*((i,) for i in sorted(alone)), *([tuple(rest)] if rest else [])),
            packed=(*(False for _ in alone), *([True] if rest else [])),
        )

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """The dimension of the vector."""
        return sum(self.sizes)

    def flat(self, block: int, tensor: Tensor) -> Tensor:
        """A block, given as its one tensor or as its copy, as a vector in the same memory."""
        if self.packed[block]:
            return tensor
        return tensor.permute(self.orders[self.blocks[block][0]]).view(-1)

    def split(self, vector: Tensor) -> list[Tensor]:
        """The entries of each block."""
        parts = vector.split(self.sizes)
        if len(parts) == 1 and not self.packed[0]:
            return [self._in_memory_order(0, parts[0])]
        return [
            torch.cat([parts[i] for i in members]) if packed else self._in_memory_order(members[0], parts[members[0]])
            for members, packed in zip(self.blocks, self.packed, strict=True)
        ]

    def parts(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The values of each tensor, in its shape."""
        parts: dict[int, Tensor] = {}
        for members, packed, block in zip(self.blocks, self.packed, blocks, strict=True):
            for i, part in zip(members, block.split([self.sizes[i] for i in members]), strict=True):
                parts[i] = part.view(self.shapes[i]) if packed else self._from_memory_order(i, part)
        return [parts[i] for i in range(len(self.shapes))]

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """The vector."""
        return torch.cat([part.reshape(-1) for part in self.parts(blocks)])

    def _in_memory_order(self, i: int, part: Tensor) -> Tensor:
        return part.view(self.shapes[i]).permute(self.orders[i]).reshape(-1)

    def _from_memory_order(self, i: int, part: Tensor) -> Tensor:
        order = self.orders[i]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return part.view([self.shapes[i][k] for k in order]).permute(inverse)


_COPIES = {
    _aten._to_copy.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}
"""Entry by entry too, though torch does not tag them as such."""

_REDUCTIONS = {
    _aten.all.dim,
    _aten.amax.default,
    _aten.amin.default,
    _aten.any.dim,
    _aten.linalg_vector_norm.default,
    _aten.sum.dim_IntList,
}
"""Reductions of a vector that are the same reduction of the reductions of its parts."""


class Pieces(Tensor):
    """A vector of shape ``(d,)`` whose entries lie in several tensors.

    >>> tensors = [torch.tensor([[3.0]]), torch.tensor([4.0, 0.0])]
    >>> layout = Layout.of(tensors, most_blocks=2)
    >>> x = Pieces([layout.flat(i, t) for i, t in enumerate(tensors)], layout)
    >>> x.shape, torch.linalg.vector_norm(x)
    (torch.Size([3]), tensor(5.))
    >>> (2 * x + torch.tensor([0.0, 0.0, 1.0])).blocks
    [tensor([6.]), tensor([8., 1.])]
    """

    blocks: list[Tensor]
    place: Layout

    @staticmethod
    def __new__(cls, blocks: Sequence[Tensor], layout: Layout) -> Pieces:
        """A tensor without memory of its own."""
        pieces: Pieces = torch.Tensor._make_wrapper_subclass(
            cls, (layout.size,), dtype=blocks[0].dtype, device=blocks[0].device
        )
        return pieces

    def __init__(self, blocks: Sequence[Tensor], layout: Layout) -> None:
        super().__init__()
        self.blocks, self.place = list(blocks), layout

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pieces({self.blocks})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        layout = next(leaf.place for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Pieces))
        if func is _aten.copy_.default:
            for target, source in zip(args[0].blocks, blocks_of(args[1], layout), strict=True):
                target.copy_(source)
            return args[0]
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would change a vector in place; rules are pure")
        if func in _COPIES or torch.Tag.pointwise in func.tags:
            return _entry_by_entry(func, layout, args, kwargs)
        if func in _REDUCTIONS and isinstance(args[0], Pieces):
            of_blocks = [func(block, *_with_dim_kept(func, args[1:]), **kwargs) for block in args[0].blocks]
            return func(torch.cat(of_blocks), *args[1:], **kwargs)
        return func(*tree_map(joined, args), **tree_map(joined, kwargs))


def _with_dim_kept(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments of a reduction after its first, with ``keepdim`` set."""
    names = [argument.name for argument in func._schema.arguments if not argument.kwarg_only][1:]
    filled = [argument.default_value for argument in func._schema.arguments if not argument.kwarg_only][1:]
    filled[: len(args)] = args
    filled[names.index("keepdim")] = True
    return filled


def joined(value: Any) -> Any:
    """The concatenated vector, where the value is one in pieces."""
    return value.place.join(value.blocks) if isinstance(value, Pieces) else value


def blocks_of(value: Tensor, layout: Layout) -> list[Tensor]:
    """The blocks of a vector of either kind."""
    return value.blocks if isinstance(value, Pieces) else layout.split(value)


def _entry_by_entry(func: Any, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pieces:
    def of_block(value: Any) -> Callable[[int], Any]:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == layout.size:
            blocks = blocks_of(value, layout)
            return lambda i: blocks[i]
        return lambda i: value  # a number for all entries

    on = [of_block(a) for a in args]
    named = {name: of_block(a) for name, a in kwargs.items()}
    count = range(len(layout.blocks))
    results = [func(*(get(i) for get in on), **{name: get(i) for name, get in named.items()}) for i in count]
    return Pieces(results, layout)
