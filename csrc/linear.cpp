// out = x @ weight.T + bias over the packed matrix of kernels.h.
//
// One tile routine serves any number of rows: each output has one accumulator, k ascends, nothing is split over k, and the
// bias comes last. So a row's bits do not depend on how many rows there are or on the thread that computes it.
#include "kernels.h"
#include "packed.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The register tile: rows x panels accumulators, the weights of a step along k, and one broadcast input.
#if defined(__AVX512F__)
constexpr int kRows = 8, kMaxRows = 14, kPanels = 2;  // 16 + 2 + 1, at most 28 + 2 + 1 of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 5, kMaxRows = 5, kPanels = 1;  // 10 + 2 + 1 of 16, and a mask
#elif defined(__aarch64__)
constexpr int kRows = 4, kMaxRows = 4, kPanels = 1;  // 16 + 4 + 4 of 32
#else
constexpr int kRows = 3, kMaxRows = 3, kPanels = 1;  // 12 of 16, weights from memory
#endif
constexpr int kGroupRows = 64;             // rows that a unit of work multiplies with the panels it holds
constexpr int64_t kUnitBytes = 256 << 10;  // of weights per unit: they stay in the L2 cache while rows pass
constexpr int64_t kUnitsPerThread = 8;

// How one step along k reads x and the weights: kParts vectors, each multiplied before the next is loaded. Where the machine has no
// products of bf16, x is widened to float before, once per unit of work, and the elements of a pair are two parts.
#if defined(__AVX512BF16__)
struct Bf16 {
  using Weight = uint16_t;
  using Input = uint16_t;
  using Vector = B32;
  static constexpr int kStep = 2, kParts = 1;
  OCTAVO_INLINE Vector weights(const uint16_t* p, int) { return load_pairs(p); }
  OCTAVO_INLINE Vector input(const uint16_t* p, int) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return set1_pair(pair);
  }
  OCTAVO_INLINE Vector last_input(const uint16_t* p) { return set1_pair(*p); }
  OCTAVO_INLINE F16 multiply(F16 acc, Vector x, Vector w) { return dot_pairs(acc, x, w); }
};
#else
struct Bf16 {
  using Weight = uint16_t;
  using Input = float;
  using Vector = F16;
  static constexpr int kStep = 2, kParts = 2;
  OCTAVO_INLINE Vector weights(const uint16_t* p, int part) {
    return part == 0 ? first_as_float(load_pairs(p)) : second_as_float(load_pairs(p));
  }
  OCTAVO_INLINE Vector input(const float* p, int part) { return set1(p[part]); }
  OCTAVO_INLINE Vector last_input(const float* p) { return set1(*p); }
  OCTAVO_INLINE F16 multiply(F16 acc, Vector x, Vector w) { return fmadd(x, w, acc); }
};
#endif

struct Float {
  using Weight = float;
  using Input = float;
  using Vector = F16;
  static constexpr int kStep = 1, kParts = 1;
  OCTAVO_INLINE Vector weights(const float* p, int) { return load(p); }
  OCTAVO_INLINE Vector input(const float* p, int) { return set1(*p); }
  OCTAVO_INLINE Vector last_input(const float* p) { return set1(*p); }
  OCTAVO_INLINE F16 multiply(F16 acc, Vector x, Vector w) { return fmadd(x, w, acc); }
};

// Some rows of x, as a tile reads them.
template <class P>
struct Rows {
  const typename P::Input* x;
  int64_t stride;
  int64_t count;
};

// Where a tile's outputs go: `width` columns from `out` on, of which the last panel may be partly filled.
struct Output {
  float* out;
  int64_t stride;
  const float* bias;
  int64_t width;
};

// So that accumulators stay in registers.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

