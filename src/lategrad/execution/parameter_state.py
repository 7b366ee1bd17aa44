"""A rule on a vector that lies in many tensors, such as a model's parameters.

The tensors hold the query. The other long parts of the rule's state lie beside them: each part is one vector, and
every tensor has its own view into it. Where the query is a part of the state, as the average of ``Anytime`` is,
and a tensor has its dtype, the tensor is the only copy.

- As loops, everything is read and written where it is, in the tensors' own memory layouts.
- Otherwise the update runs on the vectors, with gradients and query gathered before and the query scattered after
  it. Rules that look at shapes (:mod:`lategrad.rules.blocks`), sort or slice run so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.execution.backend import Backend
from lategrad.execution.codegen.run import Loops, Place, checked, update_loops
from lategrad.execution.unsupported import UnsupportedError
from lategrad.rules.rule import AnyRule, issue_ticket, needs_ticket
from lategrad.support.runs import leaf_names, map_tensors, require_state
from lategrad.support.runs import tensors as leaves_of
from lategrad.support.torch_private import copy_all


class StateBeside(NamedTuple):
    """A rule's state beside the tensors that hold the query."""

    long: list[dict[str, Tensor]]
    """For each tensor, the parts of the state that are as large, by their names."""
    numbers: dict[str, Tensor]
    """The parts that do not grow with the vector."""


