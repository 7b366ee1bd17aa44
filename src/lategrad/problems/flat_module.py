"""A module as a function of one flat vector of parameters: its outputs, and the gradients of a loss."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from lategrad.problems.sources import Inputs, map_inputs
from lategrad.support.torch_private import gradients

Value = Callable[[Any, Tensor], Tensor]
"""From a module's output and the targets of a batch to a mean over the batch."""

_NARROW = (torch.bfloat16, torch.float16)


class FlatModule:
    """A module whose trained parameters are those of a vector.

    One vector is written into the module itself, which then runs as usual: plain autograd, any layer. Many at once go
    through ``torch.func`` (:meth:`call`), which does not support all layers.

    Parameters in bfloat16 or float16 are rounded from a vector in float32, so that small updates are not lost; a module
    of one such dtype gets its inputs in it, and losses are computed from its outputs in float32.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names, self._own = [name for name, _ in named], tuple(p for _, p in named)
        self._sizes = [p.numel() for p in self._own]
        self._dtypes = dtypes = {p.dtype for p in self._own}
        self._narrow = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(_NARROW) else None
        self._written = torch.empty(0)

    @property
    def dim(self) -> int:
        return sum(self._sizes)

    def vector(self) -> Tensor:
        """The module's own parameters, in float32 or wider."""
        flat = torch.cat([p.detach().flatten() for p in self._own])
        return flat.float() if flat.dtype in _NARROW else flat

    def _pieces(self, x: Tensor) -> list[Tensor]:
        pieces = [piece.view(p.shape) for p, piece in zip(self._own, x.split(self._sizes), strict=True)]
        same = self._same_dtype(x)
        return pieces if same else [piece.to(p.dtype) for p, piece in zip(self._own, pieces, strict=True)]

    def _same_dtype(self, x: Tensor) -> bool:
        return self._dtypes == {x.dtype}

    # ---- One vector, in the module itself

    def write(self, x: Tensor) -> None:
        """Make the parameters views of a vector of shape ``(dim,)``, until the next is written."""
        if x.data_ptr() == self._written.data_ptr() and x.dtype == self._written.dtype and self._same_dtype(x):
            return  # its memory cannot have been freed: it is held here
        for p, piece in zip(self._own, self._pieces(x.detach()), strict=True):
            p.data = piece
        self._written = x.detach()

    def output(self, inputs: Inputs) -> Any:
        """The module's output for a batch, at the last written vector."""
        inputs = self._as_narrow(inputs)
        return self._wide(self.module(**inputs) if isinstance(inputs, dict) else self.module(inputs))

    def gradient(self, x: Tensor, inputs: Inputs, targets: Tensor, loss: Value, out: Tensor | None = None) -> Tensor:
        """By plain autograd, at a vector of shape ``(dim,)``; into ``out``, or into fresh memory."""
        self.write(x)
        with torch.enable_grad():
            parts = gradients(loss(self.output(inputs), targets), self._own)
        flat = torch.cat([part.reshape(-1) for part in parts], out=out if self._same_dtype(x) else None)
        if flat.dtype == x.dtype:
            return flat
        return flat.to(x.dtype) if out is None else out.copy_(flat)

    # ---- Any vector, as a pure function

    def call(self, x: Tensor, inputs: Inputs) -> Any:
        """The same as a function that ``torch.func`` can transform."""
        parameters = dict(zip(self._names, self._pieces(x), strict=True))
        inputs = self._as_narrow(inputs)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        return self._wide(functional_call(self.module, parameters, args, kwargs))

    def _as_narrow(self, inputs: Inputs) -> Inputs:
        if self._narrow is None:
            return inputs
        return map_inputs(lambda value: value.to(self._narrow) if value.is_floating_point() else value, inputs)

    @staticmethod
    def _wide(output: Any) -> Any:
        return output.float() if isinstance(output, Tensor) and output.dtype in _NARROW else output

    # ---- Elsewhere

    def copy_at(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters of a vector, in memory of its own."""
        copied = FlatModule(copy.deepcopy(self.module))
        copied.write(x.detach().clone())
        return copied.module

    @staticmethod
    def sharing(module: nn.Module) -> nn.Module:
        """A copy whose parameters share the module's memory, until :meth:`write` gives them that of a vector."""
        plain = [p for p in module.parameters() if type(p) is nn.Parameter]
        return copy.deepcopy(module, {id(p): nn.Parameter(p.data, p.requires_grad) for p in plain})

    def to(self, device: torch.device | str) -> "FlatModule":
        return FlatModule(self.sharing(self.module).to(device))


# ---- Batch norm
#
# Running statistics are averages over the iterates of one process. With late gradients there is no one such history,
# and the rule's output is another point. So gradients use the statistics of their own minibatch, and a point that is
# evaluated or shipped gets the mean statistics of fixed training rows there: a function of the vector alone.


def tracking_layers(module: nn.Module) -> dict[str, _NormBase]:
    """The layers with running statistics by name, except those in evaluation mode, which are frozen."""
    return {name: layer for name, layer in module.named_modules()
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training}  # fmt: skip


def stop_tracking(module: nn.Module) -> nn.Module:
    """Make the layers use the statistics of their minibatch; returns the module."""
    for layer in tracking_layers(module).values():
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


@torch.no_grad()
def recompute_statistics(module: FlatModule, layers: list[_NormBase], batches: Iterable[Inputs]) -> None:
    """Set the running statistics of these layers, in evaluation mode, to their means over batches."""
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over the batches
        layer.train()
    try:
        for inputs in batches:
            module.output(inputs)
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.eval()
