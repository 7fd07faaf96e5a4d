// linear for weights of bf16 and float32.
//
// One tile routine serves any number of rows: each output has one accumulator, k ascends, nothing is split over k, and the
// bias comes last. So a row's bits do not depend on how many rows there are or on the thread that computes it.
#include "kernels.h"
#include "linear.h"
#include "linear_units.h"
#include "packed.h"
#include "simd.h"
#include "unroll.h"

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

// How one step along k reads x and the weights: kParts vectors, each multiplied before the next is loaded. Where the machine has no
// products of bf16, x is widened to float before, once per unit of work, and the elements of a pair are two parts.
#if defined(__AVX512BF16__)
struct Bf16 {
  using Weight = uint16_t;
  using Input = uint16_t;
  using Vector = B32;
  static constexpr int kStep = 2, kParts = 1;
  OCTAVO_INLINE Vector weights(const uint16_t* p, int) { return load_pairs(p); }
  OCTAVO_INLINE Vector input(const uint16_t* p, int) { return set1_pair(load_word(p)); }
  OCTAVO_INLINE Vector last_input(const uint16_t* p) { return set1_pair(*p); }
  OCTAVO_INLINE F16 multiply(F16 acc, Vector x, Vector w) { return dot_pairs(acc, x, w); }
};
#endif

// One input at a time, as a float, spread over a vector.
struct FloatInputs {
  using Input = float;
  using Vector = F16;
  OCTAVO_INLINE Vector input(const float* p, int part) { return set1(p[part]); }
  OCTAVO_INLINE Vector last_input(const float* p) { return set1(*p); }
  OCTAVO_INLINE F16 multiply(F16 acc, Vector x, Vector w) { return fmadd(x, w, acc); }
};

#if !defined(__AVX512BF16__)
struct Bf16 : FloatInputs {
  using Weight = uint16_t;
  static constexpr int kStep = 2, kParts = 2;
  OCTAVO_INLINE Vector weights(const uint16_t* p, int part) {
    return part == 0 ? first_as_float(load_pairs(p)) : second_as_float(load_pairs(p));
  }
};
#endif

struct Float : FloatInputs {
  using Weight = float;
  static constexpr int kStep = 1, kParts = 1;
  OCTAVO_INLINE Vector weights(const float* p, int) { return load(p); }
};

// Some rows of x, as a tile reads them.
template <class P>
struct Rows {
  const typename P::Input* x;
  int64_t stride;
  int64_t count;
};

template <int ROWS, int PANELS>
OCTAVO_INLINE void store_tile(const F16 (&acc)[ROWS][PANELS], const Output& o) {
  OCTAVO_UNROLL
  for (int r = 0; r < ROWS; r++)
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++) store_sums(acc[r][p], o, r, p * kPanel);
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

template <class P, int ROWS, int PANELS>
static void multiply_tile(const typename P::Input* x, int64_t x_stride, const typename P::Weight* w, int64_t panel_size, int64_t in,
                          Ahead ahead, Ahead kv, const Output& o) {
  F16 acc[ROWS][PANELS];
  OCTAVO_UNROLL
  for (int r = 0; r < ROWS; r++)
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++) acc[r][p] = zero();
  int64_t k = 0;
  for (; k + P::kStep <= in; k += P::kStep) {
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++, ahead.next += ahead.stride) __builtin_prefetch(ahead.next, 0, 2);
    __builtin_prefetch(kv.next, 0, 2);
    kv.next += kv.stride;
    multiply_step<P, false>(acc, x + k, x_stride, w + k * kPanel, panel_size);
  }
  if (k < in) multiply_step<P, true>(acc, x + k, x_stride, w + k * kPanel, panel_size);
  store_tile(acc, o);
}

// The tile with as many rows as there are, at most ROWS.
template <class P, int PANELS, int ROWS>
OCTAVO_INLINE void multiply_rows(const Rows<P>& rows, const typename P::Weight* w, int64_t panel_size, int64_t in, Ahead ahead, Ahead kv,
                                 const Output& o) {
  if (rows.count >= ROWS) return multiply_tile<P, ROWS, PANELS>(rows.x, rows.stride, w, panel_size, in, ahead, kv, o);
  if constexpr (ROWS > 1) multiply_rows<P, PANELS, ROWS - 1>(rows, w, panel_size, in, ahead, kv, o);
}

// Some panels and all rows of a unit. The weights at `next` are asked for meanwhile, spread over the rows.
template <class P, int PANELS>
static void multiply_panels(const LinearArgs& a, const Rows<P>& rows, const char* weights, const char* next, int thread, Output o) {
  const PackedMatrix& m = *a.weight;
  const auto* w = reinterpret_cast<const typename P::Weight*>(weights);
  constexpr int64_t line = P::kStep * kPanel * sizeof *w;
  const int64_t size = panel_bytes(m.format, m.in_features) / static_cast<int64_t>(sizeof *w);
  const int64_t num_tiles = rows.count <= kMaxRows ? 1 : ceil_div(rows.count, kRows), tile = ceil_div(rows.count, num_tiles);
  Ahead ahead{next, ceil_div(line, num_tiles)};
  for (int64_t r = 0; r < rows.count; r += tile, o.out += tile * o.stride) {
    Rows<P> some{rows.x + r * rows.stride, rows.stride, least(tile, rows.count - r)};
    multiply_rows<P, PANELS, kMaxRows>(some, w, size, m.in_features, ahead, next_lines(a, thread, m.in_features / P::kStep, weights), o);
    ahead.next += ahead.stride * PANELS * (m.in_features / P::kStep);
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

template <class P>
static void multiply(const LinearArgs& a, Pool& pool) {
  const Cut cut = cut_product(a, kRows, kPanels, pool.num_threads());
  for_units(pool, cut, [&](const Unit& unit, int thread) {
    const Rows<P> x = load_rows<P>(a, unit.row, unit.count, pool, thread);
    for_panels<kPanels>(a, unit, [&]<int PANELS>(const char* w, const char* ahead, const Output& o) {
      multiply_panels<P, PANELS>(a, x, w, ahead, thread, o);
    });
  });
}

}  // namespace

void linear_float(const LinearArgs& a, Pool& pool) {
  if (a.weight->format == kBF16) multiply<Bf16>(a, pool);
  else multiply<Float>(a, pool);
}

}  // namespace octavo::OCTAVO_ISA
