// Products of the codes of quantised weights with quantised inputs: exact in int32 on every instruction set.
//
//   CodeSum      16 sums of products; to_float
//   Codes64      the codes of 16 outputs for one step of four inputs, [16][4] bytes
//   load_codes, low_nibbles, high_nibbles, look_up
//   product_factors<codes>  codes as the product reads them: those that take all 8 bits signed, with zero_shift taken off, where
//                           the machine's products want it
//   dot<codes, steps>       start + sum over the steps of the products of w[p][step] with x[4 step .. 4 step + 3], for each panel p
//   load_halves, load_int8  16 float16 or int8 as floats
//   greatest_magnitude      of 32 floats, as its bits
//   round_16                16 floats times a factor to the nearest int8, ties to even; returns their sum
//
// AVX2 and AVX-512 without VNNI add two products in int16, saturating: 2 * 127 * 63 fits, and so do sums of eight such pairs
// of nibbles, or two of `bytes`; codes of 8 bits are made signed and multiply as |w| * (x with the sign of w), 2 * 128 * 127.
#pragma once
#include "dequantize.h"
#include "simd.h"
#include "unroll.h"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE constexpr bool takes_8_bits(Codes c) { return c == Codes::octets || c == Codes::table; }
OCTAVO_INLINE constexpr int max_code(Codes c) { return takes_8_bits(c) ? 255 : c == Codes::bytes ? 63 : 15; }

#if defined(__AVX512F__)

struct Codes64 {
  __m512i v;
};
OCTAVO_INLINE F16 load_halves(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
OCTAVO_INLINE F16 load_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
OCTAVO_INLINE Codes64 load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE Codes64 low_nibbles(Codes64 c) { return {_mm512_and_si512(c.v, _mm512_set1_epi8(15))}; }
OCTAVO_INLINE Codes64 high_nibbles(Codes64 c) { return low_nibbles({_mm512_srli_epi16(c.v, 4)}); }
OCTAVO_INLINE Codes64 look_up(Codes64 c) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIQ4Values));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), c.v)};
}
OCTAVO_INLINE Codes64 flip_signs(Codes64 c) { return {_mm512_xor_si512(c.v, _mm512_set1_epi8(-128))}; }
OCTAVO_INLINE uint32_t greatest_magnitude(const float* x) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), mask), high = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
}
OCTAVO_INLINE __m128i round_16(const float* x, float factor) {
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor))));
}

#elif defined(__AVX2__)

struct Codes64 {
  __m256i lo, hi;
};
OCTAVO_INLINE F16 load_halves(const uint16_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
OCTAVO_INLINE F16 load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
OCTAVO_INLINE Codes64 load_codes(const uint8_t* p) {
  const __m256i* codes = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(codes), _mm256_loadu_si256(codes + 1)};
}
OCTAVO_INLINE Codes64 low_nibbles(Codes64 c) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(c.lo, mask), _mm256_and_si256(c.hi, mask)};
}
OCTAVO_INLINE Codes64 high_nibbles(Codes64 c) { return low_nibbles({_mm256_srli_epi16(c.lo, 4), _mm256_srli_epi16(c.hi, 4)}); }
OCTAVO_INLINE Codes64 look_up(Codes64 c) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIQ4Values)));
  return {_mm256_shuffle_epi8(table, c.lo), _mm256_shuffle_epi8(table, c.hi)};
}
OCTAVO_INLINE Codes64 flip_signs(Codes64 c) {
  const __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(c.lo, sign), _mm256_xor_si256(c.hi, sign)};
}
OCTAVO_INLINE __m256i load_magnitudes(const float* x) {
  return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), _mm256_set1_epi32(0x7fffffff));
}
OCTAVO_INLINE uint32_t greatest_magnitude(const float* x) {
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(load_magnitudes(x), load_magnitudes(x + 8)),
                                         _mm256_max_epu32(load_magnitudes(x + 16), load_magnitudes(x + 24)));
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}
OCTAVO_INLINE __m256i round_8(const float* x, float factor) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor)));
}
OCTAVO_INLINE __m128i round_16(const float* x, float factor) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(round_8(x, factor), round_8(x + 8, factor)), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

#elif defined(__aarch64__) && !defined(OCTAVO_PORTABLE)

