// float16 and float32, without branches, so that loops over them become vector code.
#pragma once
#include <bit>
#include <cstdint>

#include "simd.h"

namespace octavo::OCTAVO_ISA {

// Shift the exponent into place, scale by 2^112 (exact, subnormals too), restore inf and NaN.
OCTAVO_INLINE float half_to_float(uint16_t h) {
  uint32_t magnitude = h & 0x7fffu;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * std::bit_cast<float>(0x77800000u));
  bits = magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : bits;
  return std::bit_cast<float>(bits | (h & 0x8000u) << 16);
}

// To nearest even. A number below 2^-14 is added to 0.5, whose last place is that of a subnormal float16.
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
