"""Compile generated loops, and call them on the memory of a rule's state."""

import copy
import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lategrad.execution.backend import Run, UnsupportedError
from lategrad.execution.codegen.emit import CHUNK, THREADS, emit
from lategrad.rules.rule import AnyRule, apply_update, issue_ticket, needs_ticket
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.sharded_vector import Shards, local_of
from lategrad.support.torch_private import compiler_errors, cpu_library, cuda_kernel, missing_compiler
from lategrad.support.validation import require

_MAX_CACHED = 1024  # tables of addresses

Address = int | list[int]  # where an operand is: the address of a scalar, or those of a vector's tensors


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class Loops:
    """A pure function of vectors and scalars as C loops over vectors that are cut into tensors of given sizes.

    Args:
        function: returns a list of vectors and scalars.
        inputs: for each argument, a scalar or a vector as an example, or the dtype of a vector.
        targets: for each result, the operand that it is written to: that of an argument, or one beyond.
        beyond: the dtypes of the operands beyond the arguments.
        sizes: the entries of each tensor of a vector, here.
        device: where everything lies.
        shards: of a vector of which other ranks have other entries; all run the same loops, and sums are over all.

    Raises :class:`~lategrad.execution.UnsupportedError` when the function has no such form.
    """

    def __init__(
        self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor | torch.dtype], targets: Sequence[int],
        beyond: Sequence[torch.dtype], sizes: Sequence[int], device: torch.device, shards: Shards | None = None,
    ) -> None:  # fmt: skip
        self._shards, self._size = shards, sum(sizes) if shards is None else shards.size
        if self._size == 1:
            raise UnsupportedError("a single number")
        if (missing := missing_compiler("hip" if torch.version.hip else device.type, "loops")) is not None:
            raise UnsupportedError(missing)
        dtypes = [i.dtype if isinstance(i, Tensor) else i for i in inputs]
        examples = [i if isinstance(i, Tensor) and i.shape != (self._size,)
                    else torch.empty(1, dtype=dtype, device=device).expand(self._size)
                    for i, dtype in zip(inputs, dtypes, strict=True)]  # fmt: skip
        self.source = emit(function, examples, self._size, targets, [*dtypes, *beyond])
        self._bind(sizes, device)

    def resized(self, sizes: Sequence[int]) -> "Loops":
        """The same loops over vectors of other sizes; only for loops that take no sums."""
        other = copy.copy(self)
        other._bind(sizes, self._device)
        return other

    def _bind(self, sizes: Sequence[int], device: torch.device) -> None:
        """Allocate what calls on vectors of these sizes need, and compile."""
        # A rank without entries has a chunk of none, where it finds the sums over all ranks.
        chunks = [(t, begin) for t, size in enumerate(sizes) for begin in range(0, size, CHUNK)] or [(0, 0)]
        self._sizes, self._chunks, self._device = list(sizes), len(chunks), device
        self.chunk_of = torch.tensor(chunks, dtype=torch.int64, device=device)  # the tensor and the start of each
        self._last_table: list[int] = []
        operands = self.source.operands
        self._table = torch.zeros(operands * (1 + len(sizes)), dtype=torch.int64, device=device)  # of addresses
        saved = torch.zeros(self.source.scalars, dtype=torch.float64, device=device)
        self._sums = torch.zeros(max(1, self.source.sums) * len(chunks), dtype=torch.float64, device=device)
        all_sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._arguments: list[Any] = [self._table[:operands], self._table[operands:], len(sizes), self.chunk_of,
                                      all_sizes, len(chunks), saved, self._sums]  # fmt: skip
        try:
            self._call = self._compile()
        except compiler_errors() as error:  # it may also be killed
            raise UnsupportedError(f"the compiler failed: {str(error).strip().splitlines()[0]}") from error

    def _compile(self) -> Callable[[int], None]:
        if self._device.type == "cpu":
            run = cpu_library(self.source.cpu).run
            arguments = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_longlong(a)
                         for a in self._arguments]  # fmt: skip
            run.argtypes, run.restype = [ctypes.c_longlong, *map(type, arguments), ctypes.c_longlong], None
            if self._shards is None:
                return partial(run, -1, *arguments)
            return lambda threads: self._run_stages(lambda stage, _: run(stage, *arguments, threads))
        kernel = cuda_kernel(self.source.cuda, "run", self._device.index or 0)

        def launch(threads: int) -> None:
            with torch.cuda.device(self._device):
                self._run_stages(lambda stage, blocks: kernel((blocks, 1, 1), (THREADS, 1, 1),
                                                              [stage, *self._arguments]))  # fmt: skip

        return launch

    def _run_stages(self, launch: Callable[[int, int], None]) -> None:
        """One stage after another, each with its blocks; on shards the sums of the chunks become those of all ranks."""
        for stage, count in enumerate(self.source.stages):
            launch(stage, 1 if count is None else self._chunks)
            if count and self._shards is not None:
                sums = self._sums[: count * self._chunks].view(count, -1)
                total = self._shards.reduce(sums.sum(1), "SUM")
                sums.zero_()[:, 0] = total

    def address(self, value: Tensor) -> Address:
        """Where a tensor is that holds a scalar or a whole vector."""
        return addresses_of(local_of(value).split(self._sizes)) if value.shape == (self._size,) else value.data_ptr()

    def table(self, addresses: Sequence[Address]) -> list[int]:
        """The addresses of all operands as one list: the scalars, then the tensors of each vector."""
        none = [0] * len(self._sizes)
        table = [one if isinstance(one, int) else 0 for one in addresses]
        for one in addresses:
            table += none if isinstance(one, int) else one
        return table

    def __call__(self, operands: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """Run on scalars, and on vectors as the tensors that they are cut into."""
        self.run(self.table([one.data_ptr() if isinstance(one, Tensor) else addresses_of(one) for one in operands]))

    def run(self, table: list[int]) -> None:
        """Run on operands whose table is known."""
        if table != self._last_table:
            if self._device.type == "cpu":
                self._table.numpy()[:] = table  # seven times as fast as through a tensor
            else:
                self._table.copy_(torch.tensor(table), non_blocking=True)
            self._last_table = table
        self._call(torch.get_num_threads())


def update_loops(
    rule: AnyRule[Any], template: Any, grad_dtype: torch.dtype, sizes: Sequence[int], device: torch.device,
    *, ticket: Tensor | None = None, query_dtype: torch.dtype | None = None, maximize: bool = False,
    shards: Shards | None = None,
) -> Loops:  # fmt: skip
    """A rule's update; operands: the rule's tensors, delay, [ticket,] the state's leaves, gradient [, next query].

    ``template`` is a state on any device, ``sizes`` the entries of each tensor of a vector. ``ticket`` is an example,
    if calls bring a ticket; otherwise it is that of the present query. The next query is written if it has a dtype.
    """
    if getattr(rule, "delay_blocks", None) is not None:
        raise UnsupportedError(f"{type(rule).__name__} with a delay for each block")
    if getattr(rule, "blocks", None) is not None:
        from lategrad.execution.codegen.staged import StagedLoops  # it is made of loops itself

        return StagedLoops(rule, grad_dtype, sizes, device, query_dtype, maximize, shards)
    meta_rule, meta_state = (map_tensors(lambda leaf: leaf.to("meta"), tree) for tree in (rule, template))
    query = meta_rule.query(meta_state)
    if shards is None and query.shape != (sum(sizes),):
        raise UnsupportedError(f"vectors of shape {tuple(query.shape)} in tensors of {sum(sizes)} entries")
    # Fresh examples: a tensor must not be two inputs, and query and ticket may be parts of the state.
    first = [*tensors(rule), torch.zeros(1, dtype=torch.int64, device=device)]
    first += [] if ticket is None else [torch.empty_like(ticket, device=device)]
    leaves = [leaf.dtype if leaf.shape == query.shape else torch.empty_like(leaf, device=device)
              for leaf in tensors(template)]  # fmt: skip

    def update(*inputs: Tensor) -> list[Tensor]:
        remaining = iter(inputs)
        traced_rule, delay = map_tensors(lambda _: next(remaining), rule), next(remaining)
        traced_ticket = None if ticket is None else next(remaining)
        state = map_tensors(lambda _: next(remaining), template)
        grad = next(remaining).to(query.dtype)
        if traced_ticket is None:
            traced_ticket = issue_ticket(traced_rule, state)
        updated = apply_update(traced_rule, state, -grad if maximize else grad, delay, traced_ticket)
        return [*tensors(updated), *([] if query_dtype is None else [traced_rule.query(updated)])]

    inputs = [*first, *leaves, grad_dtype]
    targets = [*range(len(first), len(first) + len(leaves)), *([] if query_dtype is None else [len(inputs)])]
    return Loops(update, inputs, targets, [] if query_dtype is None else [query_dtype], sizes, device, shards)


def loops_run(rule: AnyRule[Any], state: Any) -> Run:
    """The update of a state that has one tensor for each of its parts; every call must bring that same state."""
    query = rule.query(state)
    if query.dim() != 1 or any(not leaf.is_contiguous() for leaf in tensors(state)):
        raise UnsupportedError("many runs at once, or a state with gaps in its memory")
    device, rule_tensors, leaves = query.device, tensors(rule), tensors(state)
    query = query.to("meta")
    ticket_form = issue_ticket(rule, state).to("meta") if needs_ticket(rule) else None
    delay_buffer = torch.zeros(1, dtype=torch.int64, device=device)
    cached: dict[tuple[int, ...], list[int]] = {}

    @cache
    def build(writes_query: bool) -> Loops:
        query_dtype = query.dtype if writes_query else None
        return update_loops(rule, state, query.dtype, query.shape, device, ticket=ticket_form, query_dtype=query_dtype)

    build(False)  # raises now if there is no such form

    def run(_: Any, grad: Tensor, delay: Tensor, ticket: Tensor, query_out: Tensor | None) -> None:
        tickets = [] if ticket_form is None else [check_form("ticket", ticket, ticket_form, device)]
        vectors = [check_form("grad", grad, query, device)]
        if query_out is not None:
            vectors.append(check_form("query_out", query_out, query, device))
            require("query_out", query_out.stride(), vectors[-1] is query_out, "without gaps in its memory")
        loops = build(query_out is not None)
        delay_buffer.copy_(delay)
        key = tuple([value.data_ptr() for value in (*tickets, *vectors)])
        if (table := cached.get(key)) is None:  # rare: the vectors of workers stay where they are
            if len(cached) >= _MAX_CACHED:
                cached.clear()
            operands = [*rule_tensors, delay_buffer, *tickets, *leaves, *vectors]
            table = cached[key] = loops.table([loops.address(value) for value in operands])
        loops.run(table)

    return run


def check_form(name: str, value: Tensor, form: Tensor, device: torch.device) -> Tensor:
    """The value, contiguous; raises when it is not what the loops would read its memory as."""
    if value.shape != form.shape or value.dtype != form.dtype or value.device != device:
        got = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        require(name, got, False, f"{form.dtype} of shape {tuple(form.shape)} on {device}")
    return value.contiguous()