#define OCTAVO_EACH for (int i = 0; i < 4; i++)
struct Codes64 {
  uint8x16_t v[4];
};
OCTAVO_INLINE F16 load_halves(const uint16_t* p) {
  F16 r;
  OCTAVO_EACH r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return r;
}
OCTAVO_INLINE F16 load_int8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
OCTAVO_INLINE Codes64 load_codes(const uint8_t* p) { Codes64 r; OCTAVO_EACH r.v[i] = vld1q_u8(p + 16 * i); return r; }
OCTAVO_INLINE Codes64 low_nibbles(Codes64 c) { OCTAVO_EACH c.v[i] = vandq_u8(c.v[i], vdupq_n_u8(15)); return c; }
OCTAVO_INLINE Codes64 high_nibbles(Codes64 c) { OCTAVO_EACH c.v[i] = vshrq_n_u8(c.v[i], 4); return c; }
OCTAVO_INLINE Codes64 look_up(Codes64 c) {
  const uint8x16_t table = vld1q_u8(kIQ4Values);
  OCTAVO_EACH c.v[i] = vqtbl1q_u8(table, c.v[i]);
  return c;
}
OCTAVO_INLINE Codes64 flip_signs(Codes64 c) { OCTAVO_EACH c.v[i] = veorq_u8(c.v[i], vdupq_n_u8(128)); return c; }

#else

struct Codes64 {
  uint8_t v[64];
};
OCTAVO_INLINE F16 load_halves(const uint16_t* p) {
  alignas(64) float x[16];
  for (int i = 0; i < 16; i++) x[i] = half_to_float(p[i]);
  return load(x);
}
OCTAVO_INLINE F16 load_int8(const int8_t* p) {
  alignas(64) float x[16];
  for (int i = 0; i < 16; i++) x[i] = static_cast<float>(p[i]);
  return load(x);
}
OCTAVO_INLINE Codes64 load_codes(const uint8_t* p) {
  Codes64 c;
  std::memcpy(c.v, p, sizeof c.v);
  return c;
}
OCTAVO_INLINE Codes64 low_nibbles(Codes64 c) {
  for (uint8_t& v : c.v) v &= 15;
  return c;
}
OCTAVO_INLINE Codes64 high_nibbles(Codes64 c) {
  for (uint8_t& v : c.v) v >>= 4;
  return c;
}
OCTAVO_INLINE Codes64 look_up(Codes64 c) {
  for (uint8_t& v : c.v) v = kIQ4Values[v];
  return c;
}
OCTAVO_INLINE Codes64 flip_signs(Codes64 c) {
  for (uint8_t& v : c.v) v ^= 128;
  return c;
}

// Sums stay under 2^24, so that floats are integers enough, and multiply faster where nothing else is known of a machine.
struct CodeSum {
  F16 v;
};
OCTAVO_INLINE F16 to_float(CodeSum a) { return a.v; }

#endif

#if defined(__AVX2__)

OCTAVO_INLINE int32_t round_16(const float* x, float factor, int8_t* out) {
  const __m128i codes = round_16(x, factor);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());  // of codes + 128, by eights
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

#else

OCTAVO_INLINE uint32_t greatest_magnitude(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < 32; i++) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}
OCTAVO_INLINE int32_t round_16(const float* x, float factor, int8_t* out) {
  for (int i = 0; i < 16; i++) {
    const float shifted = x[i] * factor + 12582912.0f;  // 1.5 * 2^23: the integer is in the lowest bits
    out[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(shifted));
  }
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += out[i];
  return sum;
}

#endif

#if defined(__AVX2__) || (defined(__aarch64__) && !defined(OCTAVO_PORTABLE))

using Factors = Codes64;
using CodeSum = I16;
OCTAVO_INLINE Factors to_factors(Codes64 c) { return c; }

#endif

#if defined(__AVX512VNNI__)

inline constexpr int kZeroShift = 0;
template <Codes kCodes, int kCount, int PANELS, int kSteps>
OCTAVO_INLINE void dot(const Factors (&w)[PANELS][kSteps], int first, const int8_t* x, int32_t start, CodeSum (&sums)[PANELS]) {
  for (CodeSum& sum : sums) sum.v = _mm512_set1_epi32(start);
  OCTAVO_UNROLL
  for (int j = 0; j < kCount; j++) {
    const __m512i four = _mm512_set1_epi32(static_cast<int32_t>(load_word(x + 4 * j)));
    for (int p = 0; p < PANELS; p++) sums[p].v = _mm512_dpbusd_epi32(sums[p].v, w[p][first + j].v, four);  // chains that take turns
  }
}

#elif defined(__AVX2__)

