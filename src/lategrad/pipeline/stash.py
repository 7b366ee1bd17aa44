"""Weight stashing: the versions of a stage's parameters that microbatches in flight were computed with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class WeightStash(nn.Module):
    """Hands out the weights for a forward pass, which the backward pass of the same microbatch uses again.

    With stashing each version in flight is a copy of the parameters: at most ``ceil(delay / update_every) + 1`` of
    them, in buffers that are used again. Without it, and at the last stage, where no update comes in between, the
    weights are the parameters' own memory: a backward pass then sees the newest ones.
    """

    def __init__(self, module: nn.Module, copies: bool) -> None:
        super().__init__()
        self.module = module
        self.params: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self.copies = copies
        self._held: dict[int, list[Tensor]] = {}
        self._users: dict[int, int] = {}
        self._free: list[list[Tensor]] = []

    def take(self, version: int) -> dict[str, Tensor]:
        """Weights of the present version, as leaves of their own for one microbatch."""
        if not self.copies:
            values = list(self.params.values())
        else:
            if version not in self._held:
                buffers = self._free.pop() if self._free else [p.data.clone() for p in self.params.values()]
                for buffer, p in zip(buffers, self.params.values(), strict=True):
                    buffer.copy_(p.data)
                self._held[version], self._users[version] = buffers, 0
            self._users[version] += 1
            values = self._held[version]
        # Through .data: autograd would refuse to go back through memory that an update has changed.
        return {name: value.data.requires_grad_() for name, value in zip(self.params, values, strict=True)}

    def call_with(self, weights: dict[str, Tensor], call: Callable[..., Any], *arguments: Any) -> Any:
        """Call while the module has these weights: a backward pass, too, may compute parts of it again."""
        return functional_call(self, weights, (call, *arguments))

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def release(self, version: int) -> None:
        if self.copies:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]
                self._free.append(self._held.pop(version))

    def vector(self) -> Tensor:
        """A copy of the parameters as one vector, on the CPU."""
        return torch.cat([p.detach().cpu().flatten() for p in self.params.values()])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for version in [*self._held.values(), *self._free] for t in version)
