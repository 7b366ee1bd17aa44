"""One parameter group as the host of a rule: its state lies beside the parameters, one step overwrites both.

The rule's pure ``update`` is traced once and compiled into loops that read and write every tensor where it is
(:mod:`lategrad.loops.c_source`). What has no such form (sorting, for one) goes through torch's own compiler, on
the group's tensors one by one. The parameters hold the query. Where the query is a part of the rule's state, as
the average of ``Anytime`` is, and the parameter has its dtype, the parameter is the only copy.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lategrad.inplace import overwrite
from lategrad.loops.c_source import UnsupportedError, emit
from lategrad.loops.kernels import Kernels, Place
from lategrad.optim.pieces import Layout, Pieces, blocks_of, is_dense, joined
from lategrad.rules.rule import AnyRule, apply_update, issue_ticket, needs_ticket
from lategrad.support.runs import leaf_names, map_tensors, require_state, tensors

MOST_BLOCKS = {"cpu": 24, "cuda": 64}
"""Through torch's compiler, how many tensors are updated where they are, at most: each costs compilation time. The
others are packed."""

SMALLEST_BLOCK = {"cpu": 2**12, "cuda": 0}
"""Tensors with fewer entries are packed in any case. On a GPU packing takes longer than one more tensor."""

SMALL_ON_A_GPU = 2**17
"""Tensors with fewer entries take less time than their launch, so that many share one."""

State = Mapping[Tensor, dict[str, Tensor]]
"""For each parameter, the parts of the rule's state that are as large."""

Scalars = list[dict[str, Tensor]]
"""For each vector of a group, the parts of the rule's state that do not grow with the vector."""


