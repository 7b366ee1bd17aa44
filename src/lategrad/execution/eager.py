"""The eager backend: the rule's own operations, one after another, and a copy into the host's buffers.

It can run anything and starts at once. On large CPU vectors the fresh memory of every operation costs ten to
thirty times the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lategrad.rules.rule import AnyRule, apply_update
from lategrad.support.runs import tensors

Run = Callable[..., None]
"""Of state, gradient, delay, ticket, and where to write the next query (None: nowhere); overwrites the state."""


def overwrite(buffers: Any, fresh: Any) -> None:
    """Copy one state into the tensors of another, which may share some of them."""
    old, new = tensors(buffers), tensors(fresh)
    # A value that sits in another slot's buffer must be saved before that buffer is written.
    moved = [n.clone() if any(n is o for o in old) and n is not old[i] else n for i, n in enumerate(new)]
    for buffer, value in zip(old, moved, strict=True):
        if buffer is not value:
            buffer.copy_(value)


def eager_run(rule: AnyRule[Any]) -> Run:
    """The update, operation by operation."""

    def run(state: Any, grad: Tensor, delay: Tensor, ticket: Tensor, query_out: Tensor | None) -> None:
        fresh = apply_update(rule, state, grad, delay, ticket)
        if query_out is not None:
            query_out.copy_(rule.query(fresh))
        overwrite(state, fresh)

    return run
