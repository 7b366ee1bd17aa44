"""The backend of C loops: for calls that must cost microseconds, and for vectors that lie in many tensors.

What is written by hand needs a reason. On the CPU, one update of ``Anytime`` that also writes the next query,
microseconds on one core (``benchmarks/bench_update.py``; with guards and asserts skipped, the 45 become 23):

========== ======= ============= =======
entries    eager   torch.compile C loops
========== ======= ============= =======
7,850           72            45       9
1,000,000    9,700           460     330
10,000,000 220,000        12,200  10,500
========== ======= ============= =======

On an NVIDIA H200, a step of ``AnytimeSGD`` on 2e8 float32 parameters as one tensor and as 400, in times of fused SGD
with momentum (``benchmarks/bench_optim_gpu.py`` prints the first): these loops .90 and .80, at .94 and .90 of a copy's
bandwidth, first step within .3 s, no vector beyond the state; a Triton kernel with the addresses as data .86 and .75,
which would need a second translation of every operation; a flat buffer with the gradients gathered and
``torch.compile`` 1.24 and 1.09, and one more vector.

Addresses and sizes are data: four hundred tensors compile in the second that one takes, no tensor is copied to make
them one vector, and the number of threads may change. The same text is compiled for the CPU and for NVIDIA GPUs. See
:mod:`lategrad.execution.codegen.emit` for what can be translated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lategrad.execution.codegen.emit import CHUNK, THREADS, emit
from lategrad.execution.eager import Run
from lategrad.execution.unsupported import UnsupportedError
from lategrad.rules.rule import AnyRule, apply_update, issue_ticket, needs_ticket
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import cpu_library, cuda_kernel, missing_compiler
from lategrad.support.validation import require

_MOST_KNOWN = 1024  # sets of addresses that are remembered

Place = Tensor | Sequence[Tensor]
"""What lies at a place: a number, or a vector as its tensors."""


class Loops:
    """A pure function of vectors and numbers as loops over vectors that lie in tensors of given sizes.

    Args:
        function: returns a list of vectors and numbers.
        inputs: for each argument, a number or a vector as an example, or the dtype of a vector.
        targets: for each result, the place that it is written to: that of an argument, or beyond them.
        beyond: the dtypes of the places beyond.
        sizes: the entries of each tensor of a vector.
        device: where everything lies.

    Raises :class:`~lategrad.execution.UnsupportedError` when the function has no such form.
    """

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        inputs: Sequence[Tensor | torch.dtype],
        targets: Sequence[int],
        beyond: Sequence[torch.dtype],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        size = sum(sizes)
        if size == 1:
            raise UnsupportedError("a single number")
        missing = missing_compiler("hip" if torch.version.hip else device.type, "loops")
        if missing is not None:
            raise UnsupportedError(missing)
        examples = [i if isinstance(i, Tensor) else torch.empty(1, dtype=i, device=device).expand(size)
                    for i in inputs]  # fmt: skip
        source = emit(function, examples, size, targets, [*(example.dtype for example in examples), *beyond])
        where = [(t, begin) for t, size in enumerate(sizes) for begin in range(0, size, CHUNK)]
        self._tensors, self._chunks, self._sizes = len(sizes), len(where), list(sizes)
        self._table = torch.zeros(source.places * (1 + len(sizes)), dtype=torch.int64, device=device)
        self._addresses: list[int] = []
        self._memory = {
            "numbers": self._table[: source.places],
            "vectors": self._table[source.places :],
            "where": torch.tensor(where, dtype=torch.int64, device=device),
            "sizes": torch.tensor(sizes, dtype=torch.int64, device=device),
            "kept": torch.zeros(source.numbers, dtype=torch.float64, device=device),
            "sums": torch.zeros(source.sums * len(where), dtype=torch.float64, device=device),
        }
        self._source, self._device = source, device
        m = self._memory
        self._arguments: list[Any] = [m["numbers"], m["vectors"], self._tensors, m["where"], m["sizes"], self._chunks,
                                      m["kept"], m["sums"]]  # fmt: skip
        if device.type == "cpu":
            self._arguments = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_longlong(a)
                               for a in self._arguments]  # fmt: skip

    @property
    def passes(self) -> int:
        """How often one call goes over the vectors."""
        return sum(self._source.stages)

    @cached_property
    def _launch(self) -> Callable[[], None]:
        """Compiled when it is first needed."""
        if self._device.type == "cpu":
            run = cpu_library(self._source.cpu).run
            run.restype = None
            return lambda: run(*self._arguments, ctypes.c_longlong(torch.get_num_threads()))
        kernel = cuda_kernel(self._source.cuda, "run", self._device.index or 0)

        def launch() -> None:
            with torch.cuda.device(self._device):
                for stage, over_chunks in enumerate(self._source.stages):
                    grid = (self._chunks if over_chunks else 1, 1, 1)
                    kernel(grid, (THREADS, 1, 1), [stage, *self._arguments])

        return launch

    def place(self, value: Tensor) -> Place:
        """A tensor that holds a number or a whole vector, as a place."""
        return value.split(self._sizes) if value.shape == (sum(self._sizes),) else value

    def addresses_of(self, places: Sequence[Place]) -> list[int]:
        """Where that is in memory."""
        none = [0] * self._tensors
        addresses = [place.data_ptr() if isinstance(place, Tensor) else 0 for place in places]
        for place in places:
            addresses += none if isinstance(place, Tensor) else [tensor.data_ptr() for tensor in place]
        return addresses

    def __call__(self, places: Sequence[Place]) -> None:
        """Run on what lies at each place now."""
        self.run(self.addresses_of(places))

    def run(self, addresses: list[int]) -> None:
        """Run on what lies at addresses that are known already."""
        if addresses != self._addresses:
            self._table.copy_(torch.tensor(addresses), non_blocking=True)
            self._addresses = addresses
        self._launch()


def _formal(tensor: Tensor) -> Tensor:
    """A tensor's form, without its memory."""
    return tensor.to("meta")


