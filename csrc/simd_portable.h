// Sixteen floats in four small vectors that any GCC or Clang makes the best of; included by simd.h, which says what each function does.
#pragma once

namespace octavo::OCTAVO_ISA {

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

struct S32 {
  Int4 first[4], second[4];
};
struct I16 {
  Int4 v[4];
};
OCTAVO_INLINE S32 load_codes(const int8_t* p) {
  S32 r;
  OCTAVO_EACH {
    r.first[i] = Int4{p[8 * i], p[8 * i + 2], p[8 * i + 4], p[8 * i + 6]};
    r.second[i] = Int4{p[8 * i + 1], p[8 * i + 3], p[8 * i + 5], p[8 * i + 7]};
  }
  return r;
}
OCTAVO_INLINE S32 set1_int16_pair(uint32_t pair) {
  const int32_t first = static_cast<int16_t>(pair), second = static_cast<int16_t>(pair >> 16);
  S32 r;
  OCTAVO_EACH r.first[i] = Int4{first, first, first, first}, r.second[i] = Int4{second, second, second, second};
  return r;
}
OCTAVO_INLINE I16 zero_int() { return {}; }
OCTAVO_INLINE I16 dot_pairs(I16 acc, S32 a, S32 b) { OCTAVO_EACH acc.v[i] += a.first[i] * b.first[i] + a.second[i] * b.second[i]; return acc; }
OCTAVO_INLINE F16 to_float(I16 a) { F16 r; OCTAVO_EACH r.v[i] = __builtin_convertvector(a.v[i], Float4); return r; }
OCTAVO_INLINE void store_int16(int16_t* p, F16 a) {
  const F16 whole = round_nearest(a);
  OCTAVO_EACH for (int j = 0; j < 4; j++) p[4 * i + j] = whole.v[i][j] == whole.v[i][j] ? static_cast<int16_t>(whole.v[i][j]) : 0;
}
#undef OCTAVO_EACH

}  // namespace octavo::OCTAVO_ISA
