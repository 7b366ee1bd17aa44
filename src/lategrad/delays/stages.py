"""Delays by stage: in a pipeline each stage of a model has its own delay."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from lategrad.rules.blocks import Blocks, first_matches
from lategrad.support.validation import require, require_count


@dataclass(frozen=True, eq=False)
class StageDelays:
    r"""A constant delay for every tensor of a model; :func:`by_stage` makes one.

    Update t gets one gradient, of all tensors together, at a point whose tensors have different delays: tensor b is
    that of :math:`x_{\max(1, t - \tau_b)}`. That is an asynchronous pipeline with one update for each microbatch and
    stashed weights: the forward pass of a microbatch uses the version that each stage had at the time, and its
    backward pass uses the same versions.
    """

    blocks: Blocks
    delays: tuple[int, ...]  #: :math:`\tau_b` of each tensor, in the order of ``blocks``.
    stashing: bool = True
    """False: the backward pass uses the newest version of each stage, not that of the forward pass."""
    model: nn.Module | None = field(default=None, repr=False)
    longest: Tensor | None = field(default=None, repr=False)
    """Recorded delays of the first stage, where they are not constant: a pipeline that was drained now and then."""

    @property
    def largest(self) -> int:
        """The longest delay, which rules that use one delay receive."""
        return max(self.delays)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The different delays, longest first."""
        return tuple(sorted(set(self.delays), reverse=True))

    def of_entries(self) -> Tensor:
        """``(d,)``: for each entry of the vector, the position of its delay in :attr:`distinct`."""
        position = [self.distinct.index(delay) for delay in self.delays]
        sizes = [block.size for block in self.blocks.parts]
        return torch.tensor(position).repeat_interleave(torch.tensor(sizes))

    def table(self) -> str:
        """A line for each run of tensors with the same delay: delay, entries, first and last tensor."""
        lines = []
        for delay, run in groupby(zip(self.blocks.parts, self.delays, strict=True), key=lambda pair: pair[1]):
            parts = [part for part, _ in run]
            names = parts[0].name if len(parts) == 1 else f"{parts[0].name} ... {parts[-1].name}"
            lines.append(f"delay {delay:>4} {sum(part.size for part in parts):>12,} entries  {names}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        stashing = "" if self.stashing else ", stashing=False"
        return f"StageDelays({', '.join(map(str, self.distinct))}; {self.blocks.size} entries{stashing})"


def by_stage(
    parts: Any, stages: int | Mapping[str, int], *, delay: int | None = None, stashing: bool = True
) -> StageDelays:
    r"""The delays of an asynchronous pipeline, for :class:`~lategrad.optim.Delayed` and :func:`~lategrad.simulate`.

    Stage k = 0, ..., P-1 of P has a delay of :math:`P - 1 - k` updates: the first one waits for its microbatch to go
    through all others and back, the last one for nothing.

    Args:
        parts: the model, whose parameters are assigned to stages in order (or its blocks, or a problem that has them).
        stages: P, of consecutive layers, so that the largest stage is as small as possible; layers are not split. Or a
            mapping from patterns of parameter names to delays, such as ``{"embed.*": 7, "*": 0}``; the first pattern
            that matches counts, and every parameter and every pattern must match.
        delay: of the first stage; the others' fall evenly to 0. By default P - 1.
        stashing: False models pipelines without stashed weights: forward and backward then use different versions.

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
        by_number = [round(first * (stages - 1 - k) / max(1, stages - 1)) for k in range(stages)]
        delays = [by_number[k] for k in _assign_stages(blocks, stages)]
    return StageDelays(blocks, tuple(delays), stashing, model)


def _blocks_of(parts: object) -> Blocks:
    if isinstance(parts, nn.Module):  # first: a model may have its own attribute "blocks"
        parts = Blocks.of_module(parts)
    blocks = parts if isinstance(parts, Blocks) else getattr(parts, "blocks", None)
    if not isinstance(blocks, Blocks):
        raise ValueError(f"parts must be a module, blocks, or a problem that has blocks, got {parts!r}")
    require("parts", parts, len(blocks.parts) > 0, "something with parameters that are trained")
    return blocks


def _by_pattern(names: Sequence[str], patterns: Mapping[str, int]) -> list[int]:
    for pattern, delay in patterns.items():
        require_count(f"stages[{pattern!r}]", delay)
    delays = first_matches("stages", patterns, [(None, [name]) for name in names])
    for name, found in zip(names, delays, strict=True):
        require("stages", dict(patterns), found is not None, f"with a pattern for {name!r} ('*' matches all)")
    return [found for found in delays if found is not None]


def _assign_stages(blocks: Blocks, stages: int) -> list[int]:
    """The stage of each tensor: consecutive layers, the largest stage as small as possible."""
    layers = [list(tensors) for _, tensors in groupby(blocks.parts, key=lambda block: block.name.rpartition(".")[0])]
    require("stages", stages, stages <= len(layers), f"<= {len(layers)}, the layers that have parameters")
    sizes = [sum(tensor.size for tensor in layer) for layer in layers]
    capacities = range(max(sizes), sum(sizes) + 1)  # the smallest one for which ``stages`` suffice is the best
    capacity = capacities[bisect_left(capacities, True, key=lambda size: _fill(sizes, stages, size)[-1] < stages)]
    return [stage for layer, stage in zip(layers, _fill(sizes, stages, capacity), strict=True) for _ in layer]


def _fill(sizes: Sequence[int], stages: int, capacity: int) -> list[int]:
    """Fill one stage after another up to a capacity, leaving at least one layer for each later stage."""
    stage, filled, assigned = 0, 0, []
    for i, size in enumerate(sizes):
        if filled and (filled + size > capacity or len(sizes) - i <= stages - 1 - stage):
            stage, filled = stage + 1, 0
        filled += size
        assigned.append(stage)
    return assigned
