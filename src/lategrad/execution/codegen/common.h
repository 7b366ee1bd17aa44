// Types and conversions of all loops; INLINE is defined by the header that includes this.
typedef long long i64;
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
#define AS_IT_IS(T) INLINE T load(T x) { return x; } INLINE void store(T& to, T x) { to = x; }
AS_IT_IS(float) AS_IT_IS(double) AS_IT_IS(i64) AS_IT_IS(bool)
INLINE unsigned bf16_bits(unsigned bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
