"""Where each tensor of a model lies in the flat parameter vector, its shape and its kind."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lategrad.support.runs import per_run
from lategrad.support.validation import require

KINDS = ("matrix", "tokens", "embedding", "other")
"""Singular values mean something for a matrix, which maps vectors to vectors, but not for the rows of an embedding.
"tokens" is a matrix with a row for each token of a vocabulary, which Muon is not used for: a few frequent tokens have
most of its gradient, and so most of the orthogonal factor."""
UNDECIDED = "undecided"
"""The kind of a tensor whose module and shape do not tell; rules that use kinds refuse it."""
_VALID = ", ".join(map(repr, KINDS)) + " or, for several in one tensor, 'n matrices' such as '12 matrices'"

AnyRule = TypeVar("AnyRule")
Value = TypeVar("Value")
Kinds = str | Sequence[str] | Mapping[Any, str] | None
"""One kind for all tensors, one for each, or some of them by pattern of name or by module."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WITH_MATRICES = (nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_WITHOUT_MATRICES = (nn.LayerNorm, nn.RMSNorm)
_VOCABULARY, _TALL = 1_000, 6
"""The number of rows, in all and for each column, from which a matrix is taken to have a row for each token."""


@dataclass(frozen=True)
class Block:
    """One tensor of a model.

    Args:
        name: of the parameter.
        shape: of the tensor.
        label: its kind, "matrix", "tokens", "embedding" or "other"; or "n matrices" that lie one after another in it,
            such as attention heads in the rows of a projection or experts in the first dimension.

    >>> Block("query.weight", (12, 8), "3 matrices").matrix_shape  # three heads
    (3, 4, 8)
    >>> Block("experts", (5, 4, 8), "5 matrices").matrix_shape
    (5, 4, 8)
    >>> Block("convolution.weight", (6, 4, 3, 3), "matrix").matrix_shape
    (6, 36)
    """

    name: str
    shape: tuple[int, ...]
    label: str

    def __post_init__(self) -> None:
        require(f"kind of {self.name!r}", self.label, self.kind in (*KINDS, UNDECIDED), _VALID)
        if self.is_matrix and self.size:
            fits = len(self.shape) >= 2 and self.count != 0 and math.prod(self.matrix_shape) == self.size
            require(f"kind of {self.name!r}", self.label, fits, f"one that its shape {self.shape} allows: a matrix has "
                    f"two dimensions, n matrices divide the first dimension or make up several")  # fmt: skip

    @property
    def count(self) -> int | None:
        """The number of matrices, if it is not one that fills the tensor."""
        stacked = re.fullmatch(r"(\d+) matrices", str(self.label))
        return int(stacked[1]) if stacked else None

    @property
    def kind(self) -> str:
        return self.label if self.count is None else "matrix"

    @property
    def is_matrix(self) -> bool:
        return self.kind in ("matrix", "tokens")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Rows and columns, after the count of several matrices; a convolution has a row for every output channel."""
        first, second, *rest = self.shape
        if self.count is None:
            return first, math.prod(self.shape[1:])
        if rest and self.count % first == 0:  # the first dimension counts matrices, each with rows of its own
            return self.count, first * second // self.count, math.prod(rest)
        return self.count, first // self.count, math.prod(self.shape[1:])


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
    def of_module(cls, module: nn.Module, kinds: Mapping[str | nn.Module, str] | None = None) -> "Blocks":
        """The trainable parameters of a module, in its order.

        Modules of torch say what their tensors are: embeddings (also where another layer shares their weight), linear,
        recurrent and attention layers, convolutions (one matrix for each of their groups), normalisation. A linear
        layer with at least 1,000 outputs and 6 times as many as inputs is "tokens", the last layer of a language model.
        Other tensors are judged by their shape, as in :meth:`of_tensors`.

        Args:
            module: the model.
            kinds: what some parameters are, by pattern of their name or by submodule: "matrix", "tokens", "embedding",
                "other", or "n matrices". The first key that matches counts, and every key must match.

        >>> attention = nn.MultiheadAttention(8, num_heads=2)
        >>> print(Blocks.of_module(attention, {"in_proj_weight": "6 matrices", attention.out_proj: "other"}).table())
        name             shape   taken as
        in_proj_weight   24 x 8  6 matrices of 4 x 8
        in_proj_bias     24      other
        out_proj.weight  8 x 8   other
        out_proj.bias    8       other
        """
        names: dict[Tensor, list[str]] = {}
        found: dict[Tensor, list[str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for name, p in part.named_parameters(path, recurse=False):
                names.setdefault(p, []).append(name)
                found.setdefault(p, []).append(_kind_in(part, name.rpartition(".")[2], p))
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        told = first_matches("kinds", kinds or {}, [(p, names[p]) for _, p in trained])
        labels = ["embedding" if "embedding" in found[p] else found[p][0] for _, p in trained]
        return cls(tuple(Block(name, tuple(p.shape), label if said is None else said)
                         for (name, p), said, label in zip(trained, told, labels, strict=True)))  # fmt: skip

    @classmethod
    def of_tensors(cls, tensors: Iterable[Tensor], kinds: Kinds = None, names: Sequence[str] | None = None) -> "Blocks":
        """Tensors without their modules: matrices where the shape leaves little doubt, unless ``kinds`` tells.

        These are tensors of two dimensions, and of four and more (convolutions), with at least two rows and columns. A
        row or a column may be a vector, three dimensions a convolution or a stack of matrices: they stay undecided.
        With at least 1,000 rows and 6 times as many as columns they are "other", as they may be an embedding.
        """
        tensors = list(tensors)
        told: Sequence[str | None] = [None] * len(tensors)
        if isinstance(kinds, Mapping):
            remedy = "one kind, or a list, for parameters without names: pass the module, or its named_parameters()"
            require("kinds", kinds, names is not None, remedy)
            told = first_matches("kinds", kinds, [(p, [name]) for p, name in zip(tensors, names or (), strict=True)])
        elif kinds is not None:
            told = [kinds] * len(tensors) if isinstance(kinds, str) else kinds
            require("kinds", kinds, len(told) == len(tensors), f"one kind, or {len(tensors)}, one for each parameter")
        names = names or [str(i) for i in range(len(tensors))]
        return cls(tuple(Block(name, tuple(p.shape), kind_of(p) if said is None else said)
                         for name, p, said in zip(names, tensors, told, strict=True)))  # fmt: skip

    def without_tokens(self) -> "Blocks":
        """The same for a rule that does not orthogonalise matrices with a row for each token."""
        return Blocks(tuple(dataclasses.replace(block, label="other") if block.kind == "tokens" else block
                            for block in self.parts))  # fmt: skip

    @property
    def labels(self) -> list[str]:
        """The kind of each tensor, as ``kinds`` takes them."""
        return [block.label for block in self.parts]

    def require_decided(self) -> "Blocks":
        """Itself; raises a ``ValueError`` if the kind of some tensor is not known."""
        open_ = [block for block in self.parts if block.kind == UNDECIDED and block.size]
        if open_:
            listed = ", ".join(f"{block.name!r} {block.shape}" for block in open_)
            raise ValueError(
                f"is it a matrix? Neither a known module nor the shape tells for the parameters {listed}. Say it with "
                f"kinds=, such as {{{open_[0].name!r}: 'other'}} (a list with one for each where they have no names): "
                f"{_VALID}, stacked in the first dimension. Those of torch's layers are known if the module is passed."
            )
        return self

    def table(self) -> str:
        """How every tensor is taken, as text with a line for each."""
        rows = [("name", "shape", "taken as")]
        for block in self.parts:
            parts = " x ".join(map(str, block.matrix_shape[-2:])) if block.kind == "matrix" else ""
            rows.append((block.name, " x ".join(map(str, block.shape)) or "scalar",
                         f"{block.label} of {parts}" if parts else block.kind))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{name:{widths[0]}}  {shape:{widths[1]}}  {kind}" for name, shape, kind in rows)

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
        counts = [(kind, sum(block.kind == kind for block in self.parts)) for kind in (*KINDS, UNDECIDED)]
        return f"Blocks({', '.join(f'{count} {kind}' for kind, count in counts if count)}; {self.size} entries)"


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor, judged by its shape alone; "undecided" where that does not tell."""
    if tensor.dim() < 2:
        return "other"
    if tensor.dim() == 3 or min(tensor.shape[:2]) == 1:
        return UNDECIDED
    return "other" if _is_of_tokens(tensor) else "matrix"


