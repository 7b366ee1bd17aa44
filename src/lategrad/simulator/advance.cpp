// Updates of all runs of a simulation, compiled together with the loops of an update (run) and the problem's gradient. A
// run makes 16 updates at a time: the rows of data that these need are still in the cache for the other runs.
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
