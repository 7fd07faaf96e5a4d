// Element formats of checkpoints to float32. Layouts and formulas are drawn in src/octavo/kernels/dequantize.py.
//
// Products and sums round one by one (-ffp-contract=off), so that every instruction set gives the bits of the definition.
#include "dequantize.h"

#include "half.h"
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
OCTAVO_INLINE uint32_t load_u32(const uint8_t* p) { return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16; }

OCTAVO_INLINE float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

struct F32Format {
  static constexpr int kSize = 1, kBytes = 4;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) { *out = std::bit_cast<float>(load_u32(b)); }
};
struct F16Format {
  static constexpr int kSize = 1, kBytes = 2;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) { *out = load_half(b); }
};
struct BF16Format {
  static constexpr int kSize = 1, kBytes = 2;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) { *out = bf16_to_float(load_u16(b)); }
};

// 32 weights: low nibbles, then high ones, each shaped by `value`.
template <class Value>
OCTAVO_INLINE void nibbles(const uint8_t* q, float* out, const Value& value) {
  for (int i = 0; i < 16; i++) out[i] = value(q[i] & 15, i);
  for (int i = 0; i < 16; i++) out[16 + i] = value(q[i] >> 4, 16 + i);
}

struct Q4_0 {
  static constexpr int kSize = 32, kBytes = 18;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b);
    nibbles(b + 2, out, [=](int q, int) { return d * static_cast<float>(q - 8); });
  }
};
struct Q4_1 {
  static constexpr int kSize = 32, kBytes = 20;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b), m = load_half(b + 2);
    nibbles(b + 4, out, [=](int q, int) { return d * static_cast<float>(q) + m; });
  }
};
struct Q5_0 {
  static constexpr int kSize = 32, kBytes = 22;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b);
    uint32_t fifth = load_u32(b + 2);
    nibbles(b + 6, out, [=](int q, int i) { return d * static_cast<float>((q | static_cast<int>(fifth >> i & 1) << 4) - 16); });
  }
};
struct Q5_1 {
  static constexpr int kSize = 32, kBytes = 24;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b), m = load_half(b + 2);
    uint32_t fifth = load_u32(b + 4);
    nibbles(b + 8, out, [=](int q, int i) { return d * static_cast<float>(q | static_cast<int>(fifth >> i & 1) << 4) + m; });
  }
};
struct Q8_0 {
  static constexpr int kSize = 32, kBytes = 34;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(static_cast<int8_t>(b[2 + i])) * d;
  }
};

// The K formats: 256 weights as 2 halves of 4 rows of 32 (2-bit fields), or 4 pairs of rows of 32 (nibbles).
struct Q2_K {
  static constexpr int kSize = 256, kBytes = 84;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    const uint8_t *scales = b, *q = b + 16;
    float d = load_half(b + 80), dmin = load_half(b + 82);
    for (int g = 0; g < 16; g++) {
      float scale = d * static_cast<float>(scales[g] & 15), offset = dmin * static_cast<float>(scales[g] >> 4);
      const uint8_t* bytes = q + g / 8 * 32 + g % 2 * 16;
      int shift = g % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) out[16 * g + i] = scale * static_cast<float>(bytes[i] >> shift & 3) - offset;
    }
  }
};
struct Q3_K {
  static constexpr int kSize = 256, kBytes = 110;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    const uint8_t *high = b, *low = b + 32, *packed = b + 96;
    float d = load_half(b + 108);
    for (int g = 0; g < 16; g++) {
      int low_bits = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
      int high_bits = packed[8 + g % 4] >> (g / 4 * 2) & 3;
      float scale = d * static_cast<float>((low_bits | high_bits << 4) - 32);
      const uint8_t *bytes = low + g / 8 * 32 + g % 2 * 16, *thirds = high + g % 2 * 16;
      int shift = g % 8 / 2 * 2, third = g / 2;
      for (int i = 0; i < 16; i++) {
        int q = (bytes[i] >> shift & 3) | (thirds[i] >> third & 1) << 2;
        out[16 * g + i] = scale * static_cast<float>(q - 4);
      }
    }
  }
};

