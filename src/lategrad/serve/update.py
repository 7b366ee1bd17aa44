"""A rule's update as the server makes it: the state is overwritten and the next query written, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lategrad.inplace import compiled, overwrite
from lategrad.loops.c_source import UnsupportedError, emit
from lategrad.loops.kernels import Kernels, Place
from lategrad.rules.rule import AnyRule, apply_update, needs_ticket
from lategrad.support.runs import map_tensors, tensors

_MOST_KNOWN = 1024  # sets of addresses that are remembered

Update = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], None]
"""Of state, gradient, delay, ticket, and where to write the next query (None: nowhere)."""


def update_of(rule: AnyRule[Any], state: Any, *, writes_query: bool, compile: bool) -> Update:
    """The rule's update on a state of that form.

    Args:
        rule: for one run.
        state: an example; compiled, the one and only.
        writes_query: whether the calls will say where to write the next query.
        compile: as C loops where the rule has such a form, else through ``torch.compile``.
    """

    def update(state: Any, grad: Tensor, delay: Tensor, ticket: Tensor, next_query: Tensor | None) -> None:
        fresh = apply_update(rule, state, grad, delay, ticket)
        if next_query is not None:
            next_query.copy_(rule.query(fresh))
        overwrite(state, fresh)

    if not compile:
        return update
    try:
        return _Loops(rule, state, writes_query)
    except Exception:  # the rule has no such form, or there is no compiler: torch's own then says so
        return compiled(update)


class _Loops:
    """The update as C loops; calling them costs microseconds, where a function compiled by torch checks its guards.

    State and delay must be the same tensors in every call.
    """

    def __init__(self, rule: AnyRule[Any], state: Any, writes_query: bool) -> None:
        query = rule.query(state)
        if query.device.type != "cpu" or len(query) == 1:
            raise UnsupportedError("not on the CPU, or a single number")
        self._rule, self._rule_tensors, self._writes_query = rule, tensors(rule), writes_query
        # A tensor must not be two inputs: query and ticket may be parts of the state, gradients have the query's form.
        ticket = [rule.ticket(state).clone()] if needs_ticket(rule) else []
        known = [*self._rule_tensors, torch.zeros(1, dtype=torch.int64), *ticket]
        inputs = [*known, *tensors(state), query.clone()]
        targets, dtypes = [*range(len(known), len(inputs) - 1)], [one.dtype for one in inputs]
        if writes_query:
            targets, dtypes = [*targets, len(inputs)], [*dtypes, query.dtype]
        self._form, self._needs_ticket = state, bool(ticket)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._is_vector = [one.shape == query.shape for one in (*inputs, query)]
        source = emit(self._results, inputs, len(query), targets, dtypes)
        self._kernels = Kernels(source, [len(query)], query.device)

    def _results(self, *inputs: Tensor) -> list[Tensor]:
        """The update as a function of all tensors that it reads."""
        rest = iter(inputs)
        rule = map_tensors(lambda _: next(rest), self._rule)
        delay = next(rest)
        ticket = next(rest) if self._needs_ticket else delay[:0]
        state = map_tensors(lambda _: next(rest), self._form)
        fresh = apply_update(rule, state, next(rest), delay, ticket)
        return [*tensors(fresh), *([rule.query(fresh)] if self._writes_query else [])]

    def __call__(self, state: Any, grad: Tensor, delay: Tensor, ticket: Tensor, next_query: Tensor | None) -> None:
        grad = grad.contiguous()
        changing = [grad, *([ticket] if self._needs_ticket else []), *([] if next_query is None else [next_query])]
        key = tuple(one.data_ptr() for one in changing)
        addresses = self._known.get(key)
        if addresses is None:  # a worker's vectors stay where they are, so that this is rare
            values = [*self._rule_tensors, delay, *([ticket] if self._needs_ticket else []), *tensors(state), grad]
            values += [] if next_query is None else [next_query]
            places: list[Place] = [[one] if long else one for one, long in zip(values, self._is_vector, strict=False)]
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            addresses = self._known[key] = self._kernels.addresses_of(places)
        self._kernels.run(addresses)
