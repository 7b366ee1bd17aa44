"""Loops for a rule that orthogonalises: one batch of matrices after another, so that a step needs little memory.

Such a rule has two methods besides ``update``, both elementwise: ``momentum(state, grad, delay)`` gives what is
orthogonalised, ``advance(state, grad, delay, direction)`` the next state, for a vector of matrices from the steps along
them and for a vector without matrices from nothing more. A call runs, for every batch of matrices of one shape, the
loops of ``momentum``, the matrix products, and the loops of ``advance``; then those of ``advance`` for all other
tensors; and last it writes the scalars, which all of them have read. Of sharded tensors the loops run on what a rank
has, and the matrices of a batch are divided among the ranks, each with some of about the same work.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lategrad.execution.backend import UnsupportedError
from lategrad.execution.codegen.run import Address, Loops
from lategrad.rules._orthogonalize import matrix_batches, matrix_step, matrix_steps
from lategrad.rules.blocks import Block, Blocks
from lategrad.rules.rule import AnyRule, needs_ticket
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.sharded_vector import ShardedVector, Shards, local_of

_SHARE, _SHARE_ON_GPU = 16, 9  # of all entries in a batch: with copies a third of a vector at most; a GPU makes fewer
_SHARE_ON_SHARDS = 24  # of what a rank has: there are copies to send, too
_LEAST = 2**20  # entries of a batch that are not worth dividing


def is_staged(rule: AnyRule[Any]) -> bool:
    """Whether a rule has shapes and the two methods."""
    return getattr(rule, "blocks", None) is not None and hasattr(rule, "momentum") and hasattr(rule, "advance")


class StagedLoops(Loops):
    """A rule's update with the operands of :func:`lategrad.execution.codegen.run.update_loops`."""

    def __init__(
        self, rule: AnyRule[Any], grad_dtype: torch.dtype, sizes: Sequence[int], device: torch.device,
        query_dtype: torch.dtype | None, maximize: bool, shards: Shards | None = None,
    ) -> None:  # fmt: skip
        if not is_staged(rule) or needs_ticket(rule):
            raise UnsupportedError(f"{type(rule).__name__} looks at shapes")
        blocks: Blocks = getattr(rule, "blocks")  # noqa: B009  # the contract does not have it
        self._rule, self._grad_dtype, self._device, self._maximize = rule, grad_dtype, device, maximize
        self._blocks, self._shards, self._size = blocks, shards, blocks.size
        self._sizes = [block.size for block in blocks.parts] if shards is None else list(sizes)
        if list(sizes) not in (self._sizes, [self._size]):
            raise UnsupportedError(f"tensors of {list(sizes)} entries for {blocks}")
        if any(leaf.numel() > 1 for leaf in tensors(rule)):
            raise UnsupportedError("a hyper-parameter that is a vector")
        self._first_leaf = len(tensors(rule)) + 1
        self._query_dtype = query_dtype
        others = [i for i, block in enumerate(blocks.parts) if not block.is_matrix]
        share = _SHARE_ON_SHARDS if shards is not None else _SHARE if device.type == "cpu" else _SHARE_ON_GPU
        ranks = len(shards.intervals) if shards else 1
        self._batches = matrix_batches(blocks, max(_LEAST, self._size // ranks // share), ranks)
        self._segments = list(itertools.pairwise(itertools.accumulate([0, *(block.size for block in blocks.parts)])))
        largest = max((self._entries(batch) for batch in self._batches), default=0)
        dtype = torch.promote_types(grad_dtype, torch.float32)
        self._buffer = torch.empty(largest, dtype=dtype, device=device)
        self._short = _short_leaves(rule, blocks, dtype) if self._batches else []
        self._programs: list[tuple[list[int], Loops]] = []
        if self._batches:
            example = max((blocks.parts[batch[0]] for batch in self._batches), key=lambda block: block.size)
            one = Blocks((Block("", example.matrix_shape, "matrix"),))  # not one of a single number
            momentum, advance = self._build(one, "momentum", dtype), self._build(one, "advance", dtype)
            for batch in self._batches:
                entries = [self._sizes[i] for i in batch]
                self._programs += [(batch, momentum.resized(entries)), (batch, advance.resized(entries))]
        if others:
            plain = self._build(_without_matrices(2), "advance", dtype)
            self._programs.append((others, plain.resized([self._sizes[i] for i in others])))
        scalars = self._build(_without_matrices(2), "scalars", dtype)
        self._programs.append(([0], scalars.resized(self._sizes[:1])))
        self._lengths = [loops.source.operands * (1 + len(places)) for places, loops in self._programs]

    def _entries(self, batch: list[int]) -> int:
        return sum(self._sizes[i] for i in batch)

    def _build(self, blocks: Blocks, stage: str, dtype: torch.dtype) -> Loops:
        """The loops of one stage for tensors of one kind; the matrices' step is the operand after the gradient."""
        rule: Any = dataclasses.replace(self._rule, blocks=blocks)  # type: ignore[type-var]
        template, maximize = _template(self._rule, blocks, dtype), self._maximize
        leaves = tensors(template)
        wanted = [(leaf.shape == (blocks.size,)) == (stage != "scalars") for leaf in leaves]
        along_matrix = stage == "advance" and blocks.parts[0].is_matrix
        writes_query = stage == "advance" and self._query_dtype is not None

        def function(*inputs: Tensor) -> list[Tensor]:
            remaining = iter(inputs)
            traced, delay = map_tensors(lambda _: next(remaining), rule), next(remaining)
            state = map_tensors(lambda _: next(remaining), template)
            grad = next(remaining).to(dtype)
            grad = -grad if maximize else grad
            if stage == "momentum":
                return [traced.momentum(state, grad, delay)]
            updated = traced.advance(state, grad, delay, *([next(remaining)] if along_matrix else []))
            results = [leaf for leaf, want in zip(tensors(updated), wanted, strict=True) if want]
            return [*results, traced.query(updated)] if writes_query else results

        forms = [leaf.dtype if leaf.shape == (blocks.size,) else torch.empty_like(leaf, device=self._device)
                 for leaf in leaves]  # fmt: skip
        inputs: list[Tensor | torch.dtype] = [*tensors(rule), torch.zeros(1, dtype=torch.int64, device=self._device),
                                              *forms, self._grad_dtype, *([dtype] if along_matrix else [])]  # fmt: skip
        if stage == "momentum":
            targets, beyond = [len(inputs)], [dtype]
        else:
            targets = [self._first_leaf + i for i, want in enumerate(wanted) if want]
            beyond = [self._query_dtype] if self._query_dtype is not None and writes_query else []
            targets += [len(inputs)] * len(beyond)
        loops = Loops(function, inputs, targets, beyond, [blocks.size], self._device)
        if loops.source.sums:
            raise UnsupportedError(f"{type(rule).__name__} takes sums over the vector")
        return loops

    def table(self, addresses: Sequence[Address]) -> list[int]:
        """The tables of all programs, one after another."""
        operands = list(addresses)
        query = [operands.pop()] if self._query_dtype is not None else []
        table: list[int] = []
        for number, (places, loops) in enumerate(self._programs):
            starts = [0, *itertools.accumulate(self._sizes[i] for i in places)][: len(places)]
            own = [one if isinstance(one, int) else [one[i] for i in places] for one in operands]
            if number < 2 * len(self._batches):
                own.append([self._buffer[start:].data_ptr() for start in starts])
            else:
                for i, size in self._short:
                    own[self._first_leaf + i] = [operands[self._first_leaf + i] + size * start for start in starts]  # type: ignore[operator]
            if len(own) < loops.source.operands:
                own += [one if isinstance(one, int) else [one[i] for i in places] for one in query]
            table += loops.table(own)
        return table

    def run(self, table: list[int]) -> None:
        """Run all stages on operands whose table is known."""
        begin = 0
        for number, ((places, loops), length) in enumerate(zip(self._programs, self._lengths, strict=True)):
            loops.run(table[begin : begin + length])
            begin += length
            if number % 2 == 0 and number < 2 * len(self._batches):
                self._orthogonalise(places)

    def _orthogonalise(self, places: list[int]) -> None:
        """Replace the matrices in the buffer by the steps along them."""
        entries = self._buffer[: self._entries(places)]
        if self._shards is None:
            first = self._blocks.parts[places[0]]
            matrices = entries.view(-1, *first.matrix_shape)
            matrix_step(matrices, first.kind == "tokens", out=matrices)
            return
        blocks = Blocks(tuple(self._blocks.parts[i] for i in places))
        parts = blocks.split(ShardedVector(entries, self._shards, tuple(self._segments[i] for i in places)))
        for part, step in zip(parts, matrix_steps(blocks, parts), strict=True):
            local_of(part).copy_(local_of(step))


def _template(rule: Any, blocks: Blocks, dtype: torch.dtype) -> Any:
    """The first state of the rule for some tensors, without memory."""
    meta_rule = map_tensors(lambda t: t.to("meta"), dataclasses.replace(rule, blocks=blocks))
    return meta_rule.init(torch.empty(blocks.size, dtype=dtype, device="meta"))


def _without_matrices(entries: int) -> Blocks:
    return Blocks((Block("", (entries,), "other"),))


def _short_leaves(rule: Any, blocks: Blocks, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The parts of the state that only entries outside matrices have: their positions and the bytes of an entry."""
    whole, plain = (tensors(_template(rule, b, dtype)) for b in (blocks, _without_matrices(2)))
    return [(i, a.dtype.itemsize) for i, (a, b) in enumerate(zip(whole, plain, strict=True))
            if b.shape == (2,) and a.shape != (blocks.size,)]  # fmt: skip


def staged_init(rule: Any, dtype: torch.dtype) -> Callable[[Sequence[Any]], None]:
    """The first state, piece by piece: a function of the rule's tensors, the parameters, and the state's parts."""
    blocks, short = rule.blocks, [i for i, _ in _short_leaves(rule, rule.blocks, dtype)]

    def init(operands: Sequence[Any]) -> None:
        params, *parts = operands[len(tensors(rule)) :]
        before = 0  # entries outside matrices so far
        for i, block in enumerate(blocks.parts):
            size = params[i].numel()  # less than the block's on a rank
            for begin in range(0, size, _LEAST):
                here = slice(begin, min(begin + _LEAST, size))
                entries = params[i].view(-1)[here]
                plain = dataclasses.replace(rule, blocks=_without_matrices(len(entries)))
                first = plain.init(entries.to(dtype, copy=True))
                for position, (part, leaf) in enumerate(zip(parts, tensors(first), strict=True)):
                    if position not in short:
                        (part if isinstance(part, Tensor) else part[i].view(-1)[here]).copy_(leaf)
                    elif not block.is_matrix:
                        part[before + here.start : before + here.stop].copy_(leaf)
                entries.copy_(plain.query(first))
            before += 0 if block.is_matrix else size

    return init
