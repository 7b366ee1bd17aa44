"""Delays by stage: each parameter of a model at the past version that its delay determines."""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lategrad.delays.stages import StageDelays


class StageVersions:
    """Uses past versions of a model's parameters in training passes, and the newest everywhere else.

    The model's forward, where it records gradients in training mode, first puts the past version of each delayed
    parameter in place; :meth:`to_newest` puts the newest one back for the update. So validation, checkpoints and the
    optimizer see the newest parameters, without a change to the loop. The hooks stay on the model, also on a copy of
    it, and do nothing without an optimizer that has taken these versions as its own.
    """

    _owner: weakref.ref[Any] | None = None
    _suspended = False

    def __init__(self, profile: StageDelays, params: Sequence[Tensor], delay_cap: int) -> None:
        if (model := profile.model) is None:
            raise ValueError("delays by stage of an optimizer must be made from the model itself: by_stage(model, ...)")
        named = dict(model.named_parameters())
        pairs = zip(profile.blocks.parts, profile.delays, strict=True)
        delays = {id(named[block.name]): min(delay, delay_cap) for block, delay in pairs}
        for i, p in enumerate(params):
            if id(p) not in delays:
                raise ValueError(f"delays by stage must name all parameters of the optimizer: the model has no "
                                 f"parameter number {i} of shape {tuple(p.shape)} that is trained")  # fmt: skip
        self.delays = [delays[id(p)] for p in params]
        self.delayed = [p for p in params if delays[id(p)] > 0]
        self.past: list[deque[Tensor]] = [deque(maxlen=delays[id(p)]) for p in self.delayed]  # oldest first
        self.newest: list[Tensor] | None = None  # the newest version, while the parameters hold past ones
        if self.delayed:
            model.register_forward_pre_hook(self.before_forward)
            if not profile.stashing:
                model.register_full_backward_pre_hook(self.before_backward)

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """A training pass begins: put past versions in place, and store the newest."""
        if self._suspended or self._owner is None or self._owner() is None:
            return
        if self.newest is None and module.training and torch.is_grad_enabled():
            self.newest = [p.detach().clone() for p in self.delayed]
            self._write([past[0] if past else p for p, past in zip(self.newest, self.past, strict=True)])

    def before_backward(self, *_: Any) -> None:
        """Without stashing the backward pass uses the newest versions: autograd saves parameters, not copies."""
        if self.newest is not None:
            self._write(self.newest)

    def _write(self, versions: list[Tensor]) -> None:
        for p, version in zip(self.delayed, versions, strict=True):
            p.data.copy_(version)  # through .data: the saved tensors of the pass are meant to change, or unused

    def belong_to(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within this context the parameters hold the newest versions, or what is made of them, in any pass."""
        if self._suspended or not self.delayed:
            yield
            return
        past = None if self.newest is None else [p.detach().clone() for p in self.delayed]
        self._write(self.newest or self.delayed)
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False
            self._write(past or self.delayed)

    def to_newest(self) -> list[Tensor]:
        """The pass is over: put the newest versions back, and return them for :meth:`append`."""
        if not self.delayed:
            return []
        if self.newest is None:
            raise RuntimeError("delays by stage take effect in the model's forward, which has not been called since "
                               "the last step (in training mode, with gradients): call the module that was given to "
                               "by_stage")  # fmt: skip
        self._write(self.newest)
        newest, self.newest = self.newest, None
        return newest

    def used(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The versions of these parameters in the last training pass."""
        late = {p: past[0] for p, past in zip(self.delayed, self.past, strict=True) if past}
        return [late.get(p, p.detach()) for p in params]

    def append(self, newest: list[Tensor]) -> None:
        """After an update: store the versions before it as past ones."""
        for past, version in zip(self.past, newest, strict=True):
            past.append(version)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_owner"}

    def state(self) -> list[list[Tensor]]:
        return [list(past) for past in self.past]

    def load(self, state: list[list[Tensor]]) -> None:
        if len(state) != len(self.past):
            raise ValueError(f"the state is of other delays: {len(state)} delayed parameters, not {len(self.past)}")
        self.newest = None
        for p, past, saved in zip(self.delayed, self.past, state, strict=True):
            past.clear()
            past.extend(version.to(p.device, copy=True) for version in saved)
