// What generated loops use on a CPU.
#include <cmath>
#include <cstring>
using namespace std;
#define INLINE static inline __attribute__((always_inline))
#include "common.h"
INLINE float load(bf16 x) { unsigned bits = (unsigned)x.bits << 16; float y; memcpy(&y, &bits, 4); return y; }
INLINE void store(bf16& to, float x) { unsigned bits; memcpy(&bits, &x, 4); to.bits = bf16_bits(bits); }
#ifdef HALF  // not every compiler knows _Float16
INLINE float load(f16 x) { _Float16 y; memcpy(&y, &x, 2); return y; }
INLINE void store(f16& to, float x) { _Float16 y = x; memcpy(&to, &y, 2); }
#endif
INLINE double total(const double* partial, i64 chunks) {
  double sum = 0;
  for (i64 c = 0; c < chunks; ++c) sum += partial[c];
  return sum;
}
