// Sixteen floats, whatever the machine's registers are; one source for every instruction set.
//
//   F16  16 floats            one AVX-512 register, two of AVX2, four of NEON, or plain loops
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

#else  // plain loops over 16 lanes; AVX2 and NEON forms belong above this branch

struct F16 {
  float v[16];
};
#define OCTAVO_EACH for (int i = 0; i < 16; i++)
OCTAVO_INLINE F16 zero() { return {}; }
OCTAVO_INLINE F16 set1(float x) { F16 r; OCTAVO_EACH r.v[i] = x; return r; }
OCTAVO_INLINE F16 load(const float* p) { F16 r; std::memcpy(r.v, p, sizeof r.v); return r; }
OCTAVO_INLINE void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
OCTAVO_INLINE F16 load_first(const float* p, int n) { F16 r{}; for (int i = 0; i < n; i++) r.v[i] = p[i]; return r; }
OCTAVO_INLINE void store_first(float* p, F16 a, int n) { for (int i = 0; i < n; i++) p[i] = a.v[i]; }
OCTAVO_INLINE F16 load_bf16(const uint16_t* p) { F16 r; OCTAVO_EACH r.v[i] = bf16_to_float(p[i]); return r; }
OCTAVO_INLINE void store_bf16(uint16_t* p, F16 a) { OCTAVO_EACH p[i] = float_to_bf16(a.v[i]); }
OCTAVO_INLINE F16 operator+(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
OCTAVO_INLINE F16 operator-(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
OCTAVO_INLINE F16 operator*(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
OCTAVO_INLINE F16 operator/(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
OCTAVO_INLINE F16 max(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
OCTAVO_INLINE F16 min(F16 a, F16 b) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
OCTAVO_INLINE F16 fmadd(F16 a, F16 b, F16 c) { F16 r; OCTAVO_EACH r.v[i] = a.v[i] * b.v[i] + c.v[i]; return r; }
OCTAVO_INLINE F16 keep(F16 a, int lo, int hi, float other) { F16 r; OCTAVO_EACH r.v[i] = i >= lo && i < hi ? a.v[i] : other; return r; }
OCTAVO_INLINE F16 round_nearest(F16 a) { F16 r; OCTAVO_EACH r.v[i] = std::nearbyint(a.v[i]); return r; }
OCTAVO_INLINE F16 scale2(F16 a, F16 n) {
  F16 r;
  OCTAVO_EACH r.v[i] = a.v[i] * std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
  return r;
}

struct B32 {
  uint32_t v[16];
};
OCTAVO_INLINE B32 load_pairs(const uint16_t* p) { B32 r; std::memcpy(r.v, p, sizeof r.v); return r; }
OCTAVO_INLINE B32 set1_pair(uint32_t pair) { B32 r; OCTAVO_EACH r.v[i] = pair; return r; }
OCTAVO_INLINE B32 first_of_pairs(B32 a) { OCTAVO_EACH a.v[i] &= 0x0000ffffu; return a; }
OCTAVO_INLINE B32 second_of_pairs(B32 a) { OCTAVO_EACH a.v[i] &= 0xffff0000u; return a; }
OCTAVO_INLINE F16 dot_pairs(F16 acc, B32 a, B32 b) {
  OCTAVO_EACH acc.v[i] += std::bit_cast<float>(a.v[i] << 16) * std::bit_cast<float>(b.v[i] << 16);
  OCTAVO_EACH acc.v[i] += std::bit_cast<float>(a.v[i] & 0xffff0000u) * std::bit_cast<float>(b.v[i] & 0xffff0000u);
  return acc;
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
