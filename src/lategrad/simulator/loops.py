"""Many updates in one call of C: each run in turn, so that its state stays in the cache from update to update."""

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lategrad.execution import UnsupportedError
from lategrad.execution.codegen.run import update_loops
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.torch_private import cpu_library

if TYPE_CHECKING:
    from lategrad.simulator.run import Chunk, Simulation

# A run makes 16 updates at a time: the rows of data that these need are still in the cache for the other runs.
_ADVANCE = """
#include <cmath>
#include <vector>
struct Sizes { i64 runs, sequences, streams, sample, dim, bytes, operands, delay, chunks, saved, sums; };
template <class real> static double distance(const void* at, const void* now, i64 n) {
  const real *x = (const real*)at, *y = (const real*)now;
  double sum = 0;
  #pragma omp simd reduction(+:sum)
  for (i64 i = 0; i < n; ++i) sum += (double)(x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}
extern "C" void advance(const Sizes* n, i64* tables, const i64* data, char* queries, const i64* chunk_of, double* drift,
  const i64* samples, const i64* write, const i64* read, const i64* now, const i64* delays, i64 updates, i64 threads) {
  const i64 width = n->runs / n->sequences, slot = width * n->bytes;
  for (i64 first = 0; first < updates; first += 16) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 r = 0; r < n->runs; ++r) {
      i64 *scalars = tables + 2 * n->operands * r, *vectors = scalars + n->operands;
      char* const own = queries + r % width * n->bytes;  // in the first slot
      std::vector<double> saved(n->saved), sums(n->sums);
      std::vector<char> grad(n->bytes);
      vectors[n->operands - 2] = (i64)grad.data();
      for (i64 t = first; t < updates && t < first + 16; ++t) {
        const i64 at = t * n->sequences + r / width, stream = t * n->streams + r * n->streams / n->runs;
        gradient(data, own + read[at] * slot, samples + stream * n->sample, grad.data());
        if (drift) {
          const auto length = n->bytes == n->dim * 8 ? distance<double> : distance<float>;
          drift[r] += length(own + read[at] * slot, own + now[at] * slot, n->dim);
        }
        scalars[n->delay] = (i64)(delays + at);
        vectors[n->operands - 1] = (i64)(own + write[at] * slot);
        run(-1, scalars, vectors, 1, chunk_of, &n->dim, n->chunks, saved.data(), sums.data(), 1);
      }
    }
  }
}
"""


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
        self._advance = cpu_library(update.source.cpu + code + _ADVANCE, "-ffp-contract=fast").advance

    def __call__(self, chunk: "Chunk", updates: int) -> None:
        arrays = [*self._arguments, chunk.samples, chunk.write, chunk.read, chunk.now, chunk.delays]
        numbers = [ctypes.c_longlong(updates), ctypes.c_longlong(torch.get_num_threads())]
        self._advance(*(ctypes.c_void_p(array.data_ptr()) for array in arrays), *numbers)
