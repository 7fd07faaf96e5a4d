// Products of a tile in the cache's dtype: bf16 and codes take two dimensions (or keys) a step, float32 one.
#pragma once
#include <type_traits>

#include "kernels.h"
#include "simd.h"

#define OCTAVO_MEMBER inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

inline constexpr int kHalf = kTile / 2;
inline constexpr float kMaxInput = 32767;      // of a 16-bit input of products
inline constexpr float kLeastTop = 0x1p-100f;  // what their unit is made of is no less, so that its inverse is finite

template <class T>
struct Product;

template <>
struct Product<uint16_t> {
  using Input = uint16_t;  // of queries and probabilities
  using Vector = B32;
  using Sum = F16;
  static constexpr int kDepth = 2;
  static OCTAVO_MEMBER Sum none() { return zero(); }
  static OCTAVO_MEMBER Vector load(const uint16_t* p) { return load_pairs(p); }
  static OCTAVO_MEMBER Vector spread(const uint16_t* p) { return set1_pair(load_word(p)); }
  static OCTAVO_MEMBER F16 add(F16 acc, Vector a, Vector b) { return dot_pairs(acc, a, b); }
  // Rounds 32 probabilities to p; their sum, by lane, is of the rounded ones.
  static OCTAVO_MEMBER F16 add_rounded(F16 acc, uint16_t* p, F16 a, F16 b) {
#if defined(__AVX512BF16__)
    B32 pairs{(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)};
    _mm512_storeu_si512(p, pairs.v);
#else
    store_bf16(p, a);
    store_bf16(p + kHalf, b);
    B32 pairs = load_pairs(p);
#endif
    return dot_pairs(acc, pairs, set1_pair(0x3f803f80));  // times one
  }
};

template <>
struct Product<float> {
  using Input = float;
  using Vector = F16;
  using Sum = F16;
  static constexpr int kDepth = 1;
  static OCTAVO_MEMBER Sum none() { return zero(); }
  static OCTAVO_MEMBER Vector load(const float* p) { return OCTAVO_ISA::load(p); }
  static OCTAVO_MEMBER Vector spread(const float* p) { return set1(*p); }
  static OCTAVO_MEMBER F16 add(F16 acc, Vector a, Vector b) { return fmadd(a, b, acc); }
  static OCTAVO_MEMBER F16 add_rounded(F16 acc, float* p, F16 a, F16 b) {
    store(p, a);
    store(p + kHalf, b);
    return acc + (a + b);
  }
};

template <>
struct Product<int8_t> {
  using Input = int16_t;
  using Vector = S32;
  using Sum = I16;
  static constexpr int kDepth = 2;
  static OCTAVO_MEMBER Sum none() { return zero_int(); }
  static OCTAVO_MEMBER Vector load(const int8_t* p) { return load_codes(p); }
  static OCTAVO_MEMBER Vector spread(const int16_t* p) { return set1_int16_pair(load_word(p)); }
  static OCTAVO_MEMBER Sum add(Sum acc, Vector a, Vector b) { return dot_pairs(acc, a, b); }
};

template <class T>
inline constexpr bool kIsCodes = std::is_same_v<T, int8_t>;
template <class T>
using Input = typename Product<T>::Input;

}  // namespace octavo::OCTAVO_ISA
