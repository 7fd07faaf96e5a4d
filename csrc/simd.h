// Sixteen floats, whatever the machine's registers are; one source for every instruction set.
//
//   F16  16 floats            one AVX-512 register, two of AVX2, four of NEON, or four small vectors
//   B32  16 pairs of bf16     what one step of a bf16 product reads
//
// Everything lives in the namespace of its instruction set (see kernels.h). Sums and maxima over lanes are taken in one
// fixed order, and fmadd rounds once where the machine can, so a kernel's bits depend on its own arguments alone.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
OCTAVO_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE F16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
OCTAVO_INLINE void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v); }
OCTAVO_INLINE F16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
OCTAVO_INLINE __m256i round_bf16(F16 a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, is_nan, nan));
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F16 fmadd(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Lanes lo <= i < hi of a, `other` elsewhere.
OCTAVO_INLINE F16 keep(F16 a, int lo, int hi, float other) {
  __mmask16 m = static_cast<__mmask16>(((1u << hi) - 1) & ~((1u << lo) - 1));
  return {_mm512_mask_blend_ps(m, _mm512_set1_ps(other), a.v)};
}
OCTAVO_INLINE F16 round_nearest(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n in [-126, 127]
OCTAVO_INLINE F16 scale2(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

struct B32 {
  __m512i v;
};
OCTAVO_INLINE B32 load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE B32 set1_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
// Pairs with the second element (the upper half) zeroed, or the first.
OCTAVO_INLINE B32 first_of_pairs(B32 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0x0000ffff))}; }
OCTAVO_INLINE B32 second_of_pairs(B32 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))}; }
#if defined(__AVX512BF16__)
// acc[i] + a[i].second * b[i].second + a[i].first * b[i].first, as the instruction orders it
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#else
OCTAVO_INLINE F16 first_as_float(B32 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
OCTAVO_INLINE F16 second_as_float(B32 a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}; }
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) {
  return fmadd(second_as_float(a), second_as_float(b), fmadd(first_as_float(a), first_as_float(b), acc));
}
#endif

#elif defined(__AVX2__)

struct F16 {
  __m256 lo, hi;
};
// Eight lanes of ones where lo <= lane + offset < hi.
OCTAVO_INLINE __m256i lanes_between(int lo, int hi, int offset) {
  __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(offset));
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
}
OCTAVO_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
OCTAVO_INLINE F16 load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, lanes_between(0, n, 0)), _mm256_maskload_ps(p + 8, lanes_between(0, n, 8))};
}
OCTAVO_INLINE void store_first(float* p, F16 a, int n) {
  _mm256_maskstore_ps(p, lanes_between(0, n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, lanes_between(0, n, 8), a.hi);
}
OCTAVO_INLINE __m256 load_bf16_8(const uint16_t* p) {
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
OCTAVO_INLINE F16 load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
OCTAVO_INLINE __m256i round_bf16_8(__m256 a) {
  __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
OCTAVO_INLINE __m256i round_bf16(F16 a) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16_8(a.lo), round_bf16_8(a.hi)), 0xd8);
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a)); }
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
OCTAVO_INLINE F16 fmadd(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
OCTAVO_INLINE F16 keep(F16 a, int lo, int hi, float other) {
  __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, a.lo, _mm256_castsi256_ps(lanes_between(lo, hi, 0))),
          _mm256_blendv_ps(o, a.hi, _mm256_castsi256_ps(lanes_between(lo, hi, 8)))};
}
OCTAVO_INLINE F16 round_nearest(F16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
OCTAVO_INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
OCTAVO_INLINE F16 scale2(F16 a, F16 n) { return a * F16{power_of_two(n.lo), power_of_two(n.hi)}; }

struct B32 {
  __m256i lo, hi;
};
OCTAVO_INLINE B32 load_pairs(const uint16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
OCTAVO_INLINE B32 set1_pair(uint32_t pair) {
  __m256i v = _mm256_set1_epi32(static_cast<int>(pair));
  return {v, v};
}
OCTAVO_INLINE B32 and_pairs(B32 a, uint32_t mask) {
  __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
OCTAVO_INLINE B32 first_of_pairs(B32 a) { return and_pairs(a, 0x0000ffffu); }
OCTAVO_INLINE B32 second_of_pairs(B32 a) { return and_pairs(a, 0xffff0000u); }
OCTAVO_INLINE F16 first_as_float(B32 a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.hi, 16))};
}
OCTAVO_INLINE F16 second_as_float(B32 a) {
  B32 high = second_of_pairs(a);
  return {_mm256_castsi256_ps(high.lo), _mm256_castsi256_ps(high.hi)};
}
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) {
  return fmadd(second_as_float(a), second_as_float(b), fmadd(first_as_float(a), first_as_float(b), acc));
}

#elif defined(__aarch64__) && !defined(OCTAVO_PORTABLE)