def update_loops(
    rule: AnyRule[Any],
    template: Any,
    grad_dtype: torch.dtype,
    sizes: Sequence[int],
    device: torch.device,
    *,
    ticket: Tensor | None = None,
    query_dtype: torch.dtype | None = None,
) -> Loops:
    """A rule's update; its places: the rule's tensors, delay, [ticket,] the state's leaves, gradient [, next query].

    Args:
        rule: for one run.
        template: a state, of any device.
        grad_dtype: of the gradients; the rule gets them in the dtype of its query.
        sizes: the entries of each tensor of a vector.
        device: where everything lies.
        ticket: an example, if the calls bring one; without, it is that of the present query.
        query_dtype: of the next query, if it is to be written.
    """
    if getattr(rule, "blocks", None) is not None:
        raise UnsupportedError(f"{type(rule).__name__} looks at shapes")
    query = map_tensors(_formal, rule).query(map_tensors(_formal, template))
    if query.shape != (sum(sizes),):
        raise UnsupportedError(f"vectors of shape {tuple(query.shape)} in tensors of {sum(sizes)} entries")
    # Fresh examples: a tensor must not be two inputs, and query and ticket may be parts of the state.
    known = [*tensors(rule), torch.zeros(1, dtype=torch.int64, device=device)]
    known += [] if ticket is None else [torch.empty_like(ticket, device=device)]
    leaves = [leaf.dtype if leaf.shape == query.shape else torch.empty_like(leaf, device=device)
              for leaf in tensors(template)]  # fmt: skip

    def update(*inputs: Tensor) -> list[Tensor]:
        rest = iter(inputs)
        with_tensors = map_tensors(lambda _: next(rest), rule)
        delay = next(rest)
        carried = None if ticket is None else next(rest)
        state = map_tensors(lambda _: next(rest), template)
        carried = issue_ticket(with_tensors, state) if carried is None else carried
        fresh = apply_update(with_tensors, state, next(rest).to(query.dtype), delay, carried)
        return [*tensors(fresh), *([] if query_dtype is None else [with_tensors.query(fresh)])]

    inputs = [*known, *leaves, grad_dtype]
    targets = [*range(len(known), len(known) + len(leaves)), *([] if query_dtype is None else [len(inputs)])]
    return Loops(update, inputs, targets, [] if query_dtype is None else [query_dtype], sizes, device)


def loops_run(rule: AnyRule[Any], state: Any) -> Run:
    """The update of a state whose vectors are in one piece each; the calls must come with that same state."""
    query = rule.query(state)
    if query.dim() != 1 or any(not leaf.is_contiguous() for leaf in tensors(state)):
        raise UnsupportedError("many runs at once, or a state with gaps in its memory")
    device, rule_tensors, leaves = query.device, tensors(rule), tensors(state)
    query = query.to("meta")
    ticket_form = issue_ticket(rule, state).to("meta") if needs_ticket(rule) else None
    delay_buffer = torch.zeros(1, dtype=torch.int64, device=device)
    known: dict[tuple[int, ...], list[int]] = {}

    def made(writes_query: bool) -> Loops:
        query_dtype = query.dtype if writes_query else None
        return update_loops(rule, state, query.dtype, query.shape, device, ticket=ticket_form, query_dtype=query_dtype)

    loops = {False: made(False)}  # raises here and now when there is no such form

    def run(_: Any, grad: Tensor, delay: Tensor, ticket: Tensor, query_out: Tensor | None) -> None:
        changing = [] if ticket_form is None else [checked("ticket", ticket, ticket_form, device)]
        changing.append(checked("grad", grad, query, device))
        if query_out is not None:
            changing.append(checked("query_out", query_out, query, device))
            require("query_out", query_out.stride(), changing[-1] is query_out, "without gaps in its memory")
        one = loops.get(query_out is not None)
        if one is None:
            one = loops[query_out is not None] = made(query_out is not None)
        delay_buffer.copy_(delay)
        key = tuple([value.data_ptr() for value in changing])
        addresses = known.get(key)
        if addresses is None:  # a worker's vectors stay where they are, so that this is rare
            of_ticket = len(changing) - 1 - (query_out is not None)
            values = [*rule_tensors, delay_buffer, *changing[:of_ticket], *leaves, *changing[of_ticket:]]
            if len(known) >= _MOST_KNOWN:
                known.clear()
            addresses = known[key] = one.addresses_of([one.place(value) for value in values])
        one.run(addresses)

    return run


def checked(name: str, value: Tensor, form: Tensor, device: torch.device) -> Tensor:
    """The value without gaps; loops read memory as what it should be, so raise when it is something else."""
    if value.shape != form.shape or value.dtype != form.dtype or value.device != device:
        got = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        require(name, got, False, f"{form.dtype} of shape {tuple(form.shape)} on {device}")
    return value.contiguous()
