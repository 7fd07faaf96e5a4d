// Checkpoint tensors into the packed layout of packed.h, panel by panel: 16 rows are decoded 256 columns at a time, rounded and
// interleaved. No more of a matrix than that is ever held as float32.
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
void pack_panel(const PackArgs& a, int64_t panel, Scratch& s) {
  Element* out = static_cast<Element*>(a.out) + panel * panel_size(a.in_features, a.dtype);
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

}  // namespace

void pack(const PackArgs& a, Pool& pool) {
  int64_t rows = 0;
  for (int64_t s = 0; s < a.num_sources; s++) rows += a.sources[s].num_rows;
  parallel_for(pool, (rows + kPanel - 1) / kPanel, [&](int64_t panel, int thread) {
    Scratch& s = *static_cast<Scratch*>(pool.scratch(thread, sizeof(Scratch)));
    if (a.dtype == Dtype::bf16) pack_panel<uint16_t>(a, panel, s);
    else pack_panel<float>(a, panel, s);
  });
}

}  // namespace octavo::OCTAVO_ISA
