"""The one door: a pure rule as a step that overwrites its state, whoever hosts it and however it runs.

Rules return fresh states. A host keeps one state, and its step overwrites it: on a large CPU vector the fresh
memory would cost far more than the arithmetic. Simulator, server and optimizers all get their step from
:func:`in_place`, and ``step.backend`` says what runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
from torch import Tensor

from lategrad.execution.backend import BACKENDS, Backend
from lategrad.execution.codegen.run import loops_run
from lategrad.execution.parameter_state import StateBeside, TensorsStep
from lategrad.rules.rule import AnyRule, needs_ticket
from lategrad.support.validation import require


class StateStep:
    """The step of a state that lies in one tensor for each of its parts."""

    def __init__(self, rule: AnyRule[Any], state: Any, backend: str | None) -> None:
        self.rule, self.state = rule, state
        device = rule.query(state).device
        self._backend = Backend(rule, device, backend, lambda: loops_run(rule, state))
        self._delay = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_ticket = self._delay[:0]

    @property
    def backend(self) -> str:
        """What runs it."""
        return self._backend.name

    def __call__(
        self, grad: Any, delay: int | Tensor, ticket: Tensor | None = None, query_out: Tensor | None = None
    ) -> None:
        """Consume one gradient.

        Args:
            grad: as large as the query.
            delay: how many updates ago its query was handed out.
            ticket: what came with that query; may be left out when the rule needs none.
            query_out: where to write the next query; None for nowhere.
        """
        if ticket is None:
            if needs_ticket(self.rule):
                name = type(self.rule).__name__
                require("ticket", ticket, False, f"what issue_ticket gave with the query: {name} needs it")
            ticket = self._no_ticket
        if not isinstance(delay, Tensor):
            delay = self._delay.fill_(delay)
        self._backend(self.state, grad, delay, ticket, query_out)

    def __repr__(self) -> str:
        return f"<{self.backend} step of {type(self.rule).__name__}>"


@dataclass(frozen=True, eq=False)
class WithGradient:
    """A rule that is given something else than its gradient: the gradient is computed within the step.

    >>> import lategrad as lg
    >>> ascending = WithGradient(lg.SGD(lr=0.5), torch.neg)
    >>> state = ascending.init(torch.zeros(1))
    >>> in_place(ascending, state, backend="eager")(torch.ones(1), delay=0)
    >>> state.x
    tensor([0.5000])
    """

    rule: AnyRule[Any]
    gradient: Callable[[Any], Tensor]

    def update(self, state: Any, grad: Any, delay: Tensor, *ticket: Tensor) -> Any:
        """The rule's update."""
        return self.rule.update(state, self.gradient(grad), delay, *ticket)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "rule":
            raise AttributeError(name)
        return getattr(self.rule, name)


@overload
def in_place(rule: AnyRule[Any] | WithGradient, state: Any, *, backend: str | None = None) -> StateStep: ...


@overload
def in_place(
    rule: AnyRule[Any] | WithGradient,
    state: StateBeside | None,
    *,
    tensors: Sequence[Tensor],
    backend: str | None = None,
) -> TensorsStep: ...


def in_place(
    rule: AnyRule[Any] | WithGradient,
    state: Any,
    *,
    tensors: Sequence[Tensor] | None = None,
    backend: str | None = None,
) -> StateStep | TensorsStep:
    """The rule's update as ``step(grad, delay, ticket)``, which overwrites ``state``.

    It computes the same values as ``rule.update``: bit for bit when eager, within rounding when compiled.

    Args:
        rule: any server rule.
        state: of the rule; with ``tensors``, what lies beside them, or None to start from them.
        tensors: where the vector lies, in as many tensors as one likes: they hold the query, before and after
            every step, and gradients are a list with one for each of them (see :class:`TensorsStep`).
        backend: "eager", "compile" or "loops"; one that cannot run this rule raises
            :class:`~lategrad.execution.UnsupportedError`. None takes loops where the rule has such a form, else
            ``torch.compile``; where neither works, a warning says why it runs eagerly.

    >>> import lategrad as lg
    >>> rule = lg.Anytime(lg.OGD(lr=0.5))
    >>> state = rule.init(torch.zeros(2))
    >>> step = in_place(rule, state, backend="eager")
    >>> step(torch.tensor([1.0, 0.0]), delay=0)
    >>> rule.query(state)  # a third of the way to w_1, two thirds to w_2 = -0.5
    tensor([-0.3333,  0.0000])
    >>> step
    <eager step of Anytime>
    """
    require("backend", backend, backend is None or backend in BACKENDS, f"None or one of {', '.join(BACKENDS)}")
    rule = cast("AnyRule[Any]", rule)
    if tensors is None:
        return StateStep(rule, state, backend)
    require("state", state, state is None or isinstance(state, StateBeside), "None or a StateBeside with tensors")
    return TensorsStep(rule, tensors, state, backend)
