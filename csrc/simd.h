// Sixteen floats, whatever the machine's registers are; one source for every instruction set.
//
//   F16  16 floats            one AVX-512 register, two of AVX2, four of NEON, or four small vectors
//   B32  16 pairs of bf16     what one step of a bf16 product reads
//   S32  16 pairs of int16    what one step of a product of codes reads
//   I16  16 int32             sums of such products
//
//   load, store                    16 floats, at any address; load_first, store_first: the first n, zero elsewhere or untouched
//   load_bf16, store_bf16          16 bf16 as floats; rounded to nearest even, NaN stays NaN
//   + - * / max min fmadd          lane by lane; max and min give the second argument where either is NaN
//   keep(a, lo, hi, other)         lanes lo <= i < hi of a, `other` elsewhere
//   round_nearest, scale2(a, n)    to an integer, ties to even; a * 2^n for integral n in [-126, 127]
//   first_of_pairs, second_...     pairs with the other element zeroed; ..._as_float: that element as a float
//   dot_pairs(acc, a, b)           acc + a.first * b.first + a.second * b.second, as the instruction orders it, or in this order; of S32 exact
//   load_codes, store_int16        32 int8 widened; 16 floats as the nearest int16, ties to even
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

// Four bytes at any address, as they lie.
OCTAVO_INLINE uint32_t load_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

OCTAVO_INLINE float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN stays NaN.
OCTAVO_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// float16 to float32 without branches: shift the exponent into place, scale by 2^112 (exact, subnormals too), restore inf and NaN.
OCTAVO_INLINE float half_to_float(uint16_t h) {
  uint32_t magnitude = h & 0x7fffu;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * std::bit_cast<float>(0x77800000u));
  bits = magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : bits;
  return std::bit_cast<float>(bits | (h & 0x8000u) << 16);
}

// float32 to float16, to nearest even. A number below 2^-14 is added to 0.5, whose last place is that of a subnormal float16.
OCTAVO_INLINE uint16_t float_to_half(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | sign);
}

}  // namespace octavo::OCTAVO_ISA

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__) && !defined(OCTAVO_PORTABLE)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace octavo::OCTAVO_ISA {

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