def same_objects(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Whether two lists hold the very same tensors."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


def joined(parts: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Tensors, row by row, one after another, as one vector."""
    vector = torch.cat([part.detach().reshape(-1) for part in parts])
    return vector if dtype is None else vector.to(dtype)


def scatter(vector: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a vector to the tensors that it consists of."""
    parts = vector.split([target.numel() for target in targets])
    copy_all([part.view(target.shape) for part, target in zip(parts, targets, strict=True)], targets)


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, [t.dtype for t in tensors], torch.float32)


def state_form(rule: AnyRule[Any], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """A rule and its first state on tensors, without memory: rules do not look at values.

    Raises a ValueError for a state that is not made of tensors.
    """
    shadow = map_tensors(lambda t: t.to("meta"), rule)
    entries = sum(t.numel() for t in tensors)
    state = shadow.init(torch.empty(entries, dtype=_common_dtype(tensors), device="meta"))
    require_state(state, type(rule).__name__)
    return shadow, state


class TensorsStep:
    """A rule's update on tensors that hold its query.

    Args:
        rule: for one run, on the device of the tensors.
        tensors: floating-point, on one device.
        state: what to go on with; None to start from the tensors, which are moved to the first query. One that was
            saved, or made for another dtype or memory layout, is put in place; one of another rule is refused.
        backend: as for :func:`lategrad.execution.in_place`.
    """

    @torch.no_grad()
    def __init__(
        self, rule: AnyRule[Any], tensors: Sequence[Tensor], state: StateBeside | None, backend: str | None
    ) -> None:
        self.rule, self.tensors, self.device = rule, list(tensors), tensors[0].device
        self.sizes = [t.numel() for t in self.tensors]
        shadow, self._template = state_form(rule, self.tensors)
        self.dtype = _common_dtype(self.tensors)
        self._leaves = dict(zip(leaf_names(self._template), leaves_of(self._template), strict=True))
        self._long = [name for name, leaf in self._leaves.items() if leaf.shape == (sum(self.sizes),)]
        query = shadow.query(self._template)
        self._query_name = next((name for name, leaf in self._leaves.items() if leaf is query), None)
        self.output_is_query = shadow.output(self._template) is query
        self._ticket_form = shadow.ticket(self._template) if needs_ticket(shadow) else None
        self._mirrored = any(not self._holds_query(t) for t in self.tensors)
        # A copy of a tensor with gaps in its memory has none.
        self._strides = [torch.empty_like(t, device="meta").stride() for t in self.tensors]
        self._row_by_row = all(torch.empty(t.shape, device="meta").stride() == strides
                               for t, strides in zip(self.tensors, self._strides, strict=True))  # fmt: skip
        self._forms = [t.stride() for t in self.tensors], [t.dtype for t in self.tensors]
        self._delay = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._homes: dict[str, list[Tensor]] = {}
        self._vectors: dict[str, Tensor] = {}
        self._loops: dict[bool, Loops] = {}
        self._starts = state is None
        self._backend = Backend(rule, self.device, backend, self._as_loops)
        self.state = self._first_state() if state is None else self._adopted(state)

    @property
    def backend(self) -> str:
        """What runs it."""
        return self._backend.name

    # ---- The state

    def _holds_query(self, tensor: Tensor) -> bool:
        """Whether a tensor is the only copy of its part of the query."""
        return self._query_name is not None and tensor.dtype == self.dtype

    def _stored_names(self, tensor: Tensor) -> list[str]:
        """What lies beside a tensor."""
        return [n for n in self._long if n != self._query_name or not self._holds_query(tensor)]

    def _lay_out(self, name: str, state: StateBeside) -> None:
        """Memory for one part of the state, with the values that it has, if any."""
        places = [i for i, t in enumerate(self.tensors) if name in self._stored_names(t)]
        sizes = [self.sizes[i] for i in places]
        vector = torch.empty(sum(sizes), dtype=self._leaves[name].dtype, device=self.device)
        if self._row_by_row and len(places) == len(self.tensors):
            self._vectors[name] = vector
        for i, part in zip(places, vector.split(sizes), strict=True):
            home = part.as_strided(self.tensors[i].shape, self._strides[i])
            if name in state.long[i]:
                home.copy_(state.long[i][name])
            state.long[i][name] = home
        self._homes[name] = self._where(name, state)

    def _where(self, name: str, state: StateBeside) -> list[Tensor]:
        """Where one long part of the state lies, a tensor for each."""
        if name != self._query_name:
            return [values[name] for values in state.long]
        pairs = zip(self.tensors, state.long, strict=True)
        return [t if self._holds_query(t) else values[name] for t, values in pairs]

    def _known(self, name: str) -> list[Tensor]:
        """The same, checked: when someone has put something else there, its values are taken over, or it raises."""
        homes = self._where(name, self.state)
        if not same_objects(self._homes[name], homes):
            for tensor, mine, home in zip(self.tensors, self._homes[name], homes, strict=True):
                if (home.shape, home.dtype, home.device) != (mine.shape, mine.dtype, mine.device):
                    raise ValueError(
                        f"state {name!r} of a parameter of shape {tuple(tensor.shape)} on {tensor.device} should be "
                        f"{mine.dtype} like it, got {home.dtype} of shape {tuple(home.shape)} on {home.device}"
                    )
            self._lay_out(name, self.state)
        return self._homes[name]

    def _first_state(self) -> StateBeside:
        state = StateBeside([{} for _ in self.tensors], {})
        for name, leaf in self._leaves.items():
            if name in self._long:
                self._lay_out(name, state)
            else:
                state.numbers[name] = torch.empty_like(leaf, device=self.device)
        homes: list[Place] = [self._homes[n] if n in self._long else state.numbers[n] for n in self._leaves]
        if self.backend == "loops":
            self._init([*map(self._init.place, leaves_of(self.rule)), self.tensors, *homes])
            torch.autograd.graph.increment_version(self.tensors)
            return state
        first = self.rule.init(joined(self.tensors, self.dtype))
        for leaf, home in zip(leaves_of(first), homes, strict=True):
            scatter(leaf, [home] if isinstance(home, Tensor) else home)
        scatter(self.rule.query(first), self.tensors)
        return state

    def _init_loops(self) -> Loops:
        """The first state from the tensors, which become the first query: no other memory is needed."""

        def init(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            rule = map_tensors(lambda _: next(rest), self.rule)
            first = rule.init(next(rest).to(self.dtype))
            return [*leaves_of(first), rule.query(first)]

        inputs: list[Tensor | torch.dtype] = [*leaves_of(self.rule), self.tensors[0].dtype]
        dtypes = [leaf.dtype for leaf in self._leaves.values()]
        targets = [*range(len(inputs), len(inputs) + len(dtypes)), len(inputs) - 1]
        return Loops(init, inputs, targets, dtypes, self.sizes, self.device)

    def _adopted(self, state: StateBeside) -> StateBeside:
        _same_names(state.numbers, [n for n in self._leaves if n not in self._long])
        for tensor, values in zip(self.tensors, state.long, strict=True):
            names = self._stored_names(tensor)
            if self._query_name is not None and self._query_name in names:
                values.setdefault(self._query_name, tensor.detach())  # a tensor that was the only copy
            elif self._query_name in values:
                tensor.copy_(values.pop(self._query_name))
            _same_names(values, names)
        for name in self._long:
            self._lay_out(name, state)
        return StateBeside(state.long, {n: v.to(self.device) for n, v in state.numbers.items()})

    # ---- The step

    @torch.no_grad()
    def __call__(self, grad: Sequence[Tensor | None], delay: int | Tensor, ticket: Tensor | None = None) -> None:
        """Consume one gradient: a tensor for each of the tensors, None for zeros.

        Without a ticket it is that of the present query.
        """
        self._delay.copy_(delay) if isinstance(delay, Tensor) else self._delay.fill_(delay)
        ticket = ticket if needs_ticket(self.rule) else None
        grads = self._aligned(grad)
        if self.backend == "loops":
            self._run_loops(grads, ticket)
            return
        state, copies = self._whole_state()
        ticket = issue_ticket(self.rule, state).clone() if ticket is None else ticket
        self._backend(state, joined(grads, self.dtype), self._delay, ticket, None)
        for vector, homes in copies:
            scatter(vector, homes)
        if self._mirrored:
            scatter(self.rule.query(state), self.tensors)

    def _whole_state(self) -> tuple[Any, list[tuple[Tensor, list[Tensor]]]]:
        """The state with one vector for every long part, and which of those are copies of what."""
        leaves, copies = [], []
        for name in self._leaves:
            if name not in self._long:
                leaves.append(self.state.numbers[name])
                continue
            homes = self._known(name)
            if name not in self._vectors:
                copies.append((joined(homes), homes))
            leaves.append(self._vectors[name] if name in self._vectors else copies[-1][0])
        rest = iter(leaves)
        return map_tensors(lambda _: next(rest), self._template), copies

    def _as_loops(self) -> Callable[..., None]:
        if len({t.dtype for t in self.tensors}) > 1 or self._forms[0] != self._strides:
            raise UnsupportedError("tensors of several dtypes, or with gaps in their memory")
        whole = [*leaves_of(self.rule), *([] if self._ticket_form is None else [self._ticket_form])]
        if not self._row_by_row and any(t.shape == (sum(self.sizes),) for t in whole):
            raise UnsupportedError("a vector in another memory layout")
        self._loops[False] = self._loops_for(None)
        if self._starts:
            self._init = self._init_loops()
        return self._run_loops

    def _loops_for(self, ticket: Tensor | None) -> Loops:
        dtype = self.tensors[0].dtype
        return update_loops(self.rule, self._template, dtype, self.sizes, self.device, ticket=ticket,
                            query_dtype=dtype if self._mirrored else None)  # fmt: skip

    def _run_loops(self, grads: list[Tensor], ticket: Tensor | None) -> None:
        late = ticket is not None
        if late not in self._loops:
            self._loops[late] = self._loops_for(ticket)
        loops = self._loops[late]
        places: list[Place] = [*map(loops.place, leaves_of(self.rule)), self._delay]
        if ticket is not None and self._ticket_form is not None:
            places.append(loops.place(checked("ticket", ticket, self._ticket_form, self.device)))
        places += [self._known(n) if n in self._long else self.state.numbers[n] for n in self._leaves]
        loops([*places, grads, *([self.tensors] if self._mirrored else [])])
        torch.autograd.graph.increment_version(self.tensors)

    def _aligned(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients in the memory layout of their tensors; a missing one is zero."""
        there = [grad for grad in grads if grad is not None]
        if len(there) == len(grads) and ([g.stride() for g in there], [g.dtype for g in there]) == self._forms:
            return there
        aligned = []
        for tensor, grad in zip(self.tensors, grads, strict=True):
            if grad is None:
                grad = torch.zeros_like(tensor)
            elif grad.stride() != tensor.stride() or grad.dtype != tensor.dtype:
                grad = torch.empty_like(tensor).copy_(grad)
            aligned.append(grad)
        return aligned

    # ---- What else a host asks for

    @torch.no_grad()
    def ticket(self) -> Tensor | None:
        """What the query of now carries, for a rule that needs it."""
        return self.rule.ticket(self._whole_state()[0]).clone() if needs_ticket(self.rule) else None

    @torch.no_grad()
    def write_output(self) -> None:
        """Write the rule's output into the tensors, which do not hold the query then."""
        scatter(self.rule.output(self._whole_state()[0]), self.tensors)

    def __repr__(self) -> str:
        return f"<{self.backend} step of {type(self.rule).__name__} on {len(self.tensors)} tensors>"


def _same_names(got: Iterable[str], want: Iterable[str]) -> None:
    if sorted(got) != sorted(want):
        raise ValueError(f"the state is of another rule: it has {sorted(got)}, expected {sorted(want)}")