def _is_of_tokens(tensor: Tensor) -> bool:
    """Whether a tensor is tall enough for its rows to be the tokens of a vocabulary."""
    return tensor.dim() == 2 and len(tensor) >= max(_VOCABULARY, _TALL * tensor.shape[1])


def _kind_in(module: nn.Module, name: str, p: Tensor) -> str:
    """The kind of a parameter of that name in the module that holds it."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if p.dim() < 2 or isinstance(module, _WITHOUT_MATRICES) or name in ("bias_k", "bias_v"):
        return "other"
    if isinstance(module, nn.Linear) and _is_of_tokens(p):
        return "tokens"
    if isinstance(module, _CONVOLUTIONS):
        return f"{module.groups} matrices" if module.groups > 1 else "matrix"
    return "matrix" if isinstance(module, _WITH_MATRICES) else kind_of(p)


def first_matches(
    what: str, patterns: Mapping[Any, Value], named: Sequence[tuple[Tensor | None, Sequence[str]]]
) -> list[Value | None]:
    """The value of the first pattern that matches each parameter; None where none does.

    Args:
        what: the argument that messages are about.
        patterns: values by pattern of names, or by module; each must match.
        named: the parameters, each with all its names.
    """
    values: list[Value | None] = [None] * len(named)
    for pattern, value in patterns.items():
        require(f"each pattern of {what}", pattern, isinstance(pattern, str | nn.Module), "a text or a module")
        require(f"{what}[{pattern!r}]", value, value is not None, "given")
        own = set(pattern.parameters()) if isinstance(pattern, nn.Module) else set()
        matching = [i for i, (p, names) in enumerate(named) if p in own or (isinstance(pattern, str) and any(
                    fnmatchcase(name, pattern) for name in names))]  # fmt: skip
        require(f"each pattern of {what}", pattern, len(matching) > 0,
                f"one that matches a parameter: {', '.join(name for _, names in named for name in names)}")  # fmt: skip
        for i in matching:
            values[i] = value if values[i] is None else values[i]
    return values


def fill_in(rule: AnyRule, blocks: Blocks | None, field: str = "blocks") -> AnyRule:
    """The rule with its host's blocks, if it takes blocks and has none of its own; raises if a kind is undecided.

    The ``field`` may also be "delay_blocks", which says that each block has its own delay.

    >>> fill_in("a rule without blocks", Blocks(()))
    'a rule without blocks'
    """
    if blocks is None or getattr(rule, field, blocks) is not None:
        return rule
    if field == "blocks":
        blocks.require_decided()
    inside = getattr(rule, "with_blocks", None)  # of a rule that wraps another
    filled: Any = inside(blocks, field) if inside else dataclasses.replace(rule, **{field: blocks})  # type: ignore[type-var]
    return filled  # type: ignore[no-any-return]


def fill_in_delays(rule: AnyRule, blocks: Blocks) -> AnyRule:
    """The rule with its host's blocks as those that have their own delays, if it can use them."""
    rule = fill_in(rule, blocks, "delay_blocks")
    own = getattr(rule, "delay_blocks", None) or blocks
    same = [block.size for block in own.parts] == [block.size for block in blocks.parts]
    require("delay_blocks", own, same, f"None, or tensors of the sizes of {blocks}: each of those has a delay")
    return rule


