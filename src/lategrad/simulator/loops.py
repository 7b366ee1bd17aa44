"""Many updates in one call of C: each run in turn, update after update, while its state is in the cache."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from lategrad.execution.backend import UnsupportedError
from lategrad.execution.codegen.run import update_loops
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import cpu_library

if TYPE_CHECKING:
    from lategrad.simulator.run import Chunk, Simulation

_SIZES = ("runs", "sequences", "streams", "sample", "dim", "bytes", "operands", "delay", "chunks", "saved", "sums")

_RUNS = (
    f"#include <vector>\nstruct Sizes {{ i64 {', '.join(_SIZES)}; }};"
    + """
extern "C" void advance(const Sizes* n, i64* tables, const i64* data, char* queries, const i64* chunk_of,
    const i64* samples, const i64* write, const i64* read, const i64* delays, i64 updates, i64 threads) {
  const i64 width = n->runs / n->sequences, row = width * n->bytes;
  #pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (i64 r = 0; r < n->runs; ++r) {
    char* const own = queries + r % width * n->bytes;  // in slot 0
    i64 *scalars = tables + 2 * n->operands * r, *vectors = scalars + n->operands;
    std::vector<double> saved(n->saved), sums(n->sums);
    std::vector<char> grad(n->bytes);
    vectors[n->operands - 2] = (i64)grad.data();
    for (i64 t = 0; t < updates; ++t) {
      const i64 at = t * n->sequences + r / width, stream = r * n->streams / n->runs;
      gradient(data, own + read[at] * row, samples + (t * n->streams + stream) * n->sample, grad.data());
      scalars[n->delay] = (i64)(delays + at);
      vectors[n->operands - 1] = (i64)(own + write[at] * row);
      run(scalars, vectors, 1, chunk_of, &n->dim, n->chunks, saved.data(), sums.data(), 1);
    }
  }
}
"""
)


class RunLoops:
    """The updates of all runs of a simulation that has neither tickets, stages, gates nor workers.

    Raises :class:`~lategrad.execution.UnsupportedError` unless the problem has a ``gradient_source`` and the rule the
    form of loops.
    """

    def __init__(self, simulation: Simulation) -> None:
        shape, memory, state = simulation.shape, simulation.queries.memory, simulation.state
        find_source = getattr(type(simulation.problem), "gradient_source", None)  # not that of a wrapped problem
        gradient = None if find_source is None else find_source(simulation.problem)
        if gradient is None or memory.device.type != "cpu":
            raise UnsupportedError("a problem whose gradient is not in C, or a GPU")
        if any(leaf.shape[:-1] != shape[:-1] for leaf in tensors(state)):
            raise UnsupportedError("a state that runs share")
        rule = map_tensors(lambda leaf: leaf.expand(*shape[:-1], leaf.shape[-1]).contiguous(), simulation.rule)
        one_rule, one_state = (map_tensors(lambda leaf: leaf.flatten(0, -2)[0], tree) for tree in (rule, state))
        update = update_loops(one_rule, one_state, memory.dtype, shape[-1:], memory.device, query_dtype=memory.dtype)
        source, chunks, runs = update.source, len(update.chunk_of), shape[:-1].numel()
        operands = [*tensors(rule), None, *tensors(state), None, None]  # delay, gradient, next query: set in C
        tables = torch.zeros(runs, 2, len(operands), dtype=torch.int64)
        for i, leaf in enumerate(operands):
            if leaf is not None:
                is_vector = int(leaf.shape[-1] == shape[-1])
                tables[:, is_vector, i] = leaf.data_ptr() + torch.arange(runs) * leaf.shape[-1] * leaf.element_size()
        sizes = {"runs": runs, "sequences": shape[:2].numel(), "streams": simulation.streams.numel(),
                 "sample": gradient.sample, "dim": shape[-1], "bytes": shape[-1] * memory.element_size(),
                 "operands": len(operands), "delay": len(tensors(rule)), "chunks": chunks, "saved": source.scalars,
                 "sums": source.sums * chunks}  # fmt: skip
        data = torch.tensor([value.data_ptr() for value in gradient.data])
        self._kept = rule, state, gradient.data
        self._arguments = [torch.tensor([sizes[name] for name in _SIZES]), tables, data, memory, update.chunk_of]
        self._advance = cpu_library(source.cpu + gradient.code + _RUNS, "-ffp-contract=fast").advance

    def __call__(self, chunk: Chunk, updates: int) -> None:
        """Make the first updates of a chunk."""
        arrays = [*self._arguments, chunk.samples, chunk.write, chunk.read, chunk.delays]
        counts = ctypes.c_longlong(updates), ctypes.c_longlong(torch.get_num_threads())
        self._advance(*(ctypes.c_void_p(array.data_ptr()) for array in arrays), *counts)
