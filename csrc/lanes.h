// Comparisons on F16, and what is built on them; beside simd.h, which has arithmetic only.
// A mask is 16 bits, bit i for lane i. Comparisons with NaN are false; mask_unordered says where either is NaN.
#pragma once
#include "simd.h"

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)

OCTAVO_INLINE uint32_t mask_greater(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
OCTAVO_INLINE uint32_t mask_at_least(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
OCTAVO_INLINE uint32_t mask_unordered(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }
// Lane i of `a` where bit i is set, of `b` elsewhere.
OCTAVO_INLINE F16 select_lanes(uint32_t mask, F16 a, F16 b) { return {_mm512_mask_blend_ps(static_cast<__mmask16>(mask), b.v, a.v)}; }
OCTAVO_INLINE F16 greater(F16 a, F16 b, F16 then, F16 otherwise) { return select_lanes(mask_greater(a, b), then, otherwise); }
OCTAVO_INLINE F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
// The lanes whose bits are set, packed to the front of p; 16 floats are written. Returns how many are meant.
OCTAVO_INLINE int compress(float* p, uint32_t mask, F16 a) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
  return __builtin_popcount(mask);
}
OCTAVO_INLINE void compress_ids(int32_t* p, uint32_t mask, int32_t first) {
  const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), ids));
}
OCTAVO_INLINE void compress_ids(int32_t* p, uint32_t mask, const int32_t* ids) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), _mm512_loadu_si512(ids)));
}

#else

#if defined(__AVX2__)

OCTAVO_INLINE uint32_t join_masks(__m256 lo, __m256 hi) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
OCTAVO_INLINE uint32_t mask_greater(F16 a, F16 b) {
  return join_masks(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
OCTAVO_INLINE uint32_t mask_at_least(F16 a, F16 b) {
  return join_masks(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
OCTAVO_INLINE uint32_t mask_unordered(F16 a, F16 b) {
  return join_masks(_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q));
}
OCTAVO_INLINE F16 greater(F16 a, F16 b, F16 then, F16 otherwise) {
  return {_mm256_blendv_ps(otherwise.lo, then.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(otherwise.hi, then.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}

#else

// The loops over an array are what compilers turn into vector code, where the machine has any.
#define OCTAVO_MASK_OF(condition)                       \
  alignas(64) float x[16], y[16];                       \
  store(x, a);                                          \
  store(y, b);                                          \
  uint32_t bits = 0;                                    \
  for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(condition) << i; \
  return bits
OCTAVO_INLINE uint32_t mask_greater(F16 a, F16 b) { OCTAVO_MASK_OF(x[i] > y[i]); }
OCTAVO_INLINE uint32_t mask_at_least(F16 a, F16 b) { OCTAVO_MASK_OF(x[i] >= y[i]); }
OCTAVO_INLINE uint32_t mask_unordered(F16 a, F16 b) { OCTAVO_MASK_OF((x[i] != x[i]) | (y[i] != y[i])); }
#undef OCTAVO_MASK_OF
OCTAVO_INLINE F16 greater(F16 a, F16 b, F16 then, F16 otherwise) {
  alignas(64) float x[16], y[16], t[16], o[16];
  store(x, a);
  store(y, b);
  store(t, then);
  store(o, otherwise);
  for (int i = 0; i < 16; i++) o[i] = x[i] > y[i] ? t[i] : o[i];
  return load(o);
}

#endif

OCTAVO_INLINE F16 select_lanes(uint32_t mask, F16 a, F16 b) {
  alignas(64) float x[16], y[16];
  store(x, a);
  store(y, b);
  for (int i = 0; i < 16; i++) y[i] = mask >> i & 1 ? x[i] : y[i];
  return load(y);
}
OCTAVO_INLINE F16 abs(F16 a) { return max(a, zero() - a); }
OCTAVO_INLINE int compress(float* p, uint32_t mask, F16 a) {
  alignas(64) float x[16];
  store(x, a);
  int n = 0;
  for (; mask; mask &= mask - 1) p[n++] = x[__builtin_ctz(mask)];
  return n;
}
OCTAVO_INLINE void compress_ids(int32_t* p, uint32_t mask, int32_t first) {
  for (; mask; mask &= mask - 1) *p++ = first + __builtin_ctz(mask);
}
OCTAVO_INLINE void compress_ids(int32_t* p, uint32_t mask, const int32_t* ids) {
  for (; mask; mask &= mask - 1) *p++ = ids[__builtin_ctz(mask)];
}

#endif

// The bits of n lanes.
OCTAVO_INLINE uint32_t mask_first(int64_t n) { return n >= 16 ? 0xffff : (1u << n) - 1; }

// Sixteen floats from p, or the first n and `other` in the rest.
OCTAVO_INLINE F16 load_or(const float* p, int64_t n, float other) {
  return n >= 16 ? load(p) : keep(load_first(p, static_cast<int>(n)), 0, static_cast<int>(n), other);
}

}  // namespace octavo::OCTAVO_ISA
