"""Where each tensor of a model lies in the flat parameter vector, its shape and its kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lategrad.support.validation import require_choice

KINDS = ("matrix", "embedding", "other")
"""Singular values mean something for a matrix, which maps vectors to vectors, but not for the rows of an embedding."""

AnyRule = TypeVar("AnyRule")


@dataclass(frozen=True)
class Block:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    kind: str

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns; a convolution has a row for every output channel."""
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True)
class Blocks:
    """The tensors that a vector of shape ``(*runs, d)`` consists of, one after another.

    A rule that needs shapes has a field ``blocks: Blocks | None = None``, which its host fills in.

    >>> blocks = Blocks.of_module(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)))
    >>> [(block.name, block.shape, block.kind) for block in blocks.parts]
    [('0.weight', (5, 3), 'embedding'), ('1.weight', (2, 3), 'matrix'), ('1.bias', (2,), 'other')]
    >>> blocks.size
    23
    >>> [part.shape for part in blocks.split(torch.zeros(7, 23))]
    [torch.Size([7, 5, 3]), torch.Size([7, 2, 3]), torch.Size([7, 2])]
    """

    parts: tuple[Block, ...]

    @classmethod
    def of_module(cls, module: nn.Module) -> Blocks:
        """The trainable parameters of a module, in its order."""
        embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        named = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        return cls(tuple(Block(name, tuple(p.shape), "embedding" if id(p) in embeddings else kind_of(p))
                         for name, p in named))  # fmt: skip

    @classmethod
    def of_tensors(cls, tensors: Iterable[Tensor], kinds: Sequence[str] | None = None) -> Blocks:
        """Tensors without names: those with two dimensions and more are matrices unless ``kinds`` says otherwise."""
        tensors = list(tensors)
        pairs = zip(tensors, kinds or [kind_of(tensor) for tensor in tensors], strict=True)
        return cls(tuple(Block(str(i), tuple(tensor.shape), kind) for i, (tensor, kind) in enumerate(pairs)))

    @property
    def size(self) -> int:
        return sum(block.size for block in self.parts)

    def split(self, x: Tensor) -> list[Tensor]:
        """The tensors as views, each ``(*runs, *shape)``."""
        pieces = x.split([block.size for block in self.parts], dim=-1)
        return [piece.unflatten(-1, block.shape) if block.shape else piece.squeeze(-1)
                for piece, block in zip(pieces, self.parts, strict=True)]  # fmt: skip

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The vector of tensors of shape ``(*runs, *shape)``: the inverse of :meth:`split`."""
        flat = [part.flatten(part.dim() - len(block.shape)) if block.shape else part.unsqueeze(-1)
                for part, block in zip(parts, self.parts, strict=True)]  # fmt: skip
        return torch.cat(flat, dim=-1)

    def __repr__(self) -> str:
        counts = [(kind, sum(block.kind == kind for block in self.parts)) for kind in KINDS]
        return f"Blocks({', '.join(f'{count} {kind}' for kind, count in counts if count)}; {self.size} entries)"


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor, judged by its shape alone."""
    return "matrix" if tensor.dim() >= 2 else "other"


def fill_in(rule: AnyRule, blocks: Blocks | None) -> AnyRule:
    """The rule with its host's blocks, if it takes blocks and has none of its own.

    >>> fill_in("a rule without blocks", Blocks(()))
    'a rule without blocks'
    """
    if blocks is None or getattr(rule, "blocks", blocks) is not None:
        return rule
    inside = getattr(rule, "with_blocks", None)  # of a rule that wraps another
    filled: Any = inside(blocks) if inside else dataclasses.replace(rule, blocks=blocks)  # type: ignore[type-var]
    return filled  # type: ignore[no-any-return]
