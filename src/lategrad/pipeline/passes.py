"""What goes into the passes of a stage and what comes out of them, checked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lategrad.support.validation import require


def rows_of(name: str, batch: Any, device: torch.device) -> Any:
    """A tensor or a tuple of tensors, on the stage's device."""
    for part in batch if isinstance(batch, tuple) else (batch,):
        require(name, type(part).__name__, isinstance(part, Tensor) and part.dim() > 0,
                "a tensor of rows, or a tuple of them")  # fmt: skip
    return tuple(part.to(device) for part in batch) if isinstance(batch, tuple) else batch.to(device)


def split(microbatches: int, device: torch.device, name: str, batch: Any) -> list[Any]:
    """The microbatches of a batch."""
    batch = rows_of(name, batch, device)
    parts = batch if isinstance(batch, tuple) else (batch,)
    for part in parts:
        require(f"the number of rows of {name}", len(part), len(part) > 0 and len(part) % microbatches == 0,
                f"a multiple of microbatches = {microbatches}")  # fmt: skip
    chunks = zip(*(part.chunk(microbatches) for part in parts), strict=True)
    return [chunk if isinstance(batch, tuple) else chunk[0] for chunk in chunks]


def activations_of(result: Any, trained: bool = True) -> list[Tensor]:
    """What a module has returned, as the arguments of the next."""
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    usable = all(isinstance(one, Tensor) for one in outputs)
    usable = usable and (not trained or any(one.requires_grad for one in outputs))
    require("what the stage returns", type(result).__name__, usable,
            "a tensor or a tuple of tensors that depend on its parameters")  # fmt: skip
    return outputs


def loss_of(function: Callable[[Any, Any], Tensor], result: Any, targets: Any) -> Tensor:
    loss = function(result, targets)
    is_number = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    require("the loss", form, is_number, "a differentiable tensor of one number, the mean over the microbatch")
    return loss


def require_finite(what: str, tensors: list[Tensor]) -> None:
    for tensor in (one.detach() for one in tensors if one.is_floating_point()):
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))  # not finite if an entry is not
        require(what, total, torch.isfinite(total), "finite in all entries")
