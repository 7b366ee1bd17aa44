"""The gradient of a linear model at one vector, as C loops: for a simulation that goes from update to update in C."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class GradientSource(NamedTuple):
    """A problem's gradient in C++."""

    code: str
    """Defines ``gradient(const i64* data, const void* x, const i64* sample, void* grad)``, for one run."""
    data: list[Tensor]
    """The tensors whose addresses are ``data``."""
    sample: int
    """Entries of a sample."""


# 4 rows x OUTPUTS_AT_ONCE outputs are accumulated in registers; every row and every output is loaded once for each.
LINEAR_GRADIENT = """
#include <cmath>
typedef long long i64;
typedef real vec __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));
enum { LANES = 64 / sizeof(real) };

template <int N> static inline void scores(const real* x, const real* const* z, real* s) {
  vec sums[GROUP][N] = {};
  i64 f = 0;
  for (; f + LANES <= FEATURES; f += LANES)
    for (int n = 0; n < N; ++n)
      for (int o = 0; o < GROUP; ++o) sums[o][n] += *(const vec*)(x + o * FEATURES + f) * *(const vec*)(z[n] + f);
  for (int o = 0; o < GROUP; ++o)
    for (int n = 0; n < N; ++n) {
      real part[LANES];
      *(vec*)part = sums[o][n];
      for (int width = LANES / 2; width; width /= 2)
        for (int k = 0; k < width; ++k) part[k] += part[k + width];
      for (i64 i = f; i < FEATURES; ++i) part[0] += x[o * FEATURES + i] * z[n][i];
      s[n * OUTPUTS + o] = part[0];
    }
}

static void gradient(const i64* data, const void* query, const i64* sample, void* result) {
  const real *x = (const real*)query, *z[BATCH];
  real *grad = (real*)result, residual[BATCH * OUTPUTS];
  for (int n = 0; n < BATCH; ++n) z[n] = (const real*)data[0] + sample[n] * FEATURES;
  for (int o = 0; o < OUTPUTS; o += GROUP) {
    int n = 0;
    for (; n + 4 <= BATCH; n += 4) scores<4>(x + o * FEATURES, z + n, residual + n * OUTPUTS + o);
    for (; n < BATCH; ++n) scores<1>(x + o * FEATURES, z + n, residual + n * OUTPUTS + o);
  }
  for (int n = 0; n < BATCH; ++n) {
    real* const s = residual + n * OUTPUTS;
    const real* const y = (const real*)data[1] + sample[n] * OUTPUTS;
    RESIDUAL
    for (int o = 0; o < OUTPUTS; ++o) s[o] *= (real)WEIGHT / BATCH;
  }
  for (int o = 0; o < OUTPUTS; o += GROUP) {
    i64 f = 0;
    for (; f + LANES <= FEATURES; f += LANES) {
      vec sums[GROUP] = {};
      for (int n = 0; n < BATCH; ++n)
        for (int k = 0; k < GROUP; ++k) sums[k] += *(const vec*)(z[n] + f) * residual[n * OUTPUTS + o + k];
      for (int k = 0; k < GROUP; ++k) {
        const i64 at = (o + k) * FEATURES + f;
        *(vec*)(grad + at) = L2 ? sums[k] + L2 * *(const vec*)(x + at) : sums[k];
      }
    }
    for (; f < FEATURES; ++f)
      for (int k = o; k < o + GROUP; ++k) {
        real sum = L2 * x[k * FEATURES + f];
        for (int n = 0; n < BATCH; ++n) sum += z[n][f] * residual[n * OUTPUTS + k];
        grad[k * FEATURES + f] = sum;
      }
  }
}
"""
