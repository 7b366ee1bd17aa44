// What generated loops use on an NVIDIA GPU.
#define INLINE static __device__ __forceinline__
#include "common.h"
INLINE float load(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
INLINE void store(bf16& to, float x) { to.bits = bf16_bits(__float_as_uint(x)); }
INLINE float load(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
INLINE void store(f16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
template <class T> struct alignas(4 * sizeof(T)) Four { T at[4]; };
template <class T> INLINE bool aligned(const T* p) { return (unsigned long long)p % (4 * sizeof(T)) == 0; }
INLINE double block_sum(double x) {
  __shared__ double of_warp[32];
  for (int k = 16; k; k /= 2) x += __shfl_down_sync(0xffffffffu, x, k);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) for (int w = 0; w < blockDim.x / 32; ++w) total += of_warp[w];
  return total;
}
INLINE double total(const double* partial, int chunks) {
  double sum = 0;
  for (int c = threadIdx.x; c < chunks; c += blockDim.x) sum += partial[c];
  return block_sum(sum);
}
