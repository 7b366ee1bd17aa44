"""A pure rule as a step that overwrites its state, for every host and on every backend.

Rules return fresh states. A host keeps one state, and its step overwrites it: on a large CPU vector the fresh memory
would cost far more than the arithmetic. ``step.backend`` says what runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from lategrad.execution.backend import BACKENDS, Backend, Compiled, Run, eager_run
from lategrad.execution.codegen.run import loops_run
from lategrad.execution.parameter_state import ParameterState, ParameterStep
from lategrad.rules.rule import AnyRule, needs_ticket
from lategrad.support.validation import require


class StateStep:
    """The step of a state that has one tensor for each of its parts."""

    def __init__(self, rule: AnyRule[Any], state: Any, backend: str | None) -> None:
        self.rule, self.state = rule, state
        device = rule.query(state).device
        builders: dict[str, Callable[[], Run]] = {"loops": lambda: loops_run(rule, state),
                                                  "compile": lambda: Compiled(eager_run(rule), device),
                                                  "eager": lambda: eager_run(rule)}  # fmt: skip
        self._backend = Backend(builders, backend)
        self._needs_ticket = needs_ticket(rule)
        self._delay = torch.zeros(1, dtype=torch.int64, device=device)
        self._no_ticket = self._delay[:0]

    @property
    def backend(self) -> str:
        return self._backend.name

    def __call__(
        self, grad: Tensor, delay: int | Tensor, ticket: Tensor | None = None, query_out: Tensor | None = None
    ) -> None:
        """Consume one gradient.

        Args:
            grad: as large as the query.
            delay: number of updates since its query was handed out.
            ticket: what came with that query; may be omitted when the rule needs none.
            query_out: where to write the next query, if anywhere.
        """
        if ticket is None:
            if self._needs_ticket:
                name = type(self.rule).__name__
                require("ticket", ticket, False, f"what issue_ticket gave with the query: {name} needs it")
            ticket = self._no_ticket
        if not isinstance(delay, Tensor):
            delay = self._delay.fill_(delay)
        self._backend.run(self.state, grad, delay, ticket, query_out)

    def __repr__(self) -> str:
        return f"<{self.backend} step of {type(self.rule).__name__}>"


@overload
def in_place(rule: AnyRule[Any], state: Any, *, backend: str | None = None) -> StateStep: ...


@overload
def in_place(
    rule: AnyRule[Any], state: ParameterState | None, *, tensors: Sequence[Tensor], maximize: bool = False,
    backend: str | None = None,
) -> ParameterStep: ...  # fmt: skip


def in_place(
    rule: AnyRule[Any], state: Any, *, tensors: Sequence[Tensor] | None = None, maximize: bool = False,
    backend: str | None = None,
) -> StateStep | ParameterStep:  # fmt: skip
    """The rule's update as ``step(grad, delay, ticket)``, which overwrites ``state``.

    It computes the same values as ``rule.update``: bit for bit when eager, within rounding when compiled.

    Args:
        rule: any server rule.
        state: of the rule; with ``tensors``, the rest of the state, or None to start from the tensors.
        tensors: any number of tensors that together hold the query, before and after every step; a gradient is then a
            list with one tensor for each (see :class:`ParameterStep`).
        maximize: with ``tensors``, ascend instead of descend.
        backend: "eager", "compile" or "loops"; one that cannot run this rule raises
            :class:`~lategrad.execution.UnsupportedError`. None takes loops where the rule has such a form, else
            ``torch.compile`` (not for shards); where neither works, a warning says why it runs eagerly.

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
    if tensors is None:
        require("maximize", maximize, not maximize, "False without tensors: negate the gradient")
        return StateStep(rule, state, backend)
    require("state", state, state is None or isinstance(state, ParameterState), "None or a ParameterState with tensors")
    return ParameterStep(rule, tensors, state, backend, maximize)