template <int ROWS, int PANELS>
OCTAVO_INLINE void store_tile(const F16 (&acc)[ROWS][PANELS], const Output& o) {
  OCTAVO_UNROLL
  for (int p = 0; p < PANELS; p++) {
    int64_t start = p * kPanel;
    int lanes = static_cast<int>(o.width - start < kPanel ? o.width - start : kPanel);
    F16 bias = o.bias == nullptr ? zero() : load_first(o.bias + start, lanes);
    OCTAVO_UNROLL
    for (int r = 0; r < ROWS; r++) {
      F16 sum = o.bias == nullptr ? acc[r][p] : acc[r][p] + bias;
      if (lanes == kPanel) store(o.out + r * o.stride + start, sum);
      else store_first(o.out + r * o.stride + start, sum, lanes);
    }
  }
}

// One step along k, or the LAST, which is an odd one out: its pair's second element is zero in the weights, and must be here.
// Inputs are loaded where they are used, or the compiler runs out of registers.
template <class P, bool LAST, int ROWS, int PANELS>
OCTAVO_INLINE void multiply_step(F16 (&acc)[ROWS][PANELS], const typename P::Input* x, int64_t x_stride, const typename P::Weight* w,
                                 int64_t panel_size) {
  OCTAVO_UNROLL
  for (int part = 0; part < (LAST ? 1 : P::kParts); part++) {
    typename P::Vector b[PANELS];
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++) b[p] = P::weights(w + p * panel_size, part);
    OCTAVO_UNROLL
    for (int r = 0; r < ROWS; r++) {
      typename P::Vector a = LAST ? P::last_input(x + r * x_stride) : P::input(x + r * x_stride, part);
      OCTAVO_UNROLL
      for (int p = 0; p < PANELS; p++) acc[r][p] = P::multiply(acc[r][p], a, b[p]);
    }
  }
}

// Memory to ask for while multiplying: one line per panel and step along k, `stride` bytes apart.
struct Ahead {
  const char* next;
  int64_t stride;
};

template <class P, int ROWS, int PANELS>
static void multiply_tile(const typename P::Input* x, int64_t x_stride, const typename P::Weight* w, int64_t panel_size, int64_t in,
                          Ahead ahead, const Output& o) {
  F16 acc[ROWS][PANELS];
  OCTAVO_UNROLL
  for (int r = 0; r < ROWS; r++)
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++) acc[r][p] = zero();
  int64_t k = 0;
  for (; k + P::kStep <= in; k += P::kStep) {
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++, ahead.next += ahead.stride) __builtin_prefetch(ahead.next, 0, 2);
    multiply_step<P, false>(acc, x + k, x_stride, w + k * kPanel, panel_size);
  }
  if (k < in) multiply_step<P, true>(acc, x + k, x_stride, w + k * kPanel, panel_size);
  store_tile(acc, o);
}