def same_objects(before: list[Tensor], now: list[Tensor]) -> bool:
    """Whether two lists hold the very same tensors."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


class Vector:
    """The parameters that a rule sees as one vector, and where the parts of the rule's state lie.

    Args:
        rule: the rule, on the device of the parameters.
        params: floating-point parameters on one device.
        layout: which of them are updated where they are.
    """

    def __init__(self, rule: AnyRule[Any], params: list[Tensor], layout: Layout) -> None:
        self.params, self.layout = params, layout
        self.size, self.sizes = layout.size, layout.sizes
        self.dtype = torch.float32
        for p in params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        # The structure of the state, without memory: rules do not look at values.
        shadow = map_tensors(lambda t: t.to("meta"), rule)
        self.template = shadow.init(torch.empty(self.size, dtype=self.dtype, device="meta"))
        require_state(self.template, type(rule).__name__)
        self.leaves: list[Tensor] = tensors(self.template)
        self.names = leaf_names(self.template)
        query = shadow.query(self.template)
        self.query_name = next((n for n, leaf in zip(self.names, self.leaves, strict=True) if leaf is query), None)
        self.output_is_query = shadow.output(self.template) is query
        self.long = [leaf.shape == (self.size,) for leaf in self.leaves]
        self.mirrored = [any(not self.holds_query(params[i]) for i in block) for block in self.layout.blocks]
        self.beside: list[dict[str, Tensor]] | None = None
        self.checked: dict[str, list[Tensor]] = {}
        # A copy of a parameter with gaps in its memory has none.
        self.strides = {p: torch.empty_like(p, device="meta").stride() for p in params}

    def holds_query(self, p: Tensor) -> bool:
        """Whether the parameter is the only copy of its part of the query."""
        return self.query_name is not None and p.dtype == self.dtype

    def stored_names(self, p: Tensor) -> list[str]:
        """What lies beside a parameter."""
        names = [name for name, long in zip(self.names, self.long, strict=True) if long]
        return [name for name in names if name != self.query_name or not self.holds_query(p)]

    def homes(self, name: str, state: State) -> list[Tensor]:
        """Where one long part of the rule's state lies, a tensor for each parameter."""
        if self.beside is None:
            self.beside = [state[p] for p in self.params]
        if name == self.query_name and not any(self.mirrored):
            return self.params
        pairs = zip(self.params, self.beside, strict=True)
        if name == self.query_name:
            homes = [p if self.holds_query(p) else values[name] for p, values in pairs]
        else:
            homes = [values[name] for values in self.beside]
        if not same_objects(self.checked.get(name, []), homes):
            self._check(name, homes)
        return homes

    def _check(self, name: str, homes: list[Tensor]) -> None:
        """Compiled code writes where it is told to: raise when someone has put something else there."""
        dtype = self.leaves[self.names.index(name)].dtype
        for p, home in zip(self.params, homes, strict=True):
            want = (p.shape, p.stride() if home is p else self.strides[p], p.device, dtype)
            if (home.shape, home.stride(), home.device, home.dtype) != want:
                raise ValueError(
                    f"state {name!r} of a parameter of shape {tuple(p.shape)} on {p.device} should be {dtype} like it, "
                    f"got {home.dtype} of shape {tuple(home.shape)} and strides {home.stride()} on {home.device}"
                )
        self.checked[name] = homes

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        """A tensor for each block: the one that lies where it is, or a copy of several."""
        if not self.layout.packed[-1]:
            return values
        alone = [values[members[0]] for members in self.layout.blocks[:-1]]
        return [*alone, _flatten_dense_tensors([values[i] for i in self.layout.blocks[-1]])]

    def view(self, blocks: Sequence[Tensor]) -> Tensor:
        """The blocks as one vector."""
        flat = [self.layout.flat(i, block) for i, block in enumerate(blocks)]
        in_order = self.layout.packed[0] or self.layout.orders[0] == tuple(range(len(self.layout.shapes[0])))
        return flat[0] if len(flat) == 1 and in_order else Pieces(flat, self.layout)

    def scatter(self, blocks: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy the block that is a copy back to where it came from."""
        members = [targets[i] for i in self.layout.blocks[-1]]
        torch._foreach_copy_(members, _unflatten_dense_tensors(blocks[-1], members))

    def write(self, value: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy a vector to one tensor for each parameter."""
        parts = self.layout.parts(blocks_of(value, self.layout))
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def place(self, value: Tensor) -> Place:
        """A tensor as the loops want it: a vector of the parameters' length in parts."""
        return value.split(self.sizes) if value.shape == (self.size,) else value

    def loops(
        self,
        function: Callable[..., list[Tensor]],
        inputs: Sequence[Tensor | torch.dtype],
        targets: Sequence[int],
        beyond: Sequence[torch.dtype] = (),
    ) -> Kernels:
        """The function as loops over the parameters and what lies beside them.

        Args:
            function: of vectors and numbers.
            inputs: for each argument, a number, a vector in one piece, or the dtype of a vector in the memory
                layout of the parameters.
            targets: for each result, the place that it is written to: that of an argument, or beyond them.
            beyond: the dtypes of the places beyond.

        Raises:
            UnsupportedError: when there is no such form.
        """
        kind, size = {p.dtype for p in self.params}, self.size
        whole = [i for i in inputs if isinstance(i, Tensor) and i.shape == (size,)]
        if len(kind) > 1 or size == 1 or not all(map(is_dense, self.params)):
            raise UnsupportedError("parameters of several dtypes, with gaps, or a single number")
        if whole and not all(p.is_contiguous() for p in self.params):
            raise UnsupportedError("a vector in another memory layout")
        device = self.params[0].device
        if device.type not in ("cpu", "cuda") or torch.version.hip:
            raise UnsupportedError(f"no loops for {device}")
        examples = [i if isinstance(i, Tensor) else torch.empty(1, dtype=i, device=device).expand(size)
                    for i in inputs]  # fmt: skip
        dtypes = [*(example.dtype for example in examples), *beyond]
        return Kernels(emit(function, examples, size, targets, dtypes), self.sizes, device)


class GroupStep:
    """A rule on the vectors of one parameter group.

    Args:
        rule: the rule; its own tensors may change between steps.
        vectors: the parameters of each vector.
        maximize: ascend instead of descend.
        compile: compile the step when it is first run.
    """

    def __init__(self, rule: AnyRule[Any], vectors: list[list[Tensor]], *, maximize: bool, compile: bool) -> None:
        device = vectors[0][0].device
        kind = device.type if device.type in MOST_BLOCKS else "cpu"
        most_blocks = MOST_BLOCKS[kind] if compile else 1
        smallest = SMALLEST_BLOCK[kind] if compile else 0
        self.rule, self.maximize, self.device = rule, maximize, device
        self.vectors = [Vector(rule, params, Layout.of(params, most_blocks, smallest)) for params in vectors]
        self.params = [p for params in vectors for p in params]
        self.strides, self.dtypes = [p.stride() for p in self.params], [p.dtype for p in self.params]
        self.rule_tensors = tensors(rule) if compile else []  # compiled, they must be arguments
        self.output_is_query = all(vector.output_is_query for vector in self.vectors)
        self.compile = compile
        self.fast: dict[bool, Callable[..., Any]] = {}
        self.loops: dict[bool, list[Kernels] | None] = {}
        self.delay = torch.zeros(1, dtype=torch.int64, device=device)
        self.last_delay = 0

    def init(self, state: MutableMapping[Tensor, dict[str, Tensor]]) -> Scalars:
        """The rule's first state, from the parameters as they are; they are moved to the first query."""
        scalars: Scalars = []
        for vector in self.vectors:
            if self.compile and sum(vector.long) and (own := self._init_in_loops(vector, state)) is not None:
                scalars.append(own)
                continue
            start = [p.detach() for p in vector.params]
            x0 = vector.view(vector.gather(start)).to(vector.dtype)
            first = self.rule.init(x0)
            leaves = dict(zip(vector.names, tensors(first), strict=True))
            scalars.append({n: leaves[n] for n, long in zip(vector.names, vector.long, strict=True) if not long})
            vector.beside = None
            for p in vector.params:
                state[p] = {n: torch.empty_like(p, dtype=leaves[n].dtype) for n in vector.stored_names(p)}
            for name, long in zip(vector.names, vector.long, strict=True):
                if long:
                    vector.write(leaves.pop(name), vector.homes(name, state))
            vector.write(self.rule.query(first), vector.params)
        return scalars

    def _init_in_loops(
        self, vector: Vector, state: MutableMapping[Tensor, dict[str, Tensor]]
    ) -> dict[str, Tensor] | None:
        """The same without any memory but the state's; None when there is no such form."""

        def first(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            rule = map_tensors(lambda _: next(rest), self.rule)
            start = rule.init(next(rest).to(vector.dtype))
            return [*tensors(start), rule.query(start)]

        of_params = vector.params[0].dtype
        inputs: list[Tensor | torch.dtype] = [*self.rule_tensors, of_params]
        dtypes = [leaf.dtype for leaf in vector.leaves]
        targets = [len(inputs) + i for i in range(len(dtypes))]
        try:
            kernels = vector.loops(first, inputs, [*targets, len(inputs) - 1], dtypes)
        except Exception:  # the first update will tell
            return None
        vector.beside = None
        long = dict(zip(vector.names, vector.long, strict=True))
        leaves = dict(zip(vector.names, vector.leaves, strict=True))
        for p in vector.params:
            state[p] = {n: torch.empty_like(p, dtype=leaves[n].dtype) for n in vector.stored_names(p)}
        own = {n: torch.empty_like(leaf, device=self.device) for n, leaf in leaves.items() if not long[n]}
        homes = [vector.homes(n, state) if long[n] else own[n] for n in vector.names]
        kernels([*(vector.place(t) for t in self.rule_tensors), vector.params, *homes])
        torch.autograd.graph.increment_version(vector.params)
        return own

    def project(self) -> None:
        """Move the parameters to the nearest point of the set."""
        for vector in self.vectors:
            x = vector.view(vector.gather(vector.params)).to(vector.dtype)
            vector.write(self.rule.domain.project(x), vector.params)

    @torch.no_grad()
    def adopt(self, state: State, scalars: Scalars) -> None:
        """Go on with a state that was saved, or whose parameters have changed their dtype or memory layout.

        Raises when it is not one of this rule on these parameters.
        """
        if len(scalars) != len(self.vectors):
            raise ValueError(f"the state is of {len(scalars)} vectors, the group has {len(self.vectors)}")
        for vector, own in zip(self.vectors, scalars, strict=True):
            dtypes = {n: leaf.dtype for n, leaf in zip(vector.names, vector.leaves, strict=True)}
            short = [n for n, long in zip(vector.names, vector.long, strict=True) if not long]
            _same_names(own, short)
            for p in vector.params:
                names = vector.stored_names(p)
                if vector.query_name is not None and vector.query_name in names:
                    state[p].setdefault(vector.query_name, p.detach())  # a parameter that was the only copy
                elif vector.query_name in state[p]:
                    p.copy_(state[p].pop(vector.query_name))
                _same_names(state[p], names)
                for name, value in state[p].items():
                    if (value.dtype, value.device, value.stride()) != (dtypes[name], p.device, vector.strides[p]):
                        state[p][name] = torch.empty_like(p, dtype=dtypes[name]).copy_(value)

    def run(
        self,
        state: State,
        scalars: Scalars,
        grads: list[Tensor | None],
        delay: int = 0,
        tickets: Sequence[Tensor] | None = None,
    ) -> None:
        """One update of every vector; without tickets, the queries are those of now."""
        if delay != self.last_delay:
            self.delay.fill_(delay)
            self.last_delay = delay
        aligned = self._aligned(grads)
        if self.compile and self._run_loops(state, scalars, aligned, tickets):
            return
        inputs = [*self.rule_tensors, self.delay, *(tickets or [])]
        copies: list[tuple[Vector, list[Tensor], list[Tensor]]] = []
        first = 0
        for vector, own in zip(self.vectors, scalars, strict=True):
            for name, long in zip(vector.names, vector.long, strict=True):
                if long:
                    homes = vector.homes(name, state)
                    blocks = vector.gather(homes)
                    copies.append((vector, blocks, homes))
                    inputs += blocks
                else:
                    inputs.append(own[name])
            inputs += vector.gather(aligned[first : first + len(vector.params)])
            first += len(vector.params)
            if any(vector.mirrored):
                targets = self._query_targets(vector)
                copies.append((vector, targets, vector.params))
                inputs += targets
        late = tickets is not None
        self._function(late, inputs)(*inputs)
        for vector, blocks, homes in copies:
            if vector.layout.packed[-1]:
                vector.scatter(blocks, homes)

    def _run_loops(self, state: State, scalars: Scalars, grads: list[Tensor], tickets: Sequence[Tensor] | None) -> bool:
        """The update as loops over all tensors where they are; False when it has no such form."""
        late = tickets is not None and needs_ticket(self.rule)
        if late not in self.loops:
            self.loops[late] = self._made_loops(tickets if late else None)
        kernels = self.loops[late]
        if kernels is None:
            return False
        first = 0
        for number, (vector, own) in enumerate(zip(self.vectors, scalars, strict=True)):
            places: list[Place] = [vector.place(t) for t in self.rule_tensors]
            places.append(self.delay)
            if late and tickets is not None:
                places.append(vector.place(tickets[number]))
            for name, long in zip(vector.names, vector.long, strict=True):
                places.append(vector.homes(name, state) if long else own[name])
            places.append(grads[first : first + len(vector.params)])
            first += len(vector.params)
            if any(vector.mirrored):
                places.append(vector.params)
            kernels[number](places)
        torch.autograd.graph.increment_version(self.params)
        return True

    def _made_loops(self, tickets: Sequence[Tensor] | None) -> list[Kernels] | None:
        try:
            return [self._loops_of(v, None if tickets is None else tickets[i]) for i, v in enumerate(self.vectors)]
        except UnsupportedError:
            return None
        except Exception as error:
            _warn_of_no_compiler(error)
            self.fast = {True: self._step(True), False: self._step(False)}
            return None

    def _loops_of(self, vector: Vector, ticket: Tensor | None) -> Kernels:
        known = [*self.rule_tensors, self.delay, *([] if ticket is None else [ticket])]
        leaves = [leaf.dtype if long else torch.empty_like(leaf, device=self.device)
                  for leaf, long in zip(vector.leaves, vector.long, strict=True)]  # fmt: skip

        def update(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            rule = map_tensors(lambda _: next(rest), self.rule)
            delay = next(rest)
            carried = None if ticket is None else next(rest)
            state = map_tensors(lambda _: next(rest), vector.template)
            grad = next(rest).to(vector.dtype)
            carried = issue_ticket(rule, state) if carried is None else carried
            fresh = apply_update(rule, state, -grad if self.maximize else grad, delay, carried)
            return [*tensors(fresh), *([rule.query(fresh)] if any(vector.mirrored) else [])]

        of_params = vector.params[0].dtype
        inputs = [*known, *leaves, of_params]
        targets = [len(known) + i for i in range(len(leaves))]
        if not any(vector.mirrored):
            return vector.loops(update, inputs, targets)
        return vector.loops(update, inputs, [*targets, len(inputs)], [of_params])

    def outputs(self, state: State, scalars: Scalars) -> None:
        """Write the rule's output into the parameters."""
        for vector, current in self._states(state, scalars):
            vector.write(self.rule.output(current), vector.params)

    def tickets(self, state: State, scalars: Scalars) -> list[Tensor] | None:
        """What the queries of now carry, for a rule that needs it."""
        if not needs_ticket(self.rule):
            return None
        return [joined(self.rule.ticket(current)).clone() for _, current in self._states(state, scalars)]

    def _states(self, state: State, scalars: Scalars) -> Iterator[tuple[Vector, Any]]:
        for vector, own in zip(self.vectors, scalars, strict=True):
            leaves = iter([
                vector.view(vector.gather(vector.homes(name, state))) if long else own[name]
                for name, long in zip(vector.names, vector.long, strict=True)
            ])  # fmt: skip
            yield vector, map_tensors(lambda _, leaves=leaves: next(leaves), vector.template)  # type: ignore[misc]

    def _query_targets(self, vector: Vector) -> list[Tensor]:
        """A tensor for each block that takes the query: the parameter, or memory for several."""
        return [
            torch.empty(sum(vector.layout.sizes[i] for i in members), dtype=vector.dtype, device=self.device)
            if packed
            else vector.params[members[0]]
            for members, packed in zip(vector.layout.blocks, vector.layout.packed, strict=True)
        ]

    def _aligned(self, grads: list[Tensor | None]) -> list[Tensor]:
        """The gradients in the memory layout of their parameters; a missing one is zero."""
        there = [grad for grad in grads if grad is not None]
        kinds = [g.stride() for g in there], [g.dtype for g in there]
        if len(there) == len(grads) and kinds == (self.strides, self.dtypes):
            return there
        aligned = []
        for p, grad in zip(self.params, grads, strict=True):
            if grad is None:
                grad = torch.zeros_like(p)
            elif grad.stride() != p.stride() or grad.dtype != p.dtype:
                grad = torch.empty_like(p).copy_(grad)
            aligned.append(grad)
        return aligned

    def _step(self, late: bool) -> Callable[..., None]:
        """The update as a function of all tensors that it reads or writes, one after another."""

        def step(*inputs: Tensor) -> None:
            rest = iter(inputs)
            rule = map_tensors(lambda _: next(rest), self.rule) if self.rule_tensors else self.rule
            delay = next(rest)
            tickets = [next(rest) for _ in self.vectors] if late else None
            for number, vector in enumerate(self.vectors):
                count = range(len(vector.layout.blocks))
                leaves = iter([vector.view([next(rest) for _ in count]) if long else next(rest)
                               for long in vector.long])  # fmt: skip
                state = map_tensors(lambda _, leaves=leaves: next(leaves), vector.template)  # type: ignore[misc]
                grad = vector.view([next(rest) for _ in count]).to(vector.dtype)
                if tickets is not None:
                    ticket = tickets[number]
                else:
                    ticket = rule.ticket(state) if needs_ticket(rule) else delay[:0]
                overwrite(state, apply_update(rule, state, -grad if self.maximize else grad, delay, ticket))
                if any(vector.mirrored):
                    targets = [vector.layout.flat(i, next(rest)) for i in count]
                    query = blocks_of(rule.query(state), vector.layout)
                    for target, values, mirrored in zip(targets, query, vector.mirrored, strict=True):
                        if mirrored:
                            target.copy_(values)

        return step

    def _function(self, late: bool, inputs: list[Tensor]) -> Callable[..., Any]:
        if late not in self.fast:
            step = self._step(late)
            entries = [sum(vector.layout.sizes[i] for i in block)
                       for vector in self.vectors for block in vector.layout.blocks]  # fmt: skip
            self.fast[late] = _compiled(step, inputs, entries) if self.compile else step
        return self.fast[late]


def _same_names(got: Iterable[str], want: Iterable[str]) -> None:
    if sorted(got) != sorted(want):
        raise ValueError(f"the state is of another rule: it has {sorted(got)}, expected {sorted(want)}")


def _compiled(step: Callable[..., None], inputs: list[Tensor], block_entries: list[int]) -> Callable[..., Any]:
    """The step as compiled kernels; where no compiler works, a warning and the eager form.

    Traced and compiled without ``torch.compile``: shapes and dtypes are the parameters' own and need no
    guards, which for some hundred tensors cost more than the update.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        import torch._inductor

        graph = make_fx(step, tracing_mode="fake")(*inputs)
        options = _options(inputs[0].device, block_entries)
        fast: Callable[..., Any] = torch._inductor.compile(graph, list(inputs), options=options)
        return fast
    except Exception as error:
        _warn_of_no_compiler(error)
        return step


def _warn_of_no_compiler(error: Exception) -> None:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    warnings.warn(f"the compiler does not work here, running eagerly: {reason}", stacklevel=2)


def _options(device: torch.device, block_entries: list[int]) -> dict[str, Any]:
    """How to compile for a device: on a GPU, one launch for several tensors."""
    import torch._inductor.config as config

    options: dict[str, Any] = {"size_asserts": False}  # sizes and strides are checked before every step, faster
    if device.type == "cuda" and len(block_entries) > 1:
        options["combo_kernels"] = True
        if hasattr(config, "combo_kernel_max_num_nodes"):
            small = sum(block_entries) < SMALL_ON_A_GPU * len(block_entries)
            options["combo_kernel_max_num_nodes"] = 64 if small else 8
    return options
