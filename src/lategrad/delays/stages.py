"""Delays by stage: in a pipeline each stage of a model is late by its own number of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from lategrad.delays.base import require_count
from lategrad.rules.blocks import Blocks
from lategrad.support.validation import require


class HasBlocks(Protocol):
    """A problem that knows the tensors of its vector."""

    @property
    def blocks(self) -> Blocks:
        """Where each of them lies."""
        ...


@dataclass(frozen=True, eq=False)
class StageDelays:
    r"""A constant delay for every tensor of a model; :func:`by_stage` makes one.

    Update t gets one gradient, of all tensors together, at a point whose tensors have different ages: tensor b is
    that of :math:`x_{\max(1, t - \tau_b)}`. That is an asynchronous pipeline with one update for each microbatch and
    stashed weights: a microbatch meets each stage at the version that the stage had when it came by, and goes back
    through the same versions.
    """

    blocks: Blocks
    delays: tuple[int, ...]
    r""":math:`\tau_b` of each tensor, in the order of ``blocks``."""
    stashing: bool = True
    """False: the way back sees the newest version of each stage, not the one that the way there has seen."""
    model: nn.Module | None = field(default=None, repr=False)

    @property
    def largest(self) -> int:
        """The delay of the latest tensor; what rules that want to know the delay are told."""
        return max(self.delays)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The delays that there are, longest first."""
        return tuple(sorted(set(self.delays), reverse=True))

    def of_entries(self) -> Tensor:
        """``(d,)``: for each entry of the vector, the position of its delay in :attr:`distinct`."""
        position = [self.distinct.index(delay) for delay in self.delays]
        sizes = [block.size for block in self.blocks.parts]
        return torch.tensor(position).repeat_interleave(torch.tensor(sizes))

    def table(self) -> str:
        """A line for each run of tensors with the same delay: delay, entries, first and last tensor."""
        tensors = zip(self.blocks.parts, self.delays, strict=True)
        lines = []
        for delay, run in groupby(tensors, key=lambda pair: pair[1]):
            parts = [part for part, _ in run]
            names = parts[0].name if len(parts) == 1 else f"{parts[0].name} ... {parts[-1].name}"
            lines.append(f"delay {delay:>4} {sum(part.size for part in parts):>12,} entries  {names}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        stashing = "" if self.stashing else ", stashing=False"
        return f"StageDelays({', '.join(map(str, self.distinct))}; {self.blocks.size} entries{stashing})"


def by_stage(
    parts: nn.Module | Blocks | HasBlocks,
    stages: int | Mapping[str, int],
    *,
    delay: int | None = None,
    stashing: bool = True,
) -> StageDelays:
    r"""The delays of an asynchronous pipeline, for :class:`~lategrad.optim.Delayed` and :func:`~lategrad.simulate`.

    Stage k = 0, ..., P-1 of P is late by :math:`P - 1 - k` updates: the first one waits for its microbatch to go
    through all others and back, the last one for nothing.

    Args:
        parts: the model, whose parameters belong to the stages in their own order (or its blocks, or a problem that
            has them).
        stages: P: layers in a row, so that the largest stage is as small as can be; a layer stays whole. Or delays by
            hand: a mapping from patterns of parameters' names, such as ``{"embed.*": 7, "*": 0}``; the first pattern
            that matches counts, and every parameter and every pattern must match.
        delay: of the first stage; the others' fall evenly to 0. By default P - 1.
        stashing: False models pipelines that keep no old weights: forward and backward then see different versions.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    >>> by_stage(model, stages=3).delays  # weight and bias of three layers
    (2, 2, 1, 1, 0, 0)
    >>> by_stage(model, stages=3, delay=8).delays
    (8, 8, 4, 4, 0, 0)
    >>> by_stage(model, {"0.*": 5, "*.bias": 1, "*": 0}).delays
    (5, 5, 0, 1, 0, 1)
    """
    model = parts if isinstance(parts, nn.Module) else None
    blocks = _blocks_of(parts)
    if isinstance(stages, Mapping):
        require("delay", delay, delay is None, "left out where each pattern has its own")
        delays = _by_pattern([block.name for block in blocks.parts], stages)
    else:
        require_count("stages", stages, low=1)
        first = stages - 1 if delay is None else delay
        require_count("delay", first)
        require("delay", first, stages > 1 or first == 0, "0 with one stage: a mapping {'*': delay} delays all alike")
        of_stage = [round(first * (stages - 1 - k) / max(1, stages - 1)) for k in range(stages)]
        delays = [of_stage[k] for k in _in_stages(blocks, stages)]
    return StageDelays(blocks, tuple(delays), stashing, model)


def _blocks_of(parts: object) -> Blocks:
    if isinstance(parts, nn.Module):  # first: a model may well have an attribute "blocks" of its own
        blocks = Blocks.of_module(parts)
    else:
        found = parts if isinstance(parts, Blocks) else getattr(parts, "blocks", None)
        if not isinstance(found, Blocks):
            raise ValueError(f"parts must be a module, blocks, or a problem that has blocks, got {parts!r}")
        blocks = found
    require("parts", parts, len(blocks.parts) > 0, "something with parameters that are trained")
    return blocks


def _by_pattern(names: Sequence[str], patterns: Mapping[str, int]) -> list[int]:
    for pattern, delay in patterns.items():
        require_count(f"stages[{pattern!r}]", delay)
        known = any(fnmatchcase(name, pattern) for name in names)
        require("each pattern of stages", pattern, known, f"one that matches a parameter: {', '.join(names)}")
    delays = []
    for name in names:
        matching = [delay for pattern, delay in patterns.items() if fnmatchcase(name, pattern)]
        require("stages", dict(patterns), len(matching) > 0, f"with a pattern for {name!r} ('*' matches all)")
        delays.append(matching[0])
    return delays


def _in_stages(blocks: Blocks, stages: int) -> list[int]:
    """The stage of each tensor: layers in a row, the largest stage as small as can be."""
    layers = [list(tensors) for _, tensors in groupby(blocks.parts, key=lambda block: block.name.rpartition(".")[0])]
    require("stages", stages, stages <= len(layers), f"<= {len(layers)}, the layers that have parameters")
    sizes = [sum(tensor.size for tensor in layer) for layer in layers]
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest capacity with which so many stages are enough
        middle = (low + high) // 2
        if _fill(sizes, stages, middle)[-1] < stages:
            high = middle
        else:
            low = middle + 1
    of_layer = _fill(sizes, stages, low)
    return [stage for layer, stage in zip(layers, of_layer, strict=True) for _ in layer]


def _fill(sizes: Sequence[int], stages: int, capacity: int) -> list[int]:
    """The stage of each layer when each takes what it can, but leaves a layer for each stage behind it."""
    stage, filled, chosen = 0, 0, []
    for i, size in enumerate(sizes):
        needed_behind = stages - 1 - stage
        if filled and (filled + size > capacity or len(sizes) - i <= needed_behind):
            stage, filled = stage + 1, 0
        filled += size
        chosen.append(stage)
    return chosen