// The tile with as many rows as there are, at most ROWS.
template <class P, int PANELS, int ROWS>
OCTAVO_INLINE void multiply_rows(const Rows<P>& rows, const typename P::Weight* w, int64_t panel_size, int64_t in, Ahead ahead,
                                 const Output& o) {
  if (rows.count >= ROWS) return multiply_tile<P, ROWS, PANELS>(rows.x, rows.stride, w, panel_size, in, ahead, o);
  if constexpr (ROWS > 1) multiply_rows<P, PANELS, ROWS - 1>(rows, w, panel_size, in, ahead, o);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Some panels, at most kPanels, and all rows of a unit. The weights at `next` are asked for meanwhile, spread over the rows.
template <class P, int PANELS>
static void multiply_panels(const PackedMatrix& m, const Rows<P>& rows, int64_t panel, const typename P::Weight* next, Output o) {
  int64_t size = panel_size(m.in_features, m.dtype);
  int64_t num_tiles = rows.count <= kMaxRows ? 1 : ceil_div(rows.count, kRows), tile = ceil_div(rows.count, num_tiles);
  const typename P::Weight* w = static_cast<const typename P::Weight*>(m.data) + panel * size;
  int64_t line = P::kStep * kPanel * static_cast<int64_t>(sizeof *w);
  Ahead ahead{reinterpret_cast<const char*>(next), next == nullptr ? 0 : ceil_div(line, num_tiles)};
  for (int64_t r = 0; r < rows.count; r += tile, o.out += tile * o.stride) {
    Rows<P> some{rows.x + r * rows.stride, rows.stride, least(tile, rows.count - r)};
    multiply_rows<P, PANELS, kMaxRows>(some, w, size, m.in_features, ahead, o);
    ahead.next += ahead.stride * PANELS * (m.in_features / P::kStep);
  }
}

// Panels [panel, last_panel) of a unit; `then` is the panel that this thread's next unit probably begins with.
template <class P>
static void multiply_unit(const LinearArgs& a, const Rows<P>& rows, float* out, int64_t panel, int64_t last_panel, int64_t then) {
  const PackedMatrix& m = *a.weight;
  const auto* weights = static_cast<const typename P::Weight*>(m.data);
  while (panel < last_panel) {
    int64_t count = least(last_panel - panel, kPanels), column = panel * kPanel;
    int64_t next = panel + count < last_panel ? panel + count : then;
    const auto* ahead = next * kPanel < m.out_features ? weights + next * panel_size(m.in_features, m.dtype) : nullptr;
    Output o{out + column, a.out_stride, m.bias ? m.bias + column : nullptr, m.out_features - column};
    if (count == kPanels) multiply_panels<P, kPanels>(m, rows, panel, ahead, o);
    else multiply_panels<P, 1>(m, rows, panel, ahead, o);
    panel += count;
  }
}

// Rows of x where they lie, or widened to float in the thread's scratch.
template <class P>
static Rows<P> load_rows(const LinearArgs& a, int64_t row, int64_t count, Pool& pool, int thread) {
  if constexpr (sizeof(typename P::Input) == sizeof(typename P::Weight)) {
    return {static_cast<const typename P::Input*>(a.x) + row * a.x_stride, a.x_stride, count};
  } else {
    int64_t in = a.weight->in_features, stride = ceil_div(in, kPanel) * kPanel;
    float* wide = static_cast<float*>(pool.scratch(thread, count * stride * static_cast<int64_t>(sizeof(float))));
    for (int64_t r = 0; r < count; r++) {
      const uint16_t* x = static_cast<const uint16_t*>(a.x) + (row + r) * a.x_stride;
      for (int64_t k = 0; k < in; k++) wide[r * stride + k] = bf16_to_float(x[k]);
    }
    return {wide, stride, count};
  }
}

// Units are blocks of panels x groups of rows, the groups of one block one after the other: its weights are read once.
template <class P>
static void multiply(const LinearArgs& a, Pool& pool) {
  const PackedMatrix& m = *a.weight;
  int64_t rows = *a.count, panels = ceil_div(m.out_features, kPanel);
  if (rows <= 0) return;
  int64_t groups = ceil_div(rows, kGroupRows), group_rows = ceil_div(ceil_div(rows, groups), kRows) * kRows;
  int64_t tile_bytes = kPanels * panel_size(m.in_features, m.dtype) * static_cast<int64_t>(sizeof(typename P::Weight));
  int64_t tiles = ceil_div(panels, kPanels);
  int64_t tiles_per_unit = ceil_div(tiles * groups, kUnitsPerThread * pool.num_threads());
  int64_t most = kUnitBytes / tile_bytes > 1 ? kUnitBytes / tile_bytes : 1;
  int64_t block = (tiles_per_unit < most ? tiles_per_unit : most) * kPanels;
  groups = ceil_div(rows, group_rows);
  parallel_for(pool, ceil_div(panels, block) * groups, [&](int64_t unit, int thread) {
    int64_t row = unit % groups * group_rows, panel = unit / groups * block;
    int64_t then = (unit + pool.num_threads()) / groups * block;
    Rows<P> x = load_rows<P>(a, row, least(group_rows, rows - row), pool, thread);
    multiply_unit<P>(a, x, a.out + row * a.out_stride, panel, least(panel + block, panels), then);
  });
}

}  // namespace

void linear(const LinearArgs& a, Pool& pool) {
  if (a.weight->dtype == Dtype::bf16) multiply<Bf16>(a, pool);
  else multiply<Float>(a, pool);
}

}  // namespace octavo::OCTAVO_ISA