def start_delays(blocks: Blocks | None, x: Tensor) -> Tensor:
    """Zeros in float64, for the state of a rule: ``(*runs, blocks)``, or ``(*runs, 1)`` without blocks."""
    if blocks is None:
        return per_run(x, 0)
    require("delay_blocks", blocks, blocks.size == x.shape[-1], f"of the {x.shape[-1]} entries of the vector")
    return per_run(x, 0).repeat_interleave(len(blocks.parts), -1)


def per_entry(blocks: Blocks | None, values: Tensor, like: Tensor) -> Tensor:
    """Values ``(*runs, blocks)`` with one for each entry of ``like``; those of ``(*runs, 1)`` stay as they are.

    >>> per_entry(Blocks.of_tensors([torch.zeros(2), torch.zeros(1)]), torch.tensor([5.0, 7.0]), torch.zeros(3))
    tensor([5., 5., 7.])
    """
    count = values.shape[-1]
    if count == 1:
        return values
    parts = () if blocks is None else blocks.parts
    require("delay", f"{count} numbers", count == len(parts), f"one, or one for each of {len(parts)} delay_blocks")
    pieces = like.split([block.size for block in parts], dim=-1)  # which a vector that is sharded over ranks has, too
    spread = [torch.zeros_like(piece, dtype=values.dtype) + value
              for piece, value in zip(pieces, values.split(1, dim=-1), strict=True)]  # fmt: skip
    return torch.cat(spread, dim=-1)
