// Element formats of checkpoints, taken apart and turned to float32. Layouts and formulas are drawn in src/octavo/kernels/dequantize.py.
//
// Products and sums round one by one (-ffp-contract=off), so that every instruction set gives the bits of the definition.
#include "dequantize.h"

#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE uint16_t load_u16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
OCTAVO_INLINE uint32_t load_u32(const uint8_t* p) { return load_u16(p) | static_cast<uint32_t>(load_u16(p + 2)) << 16; }

// 32 codes from 16 bytes: low nibbles, then high ones.
OCTAVO_INLINE void nibbles(const uint8_t* q, uint8_t* codes) {
  for (int i = 0; i < 16; i++) codes[i] = q[i] & 15;
  for (int i = 0; i < 16; i++) codes[16 + i] = q[i] >> 4;
}

OCTAVO_INLINE void add_fifth_bits(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
}

struct Q4_0 {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    nibbles(b + 2, out.codes);
  }
};
struct Q4_1 {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    out.m = load_u16(b + 2);
    nibbles(b + 4, out.codes);
  }
};
struct Q5_0 {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    nibbles(b + 6, out.codes);
    add_fifth_bits(load_u32(b + 2), out.codes);
  }
};
struct Q5_1 {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    out.m = load_u16(b + 2);
    nibbles(b + 8, out.codes);
    add_fifth_bits(load_u32(b + 4), out.codes);
  }
};
struct Q8_0 {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    for (int i = 0; i < 32; i++) out.codes[i] = b[2 + i] ^ 0x80;
  }
};

// The K formats: 256 weights as 2 halves of 4 rows of 32 (2-bit fields), or 4 pairs of rows of 32 (nibbles).
struct Q2_K {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    const uint8_t *scales = b, *q = b + 16;
    out.d = load_u16(b + 80);
    out.m = load_u16(b + 82);
    for (int g = 0; g < 16; g++) {
      out.scales[g] = static_cast<int8_t>(scales[g] & 15);
      out.minima[g] = static_cast<int8_t>(scales[g] >> 4);
      const uint8_t* bytes = q + g / 8 * 32 + g % 2 * 16;
      int shift = g % 8 / 2 * 2;
      for (int i = 0; i < 16; i++) out.codes[16 * g + i] = bytes[i] >> shift & 3;
    }
  }
};
struct Q3_K {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    const uint8_t *high = b, *low = b + 32, *packed = b + 96;
    out.d = load_u16(b + 108);
    for (int g = 0; g < 16; g++) {
      int low_bits = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
      int high_bits = packed[8 + g % 4] >> (g / 4 * 2) & 3;
      out.scales[g] = static_cast<int8_t>((low_bits | high_bits << 4) - 32);
      const uint8_t *bytes = low + g / 8 * 32 + g % 2 * 16, *thirds = high + g % 2 * 16;
      int shift = g % 8 / 2 * 2, third = g / 2;
      for (int i = 0; i < 16; i++) out.codes[16 * g + i] = static_cast<uint8_t>((bytes[i] >> shift & 3) | (thirds[i] >> third & 1) << 2);
    }
  }
};

// Eight 6-bit scales and eight 6-bit minima in 12 bytes.
OCTAVO_INLINE void scales_and_minima(const uint8_t* packed, Block& out) {
  for (int g = 0; g < 8; g++) {
    int s = g < 4 ? packed[g] & 63 : (packed[4 + g] & 15) | (packed[g - 4] >> 2 & 48);
    int m = g < 4 ? packed[4 + g] & 63 : packed[4 + g] >> 4 | (packed[g] >> 2 & 48);
    out.scales[g] = static_cast<int8_t>(s);
    out.minima[g] = static_cast<int8_t>(m);
  }
}
struct Q4_K {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    out.m = load_u16(b + 2);
    scales_and_minima(b + 4, out);
    for (int g = 0; g < 8; g++)
      for (int i = 0; i < 32; i++) out.codes[32 * g + i] = b[16 + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
  }
};
struct Q5_K {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    out.m = load_u16(b + 2);
    scales_and_minima(b + 4, out);
    for (int g = 0; g < 8; g++)
      for (int i = 0; i < 32; i++)
        out.codes[32 * g + i] = static_cast<uint8_t>((b[48 + g / 2 * 32 + i] >> (g % 2 * 4) & 15) | (b[16 + i] >> g & 1) << 4);
  }
};
struct Q6_K {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b + 208);
    for (int g = 0; g < 16; g++) {
      out.scales[g] = static_cast<int8_t>(b[192 + g]);
      const uint8_t* low = b + g / 8 * 64 + g % 4 * 16;
      const uint8_t* high = b + 128 + g / 8 * 32 + g % 2 * 16;
      int low_shift = g % 8 / 4 * 4, high_shift = g % 8 / 2 * 2;
      for (int i = 0; i < 16; i++)
        out.codes[16 * g + i] = static_cast<uint8_t>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
    }
  }
};