inline constexpr int kZeroShift = 128;
#if defined(__AVX512F__)
using Vector = __m512i;
OCTAVO_INLINE Vector set1_i32(int32_t x) { return _mm512_set1_epi32(x); }
OCTAVO_INLINE Vector add_i32(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
OCTAVO_INLINE Vector add_i16(Vector a, Vector b) { return _mm512_add_epi16(a, b); }
OCTAVO_INLINE Vector multiply_pairs(Vector w, Vector x) { return _mm512_maddubs_epi16(w, x); }
OCTAVO_INLINE Vector multiply_signed_pairs(Vector w, Vector x) {
  return _mm512_maddubs_epi16(_mm512_abs_epi8(w), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x));
}
OCTAVO_INLINE Vector widen_pairs(Vector a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
#else
using Vector = __m256i;
OCTAVO_INLINE Vector set1_i32(int32_t x) { return _mm256_set1_epi32(x); }
OCTAVO_INLINE Vector add_i32(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
OCTAVO_INLINE Vector add_i16(Vector a, Vector b) { return _mm256_add_epi16(a, b); }
OCTAVO_INLINE Vector multiply_pairs(Vector w, Vector x) { return _mm256_maddubs_epi16(w, x); }
OCTAVO_INLINE Vector multiply_signed_pairs(Vector w, Vector x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
OCTAVO_INLINE Vector widen_pairs(Vector a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
#endif

// kPairs products fit in int16 before they are widened.
template <Codes kCodes, int kCount>
OCTAVO_INLINE Vector dot_part(const Vector (&w)[kCount], const int8_t* x, int32_t start) {
  constexpr int kFit = 32767 / (2 * 127 * max_code(kCodes)), kAtOnce = kFit < 1 ? 1 : kFit > kCount ? kCount : kFit;
  Vector sum = set1_i32(start);
  OCTAVO_UNROLL
  for (int j = 0; j < kCount; j += kAtOnce) {
    Vector pairs = {};
    OCTAVO_UNROLL
    for (int i = j; i < j + kAtOnce; i++) {
      const Vector four = set1_i32(static_cast<int32_t>(load_word(x + 4 * i)));
      const Vector product = takes_8_bits(kCodes) ? multiply_signed_pairs(w[i], four) : multiply_pairs(w[i], four);
      pairs = i == j ? product : add_i16(pairs, product);
    }
    sum = add_i32(sum, widen_pairs(pairs));
  }
  return sum;
}

template <Codes kCodes, int kCount>
OCTAVO_INLINE CodeSum dot_panel(const Factors* w, const int8_t* x, int32_t start) {
#if defined(__AVX512F__)
  Vector all[kCount];
  for (int j = 0; j < kCount; j++) all[j] = w[j].v;
  return {dot_part<kCodes, kCount>(all, x, start)};
#else
  Vector lo[kCount], hi[kCount];
  for (int j = 0; j < kCount; j++) lo[j] = w[j].lo, hi[j] = w[j].hi;
  return {dot_part<kCodes, kCount>(lo, x, start), dot_part<kCodes, kCount>(hi, x, start)};
#endif
}

#elif defined(__aarch64__) && !defined(OCTAVO_PORTABLE)

inline constexpr int kZeroShift = 128;
OCTAVO_INLINE int32x4_t add_products(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, x);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(x)));
  return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}
template <Codes kCodes, int kCount>
OCTAVO_INLINE CodeSum dot_panel(const Factors* w, const int8_t* x, int32_t start) {
  CodeSum sum;
  OCTAVO_EACH sum.v[i] = vdupq_n_s32(start);
  for (int j = 0; j < kCount; j++) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(static_cast<int32_t>(load_word(x + 4 * j))));
    OCTAVO_EACH sum.v[i] = add_products(sum.v[i], vreinterpretq_s8_u8(w[j].v[i]), four);
  }
  return sum;
}
#undef OCTAVO_EACH

#else

inline constexpr int kZeroShift = 128;
struct Factors {
  F16 v[4];  // for each of four inputs
};
OCTAVO_INLINE Factors to_factors(Codes64 c) {
  alignas(64) float x[4][16];
  for (int i = 0; i < 64; i++) x[i % 4][i / 4] = static_cast<float>(static_cast<int8_t>(c.v[i]));
  return {load(x[0]), load(x[1]), load(x[2]), load(x[3])};
}
template <Codes kCodes, int kCount>
OCTAVO_INLINE CodeSum dot_panel(const Factors* w, const int8_t* x, int32_t start) {
  F16 sum = set1(static_cast<float>(start));
  for (int i = 0; i < 4 * kCount; i++) sum = fmadd(w[i / 4].v[i % 4], set1(static_cast<float>(x[i])), sum);
  return {sum};
}

#endif

#if !defined(__AVX512VNNI__)

template <Codes kCodes, int kCount, int PANELS, int kSteps>
OCTAVO_INLINE void dot(const Factors (&w)[PANELS][kSteps], int first, const int8_t* x, int32_t start, CodeSum (&sums)[PANELS]) {
  for (int p = 0; p < PANELS; p++) sums[p] = dot_panel<kCodes, kCount>(w[p] + first, x, start);
}

#endif

OCTAVO_INLINE constexpr int zero_shift(Codes c) { return takes_8_bits(c) ? kZeroShift : 0; }

template <Codes kCodes>
OCTAVO_INLINE Factors product_factors(Codes64 c) {
  if constexpr (kCodes == Codes::table) c = look_up(c);
  if constexpr (zero_shift(kCodes) != 0) c = flip_signs(c);
  return to_factors(c);
}

}  // namespace octavo::OCTAVO_ISA
