// Where an element lies in a packed matrix (PackedMatrix in kernels.h): panels of sixteen outputs, one after the other.
//
//   output o, input k      panel o / 16, lane o % 16
//   F32                    [in][16]            row k
//   BF16                   [in/2][16][2]       pair k / 2, element k % 2; zero where the last pair has no second
//   quantised              scales | minima, where the form has them | codes           each section begins on a cache line
//     scales, minima       float16 [in/32][16]; a `super` form: float16 [in/256][16], then int8 [in/group][16]
//     bytes, octets        [in/4][16][4]       step k / 4, element k % 4
//     nibbles, table       [in/32][4][16][4]   bytes whose low nibbles are steps 0 to 3 of a group of 32, the high ones 4 to 7
#pragma once
#include <cstdint>

#include "dequantize.h"
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int kGroup = 32;       // inputs that share a scale of x
inline constexpr int kSteps = kGroup / 4;  // products of four that a group takes
inline constexpr int kSuper = 256;

OCTAVO_INLINE constexpr bool is_nibbles(Form f) { return f.codes == Codes::nibbles || f.codes == Codes::table; }
OCTAVO_INLINE constexpr int code_bytes(Form f) { return kGroup * kPanel / (is_nibbles(f) ? 2 : 1); }

// Offsets in bytes within a panel of a quantised matrix, and its size.
struct Sections {
  int64_t minima, codes, size;
};
OCTAVO_INLINE int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
OCTAVO_INLINE Sections sections(Form f, int64_t in) {
  int64_t scales = whole_lines(f.super ? kPanel * (2 * (in / kSuper) + in / f.group) : kPanel * 2 * (in / kGroup));
  int64_t codes = f.minima ? 2 * scales : scales;
  return {scales, codes, codes + in / kGroup * code_bytes(f)};
}

OCTAVO_INLINE int64_t panel_bytes(int32_t format, int64_t in) {
  if (format == kF32) return kPanel * 4 * in;
  if (format == kBF16) return kPanel * 4 * ((in + 1) / 2);
  return sections(kFormats[format].form, in).size;
}

OCTAVO_INLINE int64_t matrix_bytes(int32_t format, int64_t out, int64_t in) { return (out + kPanel - 1) / kPanel * panel_bytes(format, in); }

// Where the code of input k lies in the codes of a panel, and the shift of its nibble.
struct CodePlace {
  int64_t byte;
  int shift;
};
OCTAVO_INLINE CodePlace code_place(Form f, int64_t k, int lane) {
  int64_t group = k / kGroup, step = k % kGroup / 4, start = group * code_bytes(f) + lane * 4 + k % 4;
  if (is_nibbles(f)) return {start + step % 4 * 64, step < 4 ? 0 : 4};
  return {start + step * 64, 0};
}

// The scale or, from the other section, the minimum without its sign, of input k for one lane.
OCTAVO_INLINE float load_scale(Form f, const uint8_t* section, int64_t in, int64_t k, int lane) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(section);
  if (!f.super) return half_to_float(halves[k / kGroup * kPanel + lane]);
  const int8_t* factors = reinterpret_cast<const int8_t*>(section + in / kSuper * kPanel * 2);
  return half_to_float(halves[k / kSuper * kPanel + lane]) * static_cast<float>(factors[k / f.group * kPanel + lane]);
}

OCTAVO_INLINE void unpack_quantised_row(const PackedMatrix& m, const uint8_t* panel, int lane, float* out) {
  const FormatInfo& info = kFormats[m.format];
  const Form f = info.form;
  const Sections at = sections(f, m.in_features);
  for (int64_t group = 0; group < m.in_features; group += f.group) {
    const float scale = load_scale(f, panel, m.in_features, group, lane);
    const float minimum = f.minima ? load_scale(f, panel + at.minima, m.in_features, group, lane) : 0.0f;
    for (int64_t k = group; k < group + f.group; k++) {
      const CodePlace place = code_place(f, k, lane);
      const uint8_t byte = panel[at.codes + place.byte], code = is_nibbles(f) ? byte >> place.shift & 15 : byte;
      const float q = scale * static_cast<float>((f.codes == Codes::table ? kIQ4Values[code] : code) - info.zero);
      out[k] = !f.minima ? q : f.super ? q - minimum : q + minimum;
    }
  }
}

// Row `o` of the matrix (the weights of one output), as floats.
OCTAVO_INLINE void unpack_row(const PackedMatrix& m, int64_t o, float* out) {
  const int lane = static_cast<int>(o % kPanel);
  const uint8_t* panel = static_cast<const uint8_t*>(m.data) + o / kPanel * panel_bytes(m.format, m.in_features);
  if (m.format == kBF16) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(panel) + 2 * lane;
    for (int64_t k = 0; k < m.in_features; k++) out[k] = bf16_to_float(p[k / 2 * (2 * kPanel) + k % 2]);
  } else if (m.format == kF32) {
    const float* p = reinterpret_cast<const float*>(panel) + lane;
    for (int64_t k = 0; k < m.in_features; k++) out[k] = p[k * kPanel];
  } else {
    unpack_quantised_row(m, panel, lane, out);
  }
}

}  // namespace octavo::OCTAVO_ISA