struct IQ4_NL {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) { Q4_0::split(b, out); }
};
struct IQ4_XS {
  OCTAVO_INLINE void split(const uint8_t* b, Block& out) {
    out.d = load_u16(b);
    for (int g = 0; g < 8; g++) {
      int low = b[4 + g / 2] >> (g % 2 * 4) & 15, high = load_u16(b + 2) >> (2 * g) & 3;
      out.scales[g] = static_cast<int8_t>((low | high << 4) - 32);
      nibbles(b + 8 + 16 * g, out.codes + 32 * g);
    }
  }
};

// A block's weights as floats: scale * (code - zero) + minimum.
template <int32_t kFormat>
OCTAVO_INLINE void join(const Block& b, float* out) {
  constexpr FormatInfo info = kFormats[kFormat];
  constexpr Form form = info.form;
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  for (int g = 0; g < info.block_size / form.group; g++) {
    const float scale = form.super ? d * static_cast<float>(b.scales[g]) : d;
    const float minimum = !form.minima ? 0.0f : form.super ? -(m * static_cast<float>(b.minima[g])) : m;
    for (int i = 0; i < form.group; i++) {
      const uint8_t code = b.codes[form.group * g + i];
      const float q = static_cast<float>((form.codes == Codes::table ? kIQ4Values[code] : code) - info.zero);
      out[form.group * g + i] = form.minima ? scale * q + minimum : scale * q;
    }
  }
}

template <int32_t kFormat, class Format>
static void decode(const uint8_t* data, float* out, int64_t size) {
  constexpr FormatInfo info = kFormats[kFormat];
  Block block;
  for (int64_t i = 0; i < size / info.block_size; i++) {
    Format::split(data + i * info.block_bytes, block);
    join<kFormat>(block, out + i * info.block_size);
  }
}

static void decode_f32(const uint8_t* data, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i++) out[i] = std::bit_cast<float>(load_u32(data + 4 * i));
}
static void decode_f16(const uint8_t* data, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i++) out[i] = half_to_float(load_u16(data + 2 * i));
}
static void decode_bf16(const uint8_t* data, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i++) out[i] = bf16_to_float(load_u16(data + 2 * i));
}
static void split_float(const uint8_t*, Block&) { __builtin_trap(); }

template <class Format>
static void split(const uint8_t* data, Block& out) {
  Format::split(data, out);
}

struct Codec {
  void (*decode)(const uint8_t*, float*, int64_t);
  void (*split)(const uint8_t*, Block&);
};
#define OCTAVO_CODEC(number, format) {decode<number, format>, split<format>}
constexpr Codec kCodecs[] = {
    {decode_f32, split_float}, {decode_f16, split_float}, {decode_bf16, split_float}, OCTAVO_CODEC(3, Q4_0),    OCTAVO_CODEC(4, Q4_1),
    OCTAVO_CODEC(5, Q5_0),     OCTAVO_CODEC(6, Q5_1),     OCTAVO_CODEC(7, Q8_0),      OCTAVO_CODEC(8, Q2_K),    OCTAVO_CODEC(9, Q3_K),
    OCTAVO_CODEC(10, Q4_K),    OCTAVO_CODEC(11, Q5_K),    OCTAVO_CODEC(12, Q6_K),     OCTAVO_CODEC(13, IQ4_NL), OCTAVO_CODEC(14, IQ4_XS),
};
#undef OCTAVO_CODEC
static_assert(sizeof kCodecs / sizeof *kCodecs == sizeof kFormats / sizeof *kFormats);

}  // namespace

void dequantize_blocks(int32_t format, const uint8_t* data, float* out, int64_t size) { kCodecs[format].decode(data, out, size); }

void split_block(int32_t format, const uint8_t* data, Block& out) { kCodecs[format].split(data, out); }

void dequantize(const PackSource& source, float* out, int64_t size) { dequantize_blocks(source.format, source.data, out, size); }

}  // namespace octavo::OCTAVO_ISA
