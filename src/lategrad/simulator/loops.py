"""Many updates in one call of C: each run in turn, so that its state stays in the cache from update to update."""

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lategrad.execution import UnsupportedError
from lategrad.execution.codegen.run import update_loops
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import cpu_library

if TYPE_CHECKING:
    from lategrad.simulator.run import Chunk, Simulation


class RunLoops:
    """The updates of a simulation's runs, where the problem has a ``gradient_source`` and the rule the form of loops.

    A run computes the same numbers whatever runs are beside it. Raises
    :class:`~lategrad.execution.UnsupportedError` for tickets, stages, gates, workers with state, and GPUs.
    """

    def __init__(self, simulation: "Simulation") -> None:
        shape, history, state = simulation.shape, simulation.queries, simulation.state
        memory, source_of = history.memory, getattr(type(simulation.problem), "gradient_source", None)
        others = simulation.tickets, history.stage_of, simulation.gate, simulation.clip, simulation.workers
        if source_of is None or memory.device.type != "cpu" or any(other is not None for other in others):
            raise UnsupportedError("more than a gradient in C and an update")
        source: tuple[str, list[Tensor]] = source_of(simulation.problem) or ("", [])
        code, data = source
        forms = {leaf.shape[:-1] for leaf in tensors(state)}
        if not data or data[0].dtype != memory.dtype or forms != {shape[:-1]}:
            raise UnsupportedError("a gradient without a form in C, or a state that runs share")
        rule = map_tensors(lambda leaf: torch.atleast_1d(leaf).expand(*shape[:-1], -1).contiguous(), simulation.rule)
        one_rule, one_state = (map_tensors(lambda leaf: leaf.flatten(0, -2)[0], tree) for tree in (rule, state))
        update = update_loops(one_rule, one_state, memory.dtype, shape[-1:], memory.device, query_dtype=memory.dtype)
        runs, chunks, own = shape[:-1].numel(), len(update.chunk_of), tensors(rule)
        operands: list[Tensor | None] = [*own, None, *tensors(state), None, None]  # None: set at every update
        tables = torch.zeros(runs, 2, len(operands), dtype=torch.int64)
        for i, leaf in enumerate(operands):
            if leaf is not None:
                addresses = leaf.data_ptr() + torch.arange(runs) * leaf.shape[-1] * leaf.element_size()
                tables[:, int(leaf.shape[-1] == shape[-1]), i] = addresses
        sizes = [runs, shape[:2].numel(), simulation.streams.numel(), simulation.problem.samples(0, 0, 1).numel(),
                 shape[-1], shape[-1] * memory.element_size(), len(operands), len(own), chunks, update.source.scalars,
                 update.source.sums * chunks]  # fmt: skip
        self._tensors = rule, state, data  # whose addresses are in use
        self._drift = torch.empty(0) if simulation.drift is None else simulation.drift  # of address 0 without any
        self._arguments = [torch.tensor(sizes), tables, torch.tensor([value.data_ptr() for value in data]), memory,
                           update.chunk_of, self._drift]  # fmt: skip
        advance = Path(__file__).with_name("advance.cpp").read_text(encoding="utf-8")
        self._advance = cpu_library(update.source.cpu + code + advance, "-ffp-contract=fast").advance

    def __call__(self, chunk: "Chunk", updates: int) -> None:
        arrays = [*self._arguments, chunk.samples, chunk.write, chunk.read, chunk.now, chunk.delays]
        numbers = [ctypes.c_longlong(updates), ctypes.c_longlong(torch.get_num_threads())]
        self._advance(*(ctypes.c_void_p(array.data_ptr()) for array in arrays), *numbers)
