"""The C expression of each supported torch operation, and the C functions that all loops share."""

import math
from typing import Any

import torch

_aten = torch.ops.aten

_TYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "i64", torch.bool: "bool"}
MEMORY_TYPES = _TYPES | {torch.bfloat16: "bf16", torch.float16: "f16"}
VALUE_TYPES = _TYPES | {torch.bfloat16: "float", torch.float16: "float"}
"""C types of operands in memory, and of values in registers: half precision is computed in float."""

_SHAPES = ("alias", "clone", "detach", "expand", "lift_fresh_copy", "reshape", "unsqueeze", "view")
IDENTITY = {_aten._to_copy.default, _aten.squeeze.dim, *(getattr(_aten, name).default for name in _SHAPES)}
"""Operations that change nothing but the shape or the dtype."""

CONSTANT = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.ones_like.default: 1.0,
            _aten.scalar_tensor.default: 0, _aten.zeros_like.default: 0.0}  # fmt: skip
"""Operations with the same value everywhere: that value, or (an integer) its position among the arguments."""

_LERP = "{2} < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2})"
ARITHMETIC: dict[Any, str] = {
    _aten.add.Tensor: "{0} + {1}", _aten.sub.Tensor: "{0} - {1}", _aten.neg.default: "-{0}",
    _aten.rsub.Scalar: "{1} - {0}", _aten.rsub.Tensor: "{1} - {0}",
    _aten.mul.Tensor: "{0} * {1}", _aten.div.Tensor: "{0} / {1}", _aten.reciprocal.default: "1 / {0}",
    _aten.remainder.Scalar: "{0} - {1} * floor({0} / {1})", _aten.floor.default: "floor({0})",
    _aten.abs.default: "fabs({0})", _aten.sign.default: "({0} > 0) - ({0} < 0)",
    _aten.clamp_max.default: "{0} > {1} ? {1} : {0}", _aten.clamp_min.default: "{0} < {1} ? {1} : {0}",
    _aten.maximum.default: "{0} > {1} || {0} != {0} ? {0} : {1}",
    _aten.minimum.default: "{0} < {1} || {0} != {0} ? {0} : {1}",
    _aten.exp.default: "exp({0})", _aten.log.default: "log({0})",
    _aten.sqrt.default: "sqrt({0})", _aten.rsqrt.default: "1 / sqrt({0})",
    _aten.pow.Scalar: "pow({0}, {1})", _aten.pow.Tensor_Tensor: "pow({0}, {1})",
    _aten.lerp.Scalar: _LERP, _aten.lerp.Tensor: _LERP,
}  # fmt: skip
"""Expressions of arguments that are cast to the dtype of the result."""

LOGIC: dict[Any, str] = {_aten.bitwise_and.Tensor: "{0} && {1}", _aten.bitwise_not.default: "!{0}",
                         _aten.bitwise_or.Tensor: "{0} || {1}", _aten.logical_and.default: "{0} && {1}",
                         _aten.logical_not.default: "!{0}", _aten.logical_or.default: "{0} || {1}"}  # fmt: skip
for _name, _sign in {"eq": "==", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "ne": "!="}.items():
    LOGIC |= dict.fromkeys((getattr(_aten, _name).Scalar, getattr(_aten, _name).Tensor), f"{{0}} {_sign} {{1}}")
"""Expressions of arguments that are cast to their common dtype; the result is a bool."""


def literal(value: float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}LL"
    if math.isnan(value):
        return "0.0 / 0.0"
    return repr(value) if math.isfinite(value) else f"{math.copysign(1, value)} / 0.0"


_COMMON = """
typedef long long i64;
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
#define AS_IT_IS(T) INLINE T load(T x) { return x; } INLINE void store(T& to, T x) { to = x; }
AS_IT_IS(float) AS_IT_IS(double) AS_IT_IS(i64) AS_IT_IS(bool)
INLINE unsigned bf16_bits(unsigned bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
"""

CPU_HEADER = """#include <cmath>
#include <cstring>
using namespace std;
#define INLINE static inline __attribute__((always_inline))
""" + _COMMON + """
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
"""  # fmt: skip

CUDA_HEADER = "#define INLINE static __device__ __forceinline__\n" + _COMMON + """
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
"""  # fmt: skip