#define OCTAVO_EACH for (int i = 0; i < 4; i++)
struct F16 {
  float32x4_t v[4];
};
// Four lanes of ones where lo <= lane + offset < hi.
OCTAVO_INLINE uint32x4_t lanes_between(int lo, int hi, int offset) {
  constexpr int32_t first[4] = {0, 1, 2, 3};
  int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(offset));
  return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
}
OCTAVO_INLINE F16 set1(float x) { F16 r; OCTAVO_EACH r.v[i] = vdupq_n_f32(x); return r; }
OCTAVO_INLINE F16 zero() { return set1(0.0f); }
OCTAVO_INLINE F16 load(const float* p) { F16 r; OCTAVO_EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
OCTAVO_INLINE void store(float* p, F16 a) { OCTAVO_EACH vst1q_f32(p + 4 * i, a.v[i]); }
OCTAVO_INLINE F16 load_first(const float* p, int n) {
  float x[16] = {};
  std::memcpy(x, p, sizeof(float) * n);
  return load(x);
}
OCTAVO_INLINE void store_first(float* p, F16 a, int n) {
  float x[16];
  store(x, a);
  std::memcpy(p, x, sizeof(float) * n);
}
OCTAVO_INLINE F16 load_bf16(const uint16_t* p) {
  F16 r;
  OCTAVO_EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return r;
}
OCTAVO_INLINE uint16x4_t round_bf16_4(float32x4_t a) {
  uint32x4_t bits = vreinterpretq_u32_f32(a), high = vshrq_n_u32(bits, 16);
  uint32x4_t up = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff))), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(a, a), up, vorrq_u32(high, vdupq_n_u32(0x40))));
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) { OCTAVO_EACH vst1_u16(p + 4 * i, round_bf16_4(a.v[i])); }
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
// Compared and selected, so that NaN takes the second argument as on x86.
OCTAVO_INLINE F16 max(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { OCTAVO_EACH a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); return a; }
OCTAVO_INLINE F16 fmadd(F16 a, F16 b, F16 c) { OCTAVO_EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
OCTAVO_INLINE F16 keep(F16 a, int lo, int hi, float other) {
  OCTAVO_EACH a.v[i] = vbslq_f32(lanes_between(lo, hi, 4 * i), a.v[i], vdupq_n_f32(other));
  return a;
}
OCTAVO_INLINE F16 round_nearest(F16 a) { OCTAVO_EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }
OCTAVO_INLINE F16 scale2(F16 a, F16 n) {
  OCTAVO_EACH {
    int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23);
    a.v[i] = vmulq_f32(a.v[i], vreinterpretq_f32_s32(exponent));
  }
  return a;
}

struct B32 {
  uint32x4_t v[4];
};
OCTAVO_INLINE B32 load_pairs(const uint16_t* p) {
  B32 r;
  OCTAVO_EACH r.v[i] = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
  return r;
}
OCTAVO_INLINE B32 set1_pair(uint32_t pair) { B32 r; OCTAVO_EACH r.v[i] = vdupq_n_u32(pair); return r; }
OCTAVO_INLINE B32 and_pairs(B32 a, uint32_t mask) { OCTAVO_EACH a.v[i] = vandq_u32(a.v[i], vdupq_n_u32(mask)); return a; }
OCTAVO_INLINE B32 first_of_pairs(B32 a) { return and_pairs(a, 0x0000ffffu); }
OCTAVO_INLINE B32 second_of_pairs(B32 a) { return and_pairs(a, 0xffff0000u); }
OCTAVO_INLINE F16 first_as_float(B32 a) { F16 r; OCTAVO_EACH r.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(a.v[i], 16)); return r; }
OCTAVO_INLINE F16 second_as_float(B32 a) {
  B32 high = second_of_pairs(a);
  F16 r;
  OCTAVO_EACH r.v[i] = vreinterpretq_f32_u32(high.v[i]);
  return r;
}
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) {
  return fmadd(second_as_float(a), second_as_float(b), fmadd(first_as_float(a), first_as_float(b), acc));
}
#undef OCTAVO_EACH

#else  // vectors of four that any GCC or Clang makes the best of

