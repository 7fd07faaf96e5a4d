// Sixteen floats in two AVX2 registers; included by simd.h, which says what each function does.
#pragma once

namespace octavo::OCTAVO_ISA {

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

struct S32 {
  __m256i lo, hi;
};
struct I16 {
  __m256i lo, hi;
};
OCTAVO_INLINE __m256i load_codes_16(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
OCTAVO_INLINE S32 load_codes(const int8_t* p) { return {load_codes_16(p), load_codes_16(p + 16)}; }
OCTAVO_INLINE S32 set1_int16_pair(uint32_t pair) {
  __m256i v = _mm256_set1_epi32(static_cast<int>(pair));
  return {v, v};
}
OCTAVO_INLINE I16 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
OCTAVO_INLINE I16 dot_pairs(I16 acc, S32 a, S32 b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
OCTAVO_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
OCTAVO_INLINE void store_int16(int16_t* p, F16 a) {
  __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}

}  // namespace octavo::OCTAVO_ISA
