// Sixteen floats in one AVX-512 register; included by simd.h, which says what each function does.
#pragma once

namespace octavo::OCTAVO_ISA {

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

struct S32 {
  __m512i v;
};
struct I16 {
  __m512i v;
};
OCTAVO_INLINE S32 load_codes(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
OCTAVO_INLINE S32 set1_int16_pair(uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
OCTAVO_INLINE I16 zero_int() { return {_mm512_setzero_si512()}; }
#if defined(__AVX512VNNI__)
OCTAVO_INLINE I16 dot_pairs(I16 acc, S32 a, S32 b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }
#else
OCTAVO_INLINE I16 dot_pairs(I16 acc, S32 a, S32 b) { return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v))}; }
#endif
OCTAVO_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE void store_int16(int16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

}  // namespace octavo::OCTAVO_ISA
