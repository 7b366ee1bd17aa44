"""Batch norm without a history: its running statistics are those of the point that is evaluated.

In ordinary training they are averages over the iterates of one process. With late gradients there is no one such
history, and an average of iterates does not fit the rule's output, which is another point. So gradients use the
statistics of their own minibatch, as always, and what is evaluated or shipped gets the mean statistics of fixed rows
of the training data *at that point*: a function of the vector alone, the same in every run, simulation and replay.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lategrad.problems.flat_module import FlatModule
from lategrad.problems.sources import Inputs


def tracking_layers(module: nn.Module) -> list[_NormBase]:
    """The layers that keep running statistics; one that was put into evaluation mode is frozen, and not among them."""
    return [layer for layer in module.modules()
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training]  # fmt: skip


def stop_tracking(module: nn.Module) -> nn.Module:
    """The module itself, whose layers now use the statistics of their minibatch and keep none."""
    for layer in tracking_layers(module):
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


@torch.no_grad()
def recompute(at: FlatModule, layers: list[_NormBase], batches: Iterable[Inputs]) -> None:
    """Set the running statistics of these layers of a module in evaluation mode to their means over batches."""
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over the batches
        layer.train()
    try:
        for inputs in batches:
            at.output(inputs)
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.eval()
