r"""Compressed gradients: they travel in fewer bits, and the next one includes what rounding left out.

In the place of :math:`g_k` a worker sends the rounded :math:`c_k = Q(g_k + e_k)` and keeps the remainder
:math:`e_{k+1} = g_k + e_k - c_k`, with :math:`e_0 = 0` (error feedback). The server gets all that the worker computed
but the last remainder: :math:`\sum_{i<k} c_i + e_k = \sum_{i<k} g_i`. The remainder is part of the worker's state and
is lost with it. Queries are not compressed.

========  ==========================================================================================
none      the gradient itself, in the problem's dtype
bfloat16  eight bits of mantissa: two bytes per entry
int8      one byte per entry, in blocks of 256 with a scale each: the largest entry of a block is 127 times its scale
========  ==========================================================================================

Reference: F. Seide, H. Fu, J. Droppo, G. Li and D. Yu, 1-bit stochastic gradient descent, 2014.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.serve.messages import is_finite, malformed, unusable

COMPRESSIONS = ("none", "bfloat16", "int8")
_BLOCK = 256
_LARGEST = 127


class Sent(NamedTuple):
    """A compressed gradient: the message ``(*runs, length)``, what the server decodes, and what rounding left out."""

    message: Tensor
    received: Tensor
    remainder: Tensor


@dataclass(frozen=True)
class Compression:
    """How gradients of one length and dtype travel.

    >>> compression = Compression("int8", dim=3, dtype=torch.float32)
    >>> sent = compression.send(torch.tensor([127.0, 1.4, 0.0]), torch.zeros(3))
    >>> sent.received, sent.remainder, len(sent.message)
    (tensor([127.,   1.,   0.]), tensor([0.0000, 0.4000, 0.0000]), 7)
    >>> compression.send(torch.tensor([127.0, 1.4, 0.0]), sent.remainder).received
    tensor([127.,   2.,   0.])
    """

    name: str
    dim: int
    dtype: torch.dtype

    @property
    def message_dtype(self) -> torch.dtype:
        return {"none": self.dtype, "bfloat16": torch.bfloat16, "int8": torch.uint8}[self.name]

    @property
    def message_length(self) -> int:
        return self.dim if self.name != "int8" else self._blocks * (4 + self._block)

    @property
    def _block(self) -> int:
        return max(1, min(_BLOCK, self.dim))

    @property
    def _blocks(self) -> int:
        return -(-self.dim // self._block)

    def send(self, grad: Tensor, remainder: Tensor) -> Sent:
        """Compress a gradient of ``(*runs, dim)`` with the remainder of the last one."""
        exact = grad + remainder
        message = self.encode(exact)
        received = self.decode(message)
        return Sent(message, received, exact - received)

    def encode(self, vector: Tensor) -> Tensor:
        if self.name != "int8":
            return vector.to(self.message_dtype)
        padded = torch.nn.functional.pad(vector, (0, self._blocks * self._block - self.dim))
        blocks = padded.unflatten(-1, (self._blocks, self._block))
        scales = (blocks.abs().amax(-1) / _LARGEST).float()
        inverse = torch.where(scales > 0, 1 / scales.to(vector.dtype), 0.0)  # too small for a scale: left for later
        codes = (blocks * inverse.unsqueeze(-1)).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([scales.contiguous().view(torch.uint8), codes.flatten(-2).view(torch.uint8)], -1)

    def decode(self, message: Tensor) -> Tensor:
        if self.name != "int8":
            return message.to(self.dtype)
        scales, codes = message.split([4 * self._blocks, self._blocks * self._block], -1)
        blocks: Tensor = codes.view(torch.int8).unflatten(-1, (self._blocks, self._block))
        of_blocks = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).to(self.dtype).unsqueeze(-1)
        padded: Tensor = (blocks * of_blocks).flatten(-2)
        return padded[..., : self.dim]

    def receive(self, message: Tensor, checked: bool = False) -> tuple[Tensor, str | None]:
        """The gradient in a message, and why it cannot be applied, if so; the sender may have ``checked`` that."""
        if self.name == "none":  # a message is the vector itself
            return message, None if checked else unusable(message, self.dim, self.dtype)
        if form := malformed(message, self.message_length, self.message_dtype):
            return message, form
        grad = self.decode(message)
        return grad, None if is_finite(grad) else "not finite"
