"""A rule on a vector that lies in many tensors, such as a model's parameters.

The tensors hold the query. The other vectors of the rule's state are allocated once each, and every tensor has its own
view (piece) of them. Where the query is a part of the state, as the average of ``Anytime`` is, and a tensor has its
dtype, the tensor is the only copy.

- As loops, everything is read and written where it is, in the tensors' own memory layouts.
- Otherwise the update runs on whole vectors: gradients and query are gathered before it, and the query is scattered
  after it. Rules that look at shapes (:mod:`lategrad.rules.blocks`), sort or slice run this way.

Tensors that are sharded over ranks (:mod:`lategrad.execution.dtensors`) have the same state, of which every rank stores
its part. Loops run on these parts, and everything else on a :class:`~lategrad.support.sharded_vector.ShardedVector`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.execution.backend import Backend, Compiled, Run, UnsupportedError, eager_run
from lategrad.execution.codegen.run import Address, Loops, addresses_of, check_form, update_loops
from lategrad.execution.codegen.staged import is_staged, staged_init
from lategrad.execution.dtensors import is_dtensor, like_dtensor, local_part_of, local_parts, max_over_ranks, shards_of
from lategrad.rules.rule import AnyRule, apply_update, issue_ticket, needs_ticket, require_query
from lategrad.support.runs import leaf_names, map_tensors, require_state
from lategrad.support.runs import tensors as leaves_of
from lategrad.support.sharded_vector import ShardedVector, Shards, local_of
from lategrad.support.torch_private import gather, scatter


class ParameterState(NamedTuple):
    """A rule's state, apart from the query that the parameters hold."""

    vectors: list[dict[str, Tensor]]  #: for each parameter, the parts with its shape, by name; DTensors for a DTensor
    scalars: dict[str, Tensor]  #: the parts that do not grow with the parameters, by name


Ticket = Tensor | list[Tensor]  # one that is as long as sharded parameters is a list with a DTensor for each of them


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a state: the widest of the tensors, and at least float32."""
    return reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)


def state_template(rule: AnyRule[Any], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """A rule and its first state for some tensors, without memory (rules do not look at values).

    Raises a ValueError for a state that is not made of tensors, and for sharded tensors a
    :class:`~lategrad.support.sharded_vector.NotShardedError` for a rule that cannot run on them.
    """
    entries, shards = sum(t.numel() for t in tensors), shards_of(tensors)
    if shards is None and getattr(rule, "blocks", None) is not None:
        shards = Shards([[(0, entries)]], rank=0)  # follows parts of the vector: some are of some tensors only
    local = entries if shards is None else shards.count([(0, entries)])
    meta_rule = in_shards(map_tensors(lambda t: t.to("meta"), rule), shards)
    start = sharded(torch.empty(local, dtype=common_dtype(tensors), device="meta"), shards)
    state = meta_rule.init(start)
    require_state(state, type(rule).__name__)
    require_query(meta_rule, state, start)
    if shards is not None and shards.group is not None:
        delay = torch.zeros(1, dtype=torch.int64, device="meta")
        apply_update(meta_rule, state, meta_rule.query(state), delay, issue_ticket(meta_rule, state))
    return meta_rule, state


def in_shards(rule: Any, shards: Shards | None) -> Any:
    """The rule, with this rank's entries of the vectors that it has, such as the centre of a ball."""
    if shards is None or shards.size == 1:
        return rule
    return map_tensors(lambda t: shards.scatter(t) if t.shape == (shards.size,) and local_of(t) is t else t, rule)


def sharded(local: Tensor, shards: Shards | None) -> Tensor:
    """The vector of which this rank has the entries ``local``: all of it, or a shard."""
    return local if shards is None else shards.vector(local)