// Scale and offset of group g of eight, for Q4_K and Q5_K: 6 bits each in 12 bytes.
OCTAVO_INLINE void scale_and_offset(const uint8_t* b, int g, float* scale, float* offset) {
  const uint8_t* packed = b + 4;
  int s = g < 4 ? packed[g] & 63 : (packed[4 + g] & 15) | (packed[g - 4] >> 2 & 48);
  int m = g < 4 ? packed[4 + g] & 63 : packed[4 + g] >> 4 | (packed[g] >> 2 & 48);
  *scale = load_half(b) * static_cast<float>(s);
  *offset = load_half(b + 2) * static_cast<float>(m);
}
struct Q4_K {
  static constexpr int kSize = 256, kBytes = 144;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    for (int g = 0; g < 8; g++) {
      float scale, offset;
      scale_and_offset(b, g, &scale, &offset);
      const uint8_t* bytes = b + 16 + g / 2 * 32;
      for (int i = 0; i < 32; i++) out[32 * g + i] = scale * static_cast<float>(bytes[i] >> (g % 2 * 4) & 15) - offset;
    }
  }
};
struct Q5_K {
  static constexpr int kSize = 256, kBytes = 176;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    for (int g = 0; g < 8; g++) {
      float scale, offset;
      scale_and_offset(b, g, &scale, &offset);
      const uint8_t *fifths = b + 16, *bytes = b + 48 + g / 2 * 32;
      for (int i = 0; i < 32; i++) {
        int q = (bytes[i] >> (g % 2 * 4) & 15) | (fifths[i] >> g & 1) << 4;
        out[32 * g + i] = scale * static_cast<float>(q) - offset;
      }
    }
  }
};
struct Q6_K {
  static constexpr int kSize = 256, kBytes = 210;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b + 208);
    for (int g = 0; g < 16; g++) {
      float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
      const uint8_t* low = b + g / 8 * 64 + g % 4 * 16;
      const uint8_t* high = b + 128 + g / 8 * 32 + g % 2 * 16;
      int low_shift = g % 8 / 4 * 4, high_shift = g % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) {
        int q = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
        out[16 * g + i] = scale * static_cast<float>(q - 32);
      }
    }
  }
};

constexpr float kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
  static constexpr int kSize = 32, kBytes = 18;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b);
    nibbles(b + 2, out, [=](int q, int) { return d * kIQ4[q]; });
  }
};
struct IQ4_XS {
  static constexpr int kSize = 256, kBytes = 136;
  OCTAVO_INLINE void decode(const uint8_t* b, float* out) {
    float d = load_half(b);
    for (int g = 0; g < 8; g++) {
      int low = b[4 + g / 2] >> (g % 2 * 4) & 15, high = load_u16(b + 2) >> (2 * g) & 3;
      float scale = d * static_cast<float>((low | high << 4) - 32);
      nibbles(b + 8 + 16 * g, out + 32 * g, [=](int q, int) { return scale * kIQ4[q]; });
    }
  }
};

template <class Format>
static void decode_all(const uint8_t* data, float* out, int64_t size) {
  for (int64_t i = 0; i < size / Format::kSize; i++) Format::decode(data + i * Format::kBytes, out + i * Format::kSize);
}

constexpr void (*kDecoders[])(const uint8_t*, float*, int64_t) = {
    decode_all<F32Format>, decode_all<F16Format>, decode_all<BF16Format>, decode_all<Q4_0>, decode_all<Q4_1>,
    decode_all<Q5_0>,      decode_all<Q5_1>,      decode_all<Q8_0>,       decode_all<Q2_K>, decode_all<Q3_K>,
    decode_all<Q4_K>,      decode_all<Q5_K>,      decode_all<Q6_K>,       decode_all<IQ4_NL>, decode_all<IQ4_XS>,
};
static_assert(sizeof kDecoders / sizeof *kDecoders == sizeof kFormats / sizeof *kFormats);

}  // namespace

void dequantize_blocks(int32_t format, const uint8_t* data, float* out, int64_t size) { kDecoders[format](data, out, size); }

void dequantize(const PackSource& source, float* out, int64_t size) { dequantize_blocks(source.format, source.data, out, size); }

}  // namespace octavo::OCTAVO_ISA
