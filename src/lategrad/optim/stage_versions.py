"""Parameters of different ages: each stage of a model at the version that its delay asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lategrad.delays.stages import StageDelays


class StageVersions:
    """Shows a model's training passes the old versions of its parameters, and everything else the newest.

    The model's forward, where it records gradients in training mode, first puts each late parameter's old version in
    place; :meth:`to_newest` puts the newest one back for the update. So validation, checkpoints and the optimizer
    see the newest parameters, without a change to the loop.

    Args:
        profile: the delays.
        params: those of the optimizer.
        most: longer delays are cut to it.
    """

    def __init__(self, profile: StageDelays, params: Sequence[Tensor], most: int) -> None:
        model = profile.model
        if model is None:
            raise ValueError(
                "for an optimizer, delays by stage must be made from the model itself: by_stage(model, ...)"
            )
        named = dict(model.named_parameters())
        delays = {
            id(named[block.name]): min(delay, most)
            for block, delay in zip(profile.blocks.parts, profile.delays, strict=True)
        }
        for i, p in enumerate(params):
            if id(p) not in delays:
                raise ValueError(f"delays by stage must name all parameters of the optimizer: the model has no "
                                 f"parameter number {i} of shape {tuple(p.shape)} that is trained")  # fmt: skip
        self.late = [p for p in params if delays[id(p)] > 0]
        self.past: list[deque[Tensor]] = [deque(maxlen=delays[id(p)]) for p in self.late]
        """The versions before the newest, oldest first."""
        self.newest: list[Tensor] | None = None
        """The newest version, while the parameters show old ones."""
        if self.late:
            model.register_forward_pre_hook(self.before_forward)
            if not profile.stashing:
                model.register_full_backward_pre_hook(self.before_backward)

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """A training pass begins: old versions in place, and the newest put away."""
        if self.newest is None and module.training and torch.is_grad_enabled():
            self.newest = [p.detach().clone() for p in self.late]
            for p, past, newest in zip(self.late, self.past, self.newest, strict=True):
                p.data.copy_(past[0] if past else newest)

    def before_backward(self, *_: Any) -> None:
        """Without stashing the way back sees the newest versions: autograd keeps the parameters, not copies."""
        if self.newest is not None:
            self._show_newest(self.newest)

    def _show_newest(self, newest: list[Tensor]) -> None:
        for p, version in zip(self.late, newest, strict=True):
            p.data.copy_(version)  # through .data: the saved tensors of the pass are meant to change, or done with

    def to_newest(self) -> None:
        """The pass is over: the newest versions in place, and filed as past ones for what comes."""
        if not self.late:
            return
        if self.newest is None:
            raise RuntimeError(
                "delays by stage take effect in the model's forward, which has not been called since the last step "
                "(in training mode, with gradients): call the module that by_stage was given"
            )
        self._show_newest(self.newest)
        for past, version in zip(self.past, self.newest, strict=True):
            past.append(version)
        self.newest = None

    def state(self) -> list[list[Tensor]]:
        """The past versions, for a checkpoint."""
        return [list(past) for past in self.past]

    def load(self, state: list[list[Tensor]]) -> None:
        """Go on from a checkpoint of the same delays."""
        if len(state) != len(self.past):
            raise ValueError(f"the state is of other delays: {len(state)} late parameters, not {len(self.past)}")
        self.newest = None
        for p, past, saved in zip(self.late, self.past, state, strict=True):
            past.clear()
            past.extend(version.to(p.device, copy=True) for version in saved)
