// Sixteen floats in four NEON registers; included by simd.h, which says what each function does.
#pragma once

namespace octavo::OCTAVO_ISA {

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

struct S32 {
  int16x8_t v[4];
};
struct I16 {
  int32x4_t v[4];
};
OCTAVO_INLINE S32 load_codes(const int8_t* p) { S32 r; OCTAVO_EACH r.v[i] = vmovl_s8(vld1_s8(p + 8 * i)); return r; }
OCTAVO_INLINE S32 set1_int16_pair(uint32_t pair) { S32 r; OCTAVO_EACH r.v[i] = vreinterpretq_s16_u32(vdupq_n_u32(pair)); return r; }
OCTAVO_INLINE I16 zero_int() { I16 r; OCTAVO_EACH r.v[i] = vdupq_n_s32(0); return r; }
OCTAVO_INLINE I16 dot_pairs(I16 acc, S32 a, S32 b) {
  OCTAVO_EACH {
    int32x4_t low = vmull_s16(vget_low_s16(a.v[i]), vget_low_s16(b.v[i])), high = vmull_high_s16(a.v[i], b.v[i]);
    acc.v[i] = vaddq_s32(acc.v[i], vpaddq_s32(low, high));
  }
  return acc;
}
OCTAVO_INLINE F16 to_float(I16 a) { F16 r; OCTAVO_EACH r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
OCTAVO_INLINE void store_int16(int16_t* p, F16 a) { OCTAVO_EACH vst1_s16(p + 4 * i, vmovn_s32(vcvtnq_s32_f32(a.v[i]))); }
#undef OCTAVO_EACH

}  // namespace octavo::OCTAVO_ISA