class ParameterStep:
    """A rule's update on tensors that hold its query.

    Args:
        rule: for one run, on the device of the tensors.
        tensors: floating-point, on one device; plain ones, or DTensors of one mesh and placement.
        state: what to continue from; None starts from the tensors, which are moved to the first query. One that was
            saved, or made for another dtype or memory layout, is converted; one of another rule is refused.
        backend: as for :func:`lategrad.execution.in_place`.
        maximize: ascend instead of descend.
    """

    @torch.no_grad()
    def __init__(
        self, rule: AnyRule[Any], tensors: Sequence[Tensor], state: ParameterState | None, backend: str | None,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        self.tensors, self.device, self._shards = list(tensors), tensors[0].device, shards_of(tensors)
        self.rule = rule = in_shards(rule, self._shards)
        parts = local_parts(self.tensors)
        self.sizes, self.dtype = [t.numel() for t in parts], common_dtype(self.tensors)
        self._size = sum(t.numel() for t in self.tensors)
        meta_rule, self._template = state_template(rule, self.tensors)
        self._leaves: dict[str, Tensor] = dict(zip(leaf_names(self._template), leaves_of(self._template), strict=True))
        self._places = {name: places for name, leaf in self._leaves.items() if (places := self._places_of(name, leaf))}
        self._short = [name for name, places in self._places.items() if len(places) < len(self.tensors)]
        query = meta_rule.query(self._template)
        self._query_name = next((name for name, leaf in self._leaves.items() if leaf is query), None)
        self.output_is_query = meta_rule.output(self._template) is query
        self._ticket_form = meta_rule.ticket(self._template) if needs_ticket(meta_rule) else None
        self._query_is_copied = any(not self._holds_query(t) for t in self.tensors)
        # empty_like: the strides of a copy, which has no gaps in its memory.
        self._strides = [torch.empty_like(t, device="meta").stride() for t in parts]
        self._row_major = all(torch.empty(t.shape, device="meta").stride() == strides
                              for t, strides in zip(parts, self._strides, strict=True))  # fmt: skip
        self._forms = [t.stride() for t in parts], [t.dtype for t in parts]
        delay_blocks = getattr(rule, "delay_blocks", None)
        self._delay = torch.zeros(len(delay_blocks.parts) if delay_blocks else 1, dtype=torch.int64, device=self.device)
        self._pieces: dict[str, list[Tensor]] = {}
        self._addresses: dict[str, list[int]] = {}
        self._whole: dict[str, Tensor] = {}
        self._rule_addresses: list[Address] = []
        self._maximize = maximize
        self._init: Callable[[list[Any]], None]
        self._loops: dict[bool, Loops] = {}  # by whether the calls bring a ticket
        builders: dict[str, Callable[[], Run]] = {"loops": self._build_loops,
                                                  "compile": lambda: Compiled(eager_run(rule, maximize), self.device),
                                                  "eager": lambda: eager_run(rule, maximize)}  # fmt: skip
        self._starts = state is None
        if self._shards is not None:
            if backend == "compile":
                raise UnsupportedError("compile: sharded parameters run in loops or eagerly")
            del builders["compile"]
        self._backend = Backend(builders, backend)
        self.state = self._first_state() if state is None else self._adopt(state)

    @property
    def backend(self) -> str:
        return self._backend.name

    # ---- The state

    def _places_of(self, name: str, leaf: Tensor) -> list[int]:
        """The tensors that a vector of the state has a piece for; none for a part that does not grow with them."""
        sizes = [t.numel() for t in self.tensors]
        if not isinstance(leaf, ShardedVector):
            return list(range(len(sizes))) if leaf.shape == (sum(sizes),) and self._shards is None else []
        places = [i for i, end in enumerate(accumulate(sizes))
                  if any(start <= end - sizes[i] and end <= stop for start, stop in leaf.segments)]  # fmt: skip
        complete = sum(sizes[i] for i in places) == leaf.numel()
        if not complete and self._shards is not None:
            raise ValueError(f"state {name!r} of {type(self.rule).__name__} has parts of sharded parameters: it cannot "
                             f"be saved")  # fmt: skip
        return places if complete else []

    def _holds_query(self, tensor: Tensor) -> bool:
        """Whether a tensor is the only copy of its part of the query."""
        return self._query_name is not None and tensor.dtype == self.dtype

    def _stored_at(self, name: str) -> list[int]:
        """The tensors beside which a vector of the state is stored."""
        return [i for i in self._places[name] if name != self._query_name or not self._holds_query(self.tensors[i])]

    @torch.no_grad()
    def _allocate(self, name: str, state: ParameterState) -> None:
        """Memory for one vector of the state, filled with the values that ``state`` has."""
        positions, parts = self._stored_at(name), local_parts(self.tensors)
        sizes = [self.sizes[i] for i in positions]
        vector = torch.empty(sum(sizes), dtype=self._leaves[name].dtype, device=self.device)
        if self._row_major and positions == self._places[name]:
            self._whole[name] = vector
        for i, part in zip(positions, vector.split(sizes), strict=True):
            piece = part.as_strided(parts[i].shape, self._strides[i])
            if name in state.vectors[i]:
                piece.copy_(local_part_of(state.vectors[i][name], self.tensors[i]))
            state.vectors[i][name] = like_dtensor(piece, self.tensors[i])
        self._pieces[name] = self._pieces_in(state, name)
        self._addresses[name] = addresses_of(self._pieces[name])

    def _pieces_in(self, state: ParameterState, name: str) -> list[Tensor]:
        if name != self._query_name:
            vectors = [state.vectors[i] for i in self._places[name]] if name in self._short else state.vectors
            return local_parts([values[name] for values in vectors])
        if not self._query_is_copied:
            return local_parts(self.tensors)
        pairs = zip(self.tensors, state.vectors, strict=True)
        return local_parts([t if self._holds_query(t) else values[name] for t, values in pairs])

    def _current_pieces(self, name: str) -> list[Tensor]:
        """The pieces of a vector; where a user has replaced one, its values are copied, or it raises."""
        pieces = self._pieces_in(self.state, name)
        if addresses_of(pieces) != self._addresses[name]:
            for i, own, piece in zip(self._places[name], self._pieces[name], pieces, strict=True):
                if (piece.shape, piece.dtype, piece.device) != (own.shape, own.dtype, own.device):
                    tensor = self.tensors[i]
                    raise ValueError(
                        f"state {name!r} of a parameter of shape {tuple(tensor.shape)} on {tensor.device} should be "
                        f"{own.dtype} like it, got {piece.dtype} of shape {tuple(piece.shape)} on {piece.device}"
                    )
            self._allocate(name, self.state)
        return self._pieces[name]

    def _first_state(self) -> ParameterState:
        state = ParameterState([{} for _ in self.tensors], {})
        for name, leaf in self._leaves.items():
            if name in self._places:
                self._allocate(name, state)
            else:
                state.scalars[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
        if self.backend == "loops":
            parts = [self._whole[n] if n in self._short else self._pieces[n] if n in self._places else state.scalars[n]
                     for n in self._leaves]  # fmt: skip
            rule_tensors = [local_of(leaf).split(self.sizes) if leaf.shape == (self._size,) else leaf
                            for leaf in leaves_of(self.rule)]  # fmt: skip
            self._init([*rule_tensors, local_parts(self.tensors), *parts])
            torch.autograd.graph.increment_version(self.tensors)
            return state
        start = gather(local_parts(self.tensors), self.dtype).clone()  # one tensor may be gathered as itself
        first = self.rule.init(sharded(start, self._shards))
        for name, leaf in zip(self._leaves, leaves_of(first), strict=True):
            scatter(local_of(leaf), self._pieces[name] if name in self._places else [state.scalars[name]])
        scatter(local_of(self.rule.query(first)), local_parts(self.tensors))
        return state

    def _init_loops(self) -> Loops:
        """The first state from the tensors, which become the first query: no other memory is needed."""

        def init(*inputs: Tensor) -> list[Tensor]:
            remaining = iter(inputs)
            rule = map_tensors(lambda _: next(remaining), self.rule)
            first = rule.init(next(remaining).to(self.dtype))
            return [*leaves_of(first), rule.query(first)]

        inputs: list[Tensor | torch.dtype] = [*leaves_of(self.rule), self.tensors[0].dtype]
        dtypes = [leaf.dtype for leaf in self._leaves.values()]
        targets = [*range(len(inputs), len(inputs) + len(dtypes)), len(inputs) - 1]
        return Loops(init, inputs, targets, dtypes, self.sizes, self.device, self._shards)

    def _adopt(self, state: ParameterState) -> ParameterState:
        """Continue from a state that was saved, or made for another form of the tensors."""
        _require_names(state.scalars, [n for n in self._leaves if n not in self._places])
        for i, (tensor, values) in enumerate(zip(self.tensors, state.vectors, strict=True)):
            names = [name for name in self._places if i in self._stored_at(name)]
            if self._query_name is not None and self._query_name in names:
                values.setdefault(self._query_name, tensor.detach())  # the tensor was the only copy
            elif self._query_name in values:
                local_parts([tensor])[0].copy_(local_part_of(values.pop(self._query_name), tensor))
            _require_names(values, names)
        for name in self._places:
            self._allocate(name, state)
        # A delay for all tensors becomes one for each, if they differ from now on.
        scalars = {n: v.to(self.device).expand(self._leaves[n].shape).contiguous() for n, v in state.scalars.items()}
        return ParameterState(state.vectors, scalars)

    # ---- The step

    def __call__(
        self, grads: Sequence[Tensor | None], delay: int | Tensor | list[int], ticket: Ticket | None = None
    ) -> None:
        """Consume one gradient: a tensor for each of the tensors, None for zeros.

        Without a ticket it is that of the present query. Of several delays, one for each of the tensors, a rule that
        does not have ``delay_blocks`` is told the longest.
        """
        if isinstance(delay, list):
            delay = torch.tensor(delay) if len(self._delay) > 1 else max(delay)
        self._delay.copy_(delay) if isinstance(delay, Tensor) else self._delay.fill_(delay)
        aligned = self._align(grads)
        if self.backend == "loops":
            loops, table = self._loops_and_table(aligned, ticket)
            loops.run(table)
            torch.autograd.graph.increment_version(self.tensors)
            return
        with torch.no_grad():
            state, copies = self._whole_state()
            if self._ticket_form is None:
                ticket = self._delay[:0]
            elif ticket is None:
                ticket = issue_ticket(self.rule, state).clone()
            elif isinstance(ticket, list):
                ticket = sharded(gather(list(map(local_part_of, ticket, self.tensors))), self._shards)
            self._backend.run(state, sharded(gather(aligned, self.dtype), self._shards), self._delay, ticket, None)
            for vector, pieces in copies:
                scatter(vector, pieces)
            if self._query_is_copied:
                scatter(local_of(self.rule.query(state)), local_parts(self.tensors))

    def _align(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients in the memory layout of their tensors; a missing one is zero."""
        if is_dtensor(self.tensors[0]):
            pairs = zip(grads, self.tensors, strict=True)
            grads = [None if grad is None else local_part_of(grad, t) for grad, t in pairs]
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(grads) and self._forms == ([g.stride() for g in present], [g.dtype for g in present]):
            return present
        aligned = []
        for tensor, grad in zip(local_parts(self.tensors), grads, strict=True):
            if grad is None:
                grad = torch.zeros_like(tensor)
            elif grad.stride() != tensor.stride() or grad.dtype != tensor.dtype:
                grad = torch.empty_like(tensor).copy_(grad.detach())
            aligned.append(grad)
        return aligned

    def _whole_state(self) -> tuple[Any, list[tuple[Tensor, list[Tensor]]]]:
        """The state with whole vectors, and those of them that are copies, with the pieces to write back to."""
        leaves, copies = dict(self.state.scalars), []
        for name in self._places:
            pieces = self._current_pieces(name)
            leaves[name] = self._whole[name] if name in self._whole else gather(pieces)
            if name not in self._whole and leaves[name].data_ptr() != pieces[0].data_ptr():
                copies.append((leaves[name], pieces))
        if self._shards is not None:
            for name, leaf in self._leaves.items():
                if isinstance(leaf, ShardedVector):
                    leaves[name] = ShardedVector(leaves[name], self._shards, leaf.segments)
        return map_tensors(lambda _, leaf: leaf, self._template, [leaves[name] for name in self._leaves]), copies

    def _build_loops(self) -> Loops:
        """The loops of an update; where ranks share the tensors, all of them have loops, or none."""
        reason = ""
        try:
            self._require_loops()
        except UnsupportedError as error:
            reason = str(error)
        if any(max_over_ranks(self.tensors[0], [bool(reason)])):
            raise UnsupportedError(f"{type(self.rule).__name__} has no loops: {reason or 'another rank has none'}")
        return self._loops[False]

    def _require_loops(self) -> None:
        if len({t.dtype for t in self.tensors}) > 1 or self._forms[0] != self._strides:
            raise UnsupportedError("tensors of several dtypes, or with gaps in their memory")
        whole = leaves_of((self.rule, self._ticket_form))
        has_matrices = getattr(self.rule, "blocks", None) is not None
        if not self._row_major and (has_matrices or any(t.shape == (self._size,) for t in whole)):
            raise UnsupportedError("a vector in another memory layout")
        self._loops[False] = self._update_loops(None)
        if self._starts:
            self._init = staged_init(self.rule, self.dtype) if is_staged(self.rule) else self._init_loops()
        if is_dtensor(self.tensors[0]) and self._ticket_form is not None:  # now: later, one rank could fail alone
            self._loops[True] = self._update_loops(self._ticket_form)

    def _update_loops(self, ticket: Tensor | None) -> Loops:
        dtype = self.tensors[0].dtype
        query_dtype = dtype if self._query_is_copied else None
        return update_loops(self.rule, self._template, dtype, self.sizes, self.device, ticket=ticket,
                            query_dtype=query_dtype, maximize=self._maximize, shards=self._shards)  # fmt: skip

    def _loops_and_table(self, grads: list[Tensor], ticket: Ticket | None) -> tuple[Loops, list[int]]:
        """The loops to run, and the addresses of what they read and write."""
        has_ticket = ticket is not None and self._ticket_form is not None
        if has_ticket not in self._loops:
            self._loops[has_ticket] = self._update_loops(self._ticket_form)
        loops = self._loops[has_ticket]
        if not self._rule_addresses:
            self._rule_addresses = [*map(loops.address, leaves_of(self.rule)), self._delay.data_ptr()]
        addresses = self._rule_addresses.copy()
        if ticket is not None and self._ticket_form is not None:  # a copy must outlive the run
            form = self._ticket_form
            own = ([part.to(form.dtype) for part in map(local_part_of, ticket, self.tensors)]
                   if isinstance(ticket, list) else check_form("ticket", ticket, form, self.device))  # fmt: skip
            addresses.append(addresses_of(own) if isinstance(own, list) else loops.address(own))
            self._ticket = own
        for name in self._leaves:
            if name in self._places:
                self._current_pieces(name)
                addresses.append(self._whole[name].data_ptr() if name in self._short else self._addresses[name])
            else:
                addresses.append(self.state.scalars[name].data_ptr())
        addresses.append(addresses_of(grads))
        if self._query_is_copied:
            addresses.append(addresses_of(local_parts(self.tensors)))
        return loops, loops.table(addresses)

    # ---- What else a host asks for

    @torch.no_grad()
    def ticket(self) -> Ticket | None:
        """The ticket of the present query, for a rule that needs one."""
        if not needs_ticket(self.rule):
            return None
        ticket = self.rule.ticket(self._whole_state()[0]).clone()
        if not isinstance(ticket, ShardedVector):
            return ticket
        parts = zip(ticket.local.split(self.sizes), local_parts(self.tensors), self.tensors, strict=True)
        return [like_dtensor(piece.view(part.shape), tensor) for piece, part, tensor in parts]

    @torch.no_grad()
    def write_output(self) -> None:
        """Write the rule's output into the tensors, in place of the query."""
        scatter(local_of(self.rule.output(self._whole_state()[0])), local_parts(self.tensors))

    def __repr__(self) -> str:
        return f"<{self.backend} step of {type(self.rule).__name__} on {len(self.tensors)} tensors>"


def _require_names(names: Iterable[str], expected: Iterable[str]) -> None:
    if sorted(names) != sorted(expected):
        raise ValueError(f"the state is of another rule: it has {sorted(names)}, expected {sorted(expected)}")