#define OCTAVO_EACH for (int i = 0; i < 4; i++)
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t UInt4 __attribute__((vector_size(16)));
typedef float Float4InMemory __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t UInt4InMemory __attribute__((vector_size(16), aligned(2), may_alias));
struct F16 {
  Float4 v[4];
};
OCTAVO_INLINE Float4 four(float x) { return Float4{x, x, x, x}; }
OCTAVO_INLINE UInt4 four_bits(uint32_t x) { return UInt4{x, x, x, x}; }
OCTAVO_INLINE F16 set1(float x) { F16 r; OCTAVO_EACH r.v[i] = four(x); return r; }
OCTAVO_INLINE F16 zero() { return set1(0.0f); }
OCTAVO_INLINE F16 load(const float* p) { F16 r; OCTAVO_EACH r.v[i] = *reinterpret_cast<const Float4InMemory*>(p + 4 * i); return r; }
OCTAVO_INLINE void store(float* p, F16 a) { OCTAVO_EACH *reinterpret_cast<Float4InMemory*>(p + 4 * i) = a.v[i]; }
OCTAVO_INLINE F16 load_first(const float* p, int n) {
  float x[16] = {};
  std::memcpy(x, p, sizeof(float) * n);
  return load(x);
}
OCTAVO_INLINE void store_first(float* p, F16 a, int n) {
  float x[16];
  store(x, a);
  std::memcpy(p, x, sizeof(float) * n);
}
OCTAVO_INLINE F16 load_bf16(const uint16_t* p) {
  F16 r;
  OCTAVO_EACH r.v[i] = std::bit_cast<Float4>(UInt4{p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 16);
  return r;
}
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) {
  OCTAVO_EACH for (int j = 0; j < 4; j++) p[4 * i + j] = float_to_bf16(a.v[i][j]);
}
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { OCTAVO_EACH a.v[i] += b.v[i]; return a; }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { OCTAVO_EACH a.v[i] -= b.v[i]; return a; }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { OCTAVO_EACH a.v[i] *= b.v[i]; return a; }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { OCTAVO_EACH a.v[i] /= b.v[i]; return a; }
OCTAVO_INLINE F16 max(F16 a, F16 b) { OCTAVO_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { OCTAVO_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
OCTAVO_INLINE F16 fmadd(F16 a, F16 b, F16 c) { OCTAVO_EACH c.v[i] = a.v[i] * b.v[i] + c.v[i]; return c; }
OCTAVO_INLINE F16 keep(F16 a, int lo, int hi, float other) {
  OCTAVO_EACH {
    Int4 lane = Int4{0, 1, 2, 3} + 4 * i;
    a.v[i] = (lane >= lo) & (lane < hi) ? a.v[i] : four(other);
  }
  return a;
}
// Adding and taking away 1.5 x 2^23 leaves the nearest integer, ties to even; greater numbers are integers already.
OCTAVO_INLINE F16 round_nearest(F16 a) {
  const Float4 magic = four(12582912.0f), limit = four(4194304.0f);
  OCTAVO_EACH a.v[i] = (a.v[i] < limit) & (a.v[i] > -limit) ? (a.v[i] + magic) - magic : a.v[i];
  return a;
}
OCTAVO_INLINE F16 scale2(F16 a, F16 n) {
  OCTAVO_EACH a.v[i] *= std::bit_cast<Float4>((__builtin_convertvector(n.v[i], Int4) + 127) << 23);
  return a;
}

struct B32 {
  UInt4 v[4];
};
OCTAVO_INLINE B32 load_pairs(const uint16_t* p) {
  B32 r;
  OCTAVO_EACH r.v[i] = *reinterpret_cast<const UInt4InMemory*>(p + 8 * i);
  return r;
}
OCTAVO_INLINE B32 set1_pair(uint32_t pair) { B32 r; OCTAVO_EACH r.v[i] = four_bits(pair); return r; }
OCTAVO_INLINE B32 first_of_pairs(B32 a) { OCTAVO_EACH a.v[i] &= 0x0000ffffu; return a; }
OCTAVO_INLINE B32 second_of_pairs(B32 a) { OCTAVO_EACH a.v[i] &= 0xffff0000u; return a; }
OCTAVO_INLINE F16 first_as_float(B32 a) { F16 r; OCTAVO_EACH r.v[i] = std::bit_cast<Float4>(a.v[i] << 16); return r; }
OCTAVO_INLINE F16 second_as_float(B32 a) { F16 r; OCTAVO_EACH r.v[i] = std::bit_cast<Float4>(a.v[i] & 0xffff0000u); return r; }
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) {
  return fmadd(second_as_float(a), second_as_float(b), fmadd(first_as_float(a), first_as_float(b), acc));
}
#undef OCTAVO_EACH

#endif

// Sum and maximum of the 16 lanes: halves folded onto each other, 8, 4, 2, 1.
OCTAVO_INLINE float reduce_add(F16 a) {
  alignas(64) float x[16];
  store(x, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
OCTAVO_INLINE float reduce_max(F16 a) {
  alignas(64) float x[16];
  store(x, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}

// e^x, relative error under 2e-7 for x in [-87, 88], clamped outside (so e^-inf is 1e-38, not 0: mask instead); NaN is not preserved.
// Cody-Waite reduction to [-ln2/2, ln2/2] and a degree-6 polynomial (Cephes' expf, coefficients by Moshier).
OCTAVO_INLINE F16 exp(F16 x) {
  F16 c = min(max(x, set1(-87.33654f)), set1(88.02969f));
  F16 n = round_nearest(c * set1(1.44269504088896341f));
  F16 r = fmadd(n, set1(-0.693359375f), c);
  r = fmadd(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fmadd(p, r, set1(1.3981999507e-3f));
  p = fmadd(p, r, set1(8.3334519073e-3f));
  p = fmadd(p, r, set1(4.1665795894e-2f));
  p = fmadd(p, r, set1(1.6666665459e-1f));
  p = fmadd(p, r, set1(5.0000001201e-1f));
  p = fmadd(p, r * r, r + set1(1.0f));
  return scale2(p, n);
}

}  // namespace octavo::OCTAVO_ISA
