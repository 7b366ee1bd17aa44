"""A pure rule as an in-place step on buffers that the host owns.

Rules return fresh states. On a large CPU vector the fresh memory costs far more than the arithmetic: the
kernel maps and zeroes every new page. A host therefore keeps one state, and the step below overwrites it.
Compiled, the update and the copy fuse into one pass over the buffers, with nothing allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from lategrad.rules.rule import AnyRule, apply_update, needs_ticket
from lategrad.support.runs import tensors
from lategrad.support.validation import require


class Step(Protocol):
    """An update that overwrites the state it is given."""

    def __call__(self, state: Any, grad: Tensor, delay: Tensor, ticket: Tensor | None = None) -> None:
        """Consume one gradient; the ticket may be left out when the rule needs none."""
        ...


def overwrite(buffers: Any, fresh: Any) -> None:
    """Copy one state into the tensors of another, which may share some of them."""
    old, new = tensors(buffers), tensors(fresh)
    # A value that sits in another slot's buffer must be saved before that buffer is written.
    moved = [n.clone() if any(n is o for o in old) and n is not old[i] else n for i, n in enumerate(new)]
    for buffer, value in zip(old, moved, strict=True):
        if buffer is not value:
            buffer.copy_(value)


def compiled(function: Callable[..., Any], *, guards: bool = True) -> Callable[..., Any]:
    """``function`` through ``torch.compile``; where no compiler works, a warning and the eager form.

    Without guards a call costs tens of microseconds less; then every call must have the same tensors' shapes, and all
    that the function finds outside its arguments must stay as it was.
    """

    def entry(*args: Any) -> Any:
        return function(*args)

    # torch.compile counts recompilations per code object and gives up after a few: one entry per function.
    own = FunctionType(entry.__code__.replace(), globals(), "entry", None, entry.__closure__)
    options: dict[str, Any] | None = None if guards else {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    fast = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    usable: bool | None = None

    def call(*args: Any) -> Any:
        nonlocal usable
        if usable:
            return fast(*args)
        if usable is None:
            try:  # compilation happens before anything is computed, so nothing is applied twice
                result = fast(*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"torch.compile does not work here, running eagerly: {reason}", stacklevel=2)
                usable = False
            else:
                usable = True
                return result
        return function(*args)

    return call


def in_place(rule: AnyRule[Any], *, compile: bool = True) -> Step:
    """The rule's update as ``step(state, grad, delay, ticket)``, which overwrites ``state``.

    It computes the same values as ``rule.update`` (bit for bit when eager, within rounding when compiled).
    The ticket may be left out when the rule needs none.

    >>> import lategrad as lg
    >>> rule = lg.Anytime(lg.OGD(lr=0.5))
    >>> state = rule.init(torch.zeros(2))
    >>> step = in_place(rule, compile=False)
    >>> step(state, torch.tensor([1.0, 0.0]), torch.tensor(0))
    >>> rule.query(state)  # a third of the way to w_1, two thirds to w_2 = -0.5
    tensor([-0.3333,  0.0000])
    """

    def update(state: Any, grad: Tensor, delay: Tensor, ticket: Tensor) -> None:
        overwrite(state, apply_update(rule, state, grad, delay, ticket))

    run = compiled(update) if compile else update

    def step(state: Any, grad: Tensor, delay: Tensor, ticket: Tensor | None = None) -> None:
        if ticket is None:
            require("ticket", ticket, not needs_ticket(rule),
                    f"what issue_ticket gave with the query: {type(rule).__name__} needs it")  # fmt: skip
            ticket = grad[..., :0]
        run(state, grad, delay, ticket)

    return step
