// Checkpoint tensors into the packed layout of packed.h, panel by panel. Floats: 16 rows are decoded 256 columns at a time, rounded and
// interleaved; no more of a matrix than that is ever held as float32. Quantised: block by block, codes and scales as they are.
#include "dequantize.h"
#include "kernels.h"
#include "packed.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kColumns = 256;  // whole blocks of every format

struct Scratch {
  float values[kPanel][kColumns];
  uint32_t pairs[kPanel][kColumns / 2];
};

// The bytes of row `o` of the stacked matrix; null past its last row.
struct Row {
  const uint8_t* data;
  const FormatInfo* info;
  int32_t format;
};

Row find_row(const PackArgs& a, int64_t o) {
  for (int64_t s = 0; s < a.num_sources; s++) {
    const PackSource& source = a.sources[s];
    if (o < source.num_rows) {
      int64_t row = source.row_order == nullptr ? o : source.row_order[o];
      return {source.data + row * source.row_bytes, &kFormats[source.format], source.format};
    }
    o -= source.num_rows;
  }
  return {};
}

// 16 rows x n columns to [n/2][16][2]; an odd last column is paired with zero.
void interleave(Scratch& s, int64_t n, uint16_t* out) {
  for (int lane = 0; lane < kPanel; lane++) {
    if (n % 2) s.values[lane][n] = 0;
    for (int64_t i = 0; i < (n + 1) / 2; i++) {
      uint32_t first = float_to_bf16(s.values[lane][2 * i]), second = float_to_bf16(s.values[lane][2 * i + 1]);
      s.pairs[lane][i] = first | second << 16;
    }
  }
  for (int64_t i = 0; i < (n + 1) / 2; i++)
    for (int lane = 0; lane < kPanel; lane++) std::memcpy(out + 2 * (i * kPanel + lane), &s.pairs[lane][i], sizeof(uint32_t));
}

void interleave(Scratch& s, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++)
    for (int lane = 0; lane < kPanel; lane++) out[i * kPanel + lane] = s.values[lane][i];
}

template <class Element>
void pack_floats(const PackArgs& a, int64_t panel, Scratch& s, uint8_t* packed) {
  Element* out = reinterpret_cast<Element*>(packed);
  Row rows[kPanel];
  for (int lane = 0; lane < kPanel; lane++) rows[lane] = find_row(a, panel * kPanel + lane);
  for (int64_t k = 0; k < a.in_features; k += kColumns) {
    int64_t n = a.in_features - k < kColumns ? a.in_features - k : kColumns;
    for (int lane = 0; lane < kPanel; lane++) {
      const Row& row = rows[lane];
      if (row.data == nullptr) std::memset(s.values[lane], 0, sizeof s.values[lane]);
      else dequantize_blocks(row.format, row.data + k / row.info->block_size * row.info->block_bytes, s.values[lane], n);
    }
    interleave(s, n, out + k * kPanel);
  }
}

// A block's scales, or its minima, from input k on.
void pack_scales(Form f, uint8_t* section, int64_t in, int64_t k, int lane, uint16_t half, const int8_t* factors) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(section);
  if (!f.super) {
    halves[k / kGroup * kPanel + lane] = half;
    return;
  }
  halves[k / kSuper * kPanel + lane] = half;
  int8_t* out = reinterpret_cast<int8_t*>(section + in / kSuper * kPanel * 2) + k / f.group * kPanel + lane;
  for (int g = 0; g < kSuper / f.group; g++) out[g * kPanel] = factors[g];
}

// The codes of 32 inputs.
void pack_codes(Form f, uint8_t* out, int lane, const uint8_t* codes) {
  const int half = kGroup / 2, bytes = is_nibbles(f) ? half : kGroup;
  for (int i = 0; i < bytes; i++) {
    const int high = is_nibbles(f) ? codes[half + i] << 4 : 0;
    out[i / 4 * 64 + lane * 4 + i % 4] = static_cast<uint8_t>(codes[i] | high);
  }
}

void pack_quantised(const PackArgs& a, int64_t panel, uint8_t* out) {
  const FormatInfo& info = kFormats[a.format];
  const Form f = info.form;
  const Sections at = sections(f, a.in_features);
  std::memset(out, 0, at.size);
  Block block;
  for (int lane = 0; lane < kPanel; lane++) {
    const Row row = find_row(a, panel * kPanel + lane);
    if (row.data == nullptr) return;
    for (int64_t k = 0; k < a.in_features; k += info.block_size) {
      split_block(a.format, row.data + k / info.block_size * info.block_bytes, block);
      pack_scales(f, out, a.in_features, k, lane, block.d, block.scales);
      if (f.minima) pack_scales(f, out + at.minima, a.in_features, k, lane, block.m, block.minima);
      for (int i = 0; i < info.block_size; i += kGroup) pack_codes(f, out + at.codes + (k + i) / kGroup * code_bytes(f), lane, block.codes + i);
    }
  }
}

}  // namespace

void pack(const PackArgs& a, Pool& pool) {
  int64_t rows = 0;
  for (int64_t s = 0; s < a.num_sources; s++) rows += a.sources[s].num_rows;
  parallel_for(pool, (rows + kPanel - 1) / kPanel, [&](int64_t panel, int thread) {
    uint8_t* out = static_cast<uint8_t*>(a.out) + panel * panel_bytes(a.format, a.in_features);
    if (a.format != kF32 && a.format != kBF16) return pack_quantised(a, panel, out);
    Scratch& s = *static_cast<Scratch*>(pool.scratch(thread, sizeof(Scratch)));
    if (a.format == kBF16) pack_floats<uint16_t>(a, panel, s, out);
    else pack_floats<float>(a, panel, s, out);
  });
}

}  // namespace octavo::OCTAVO_ISA
