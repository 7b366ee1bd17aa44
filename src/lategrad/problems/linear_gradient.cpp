// The gradient of a linear model at one vector: with it a simulation needs no call of torch. LinearModel defines real,
// the sizes in capitals and L2 before it, and puts in the residual and the weight of a row. GROUP outputs and up to 4
// rows share what is loaded. Structs, since templates drop the alignment of a vector type.
typedef real vec __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));
enum { LANES = 64 / sizeof(real), WHOLE = FEATURES / LANES * LANES };
struct Many { vec at; };
struct One { real at; };

template <int N> INLINE void scores_of(const real* x, const real* const* z, real* scores) {
  vec sums[GROUP][N] = {};
  for (int f = 0; f < WHOLE; f += LANES)
    for (int n = 0; n < N; ++n)
      for (int o = 0; o < GROUP; ++o) sums[o][n] += *(const vec*)(x + o * FEATURES + f) * *(const vec*)(z[n] + f);
  for (int o = 0; o < GROUP; ++o)
    for (int n = 0; n < N; ++n) {
      real sum[LANES];
      *(vec*)sum = sums[o][n];
      for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
      for (int f = WHOLE; f < FEATURES; ++f) sum[0] += x[o * FEATURES + f] * z[n][f];
      scores[n * OUTPUTS + o] = sum[0];
    }
}

template <class V> INLINE void products(const real* x, const real* const* z, const real* residual, real* grad, int f) {
  V sums[GROUP] = {};
  for (int o = 0; o < GROUP; ++o)
    if (L2) sums[o].at = L2 * ((const V*)(x + o * FEATURES + f))->at;
  for (int n = 0; n < BATCH; ++n)
    for (int o = 0; o < GROUP; ++o) sums[o].at += ((const V*)(z[n] + f))->at * residual[n * OUTPUTS + o];
  for (int o = 0; o < GROUP; ++o) ((V*)(grad + o * FEATURES + f))->at = sums[o].at;
}

static void gradient(const i64* data, const void* query, const i64* sample, void* result) {
  const real *x = (const real*)query, *z[BATCH];
  real *grad = (real*)result, residual[BATCH * OUTPUTS];
  for (int n = 0; n < BATCH; ++n) z[n] = (const real*)data[0] + sample[n] * FEATURES;
  for (int o = 0; o < OUTPUTS; o += GROUP) {
    int n = 0;
    for (; n + 4 <= BATCH; n += 4) scores_of<4>(x + o * FEATURES, z + n, residual + n * OUTPUTS + o);
    for (; n < BATCH; ++n) scores_of<1>(x + o * FEATURES, z + n, residual + n * OUTPUTS + o);
  }
  for (int n = 0; n < BATCH; ++n) {
    real* const s = residual + n * OUTPUTS;
    const real *const y = (const real*)data[1] + sample[n] * OUTPUTS, weight = WEIGHT;
    RESIDUAL
    for (int o = 0; o < OUTPUTS; ++o) s[o] *= weight / BATCH;
  }
  for (int o = 0; o < OUTPUTS; o += GROUP) {
    const int row = o * FEATURES;
    for (int f = 0; f < WHOLE; f += LANES) products<Many>(x + row, z, residual + o, grad + row, f);
    for (int f = WHOLE; f < FEATURES; ++f) products<One>(x + row, z, residual + o, grad + row, f);
  }
}
