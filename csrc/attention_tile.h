// One tile of keys against a few rows: the only place where scores, probabilities and outputs are computed.
//
//   tile    32 keys at absolute positions 32 t .. 32 t + 31, as two halves of 16 that lie anywhere
//   range   keys [lo, hi) of the tile that a row sees; the others are skipped, never multiplied by zero
//   state   of one row: output o [dims], sum l [16 lanes], maximum m; all relative to exp(m)
//
// What happens to a row's state is a function of its range and the tile alone. How many rows share a call, and whether
// they see the whole tile, selects code and never an operation: each row has the same ones in the same order.
#pragma once
#include "kernels.h"
#include "simd.h"

#define OCTAVO_MEMBER inline __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)
inline constexpr int kScoreRows = 8;     // rows x 32 keys in registers
inline constexpr int kValueRows = 4;     // rows x
inline constexpr int kValueVectors = 4;  // 16 dims each, in registers
#else
inline constexpr int kScoreRows = 2;
inline constexpr int kValueRows = 2;
inline constexpr int kValueVectors = 2;
#endif
inline constexpr int kHalf = kTile / 2;

// Products in the cache's dtype: bf16 takes two dimensions (or keys) a step, float32 one.
template <class T>
struct Product;

template <>
struct Product<uint16_t> {
  using Vector = B32;
  static constexpr int kDepth = 2;
  static OCTAVO_MEMBER Vector load(const uint16_t* p) { return load_pairs(p); }
  static OCTAVO_MEMBER Vector spread(const uint16_t* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return set1_pair(pair);
  }
  static OCTAVO_MEMBER F16 add(F16 acc, Vector a, Vector b) { return dot_pairs(acc, a, b); }
  static OCTAVO_MEMBER F16 round_to(uint16_t* p, F16 a) {
    store_bf16(p, a);
    return load_bf16(p);
  }
};

template <>
struct Product<float> {
  using Vector = F16;
  static constexpr int kDepth = 1;
  static OCTAVO_MEMBER Vector load(const float* p) { return OCTAVO_ISA::load(p); }
  static OCTAVO_MEMBER Vector spread(const float* p) { return set1(*p); }
  static OCTAVO_MEMBER F16 add(F16 acc, Vector a, Vector b) { return fmadd(a, b, acc); }
  static OCTAVO_MEMBER F16 round_to(float* p, F16 a) {
    store(p, a);
    return a;
  }
};

template <class T>
struct Tile {
  const T* k[2];     // step s of a half: 16 keys at k + s * k_stride
  const T* v[2];     // step s of a half: all dims at v + s * v_stride
  int64_t k_stride;  // elements
  int64_t v_stride;
};

struct Range {
  int lo, hi;
  bool empty() const { return lo >= hi; }
  bool full() const { return lo == 0 && hi == kTile; }
  bool operator==(const Range& other) const { return lo == other.lo && hi == other.hi; }
};

// Where the parts of one row's state lie.
struct StateLayout {
  int64_t size;  // floats from row to row
  int64_t sum;
  int64_t max;
};

// What the rows of a call have in common.
template <class T>
struct RowSet {
  const T* q;  // [rows][dim], rounded
  int64_t dim;
  int64_t num_vectors;  // of 16 dims, rounded up
  float scale;
  float softcap;  // 0: none
  StateLayout layout;
  T* p;  // [kScoreRows][kTile] scratch
};

OCTAVO_INLINE float lane_max(F16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a.v);
#else
  return reduce_max(a);
#endif
}

// tanh(x) = 1 - 2 / (e^2x + 1)
OCTAVO_INLINE F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

// Lanes of one half that a row sees.
OCTAVO_INLINE F16 keep_seen(F16 a, Range seen, int half, float other) {
  int lo = seen.lo - kHalf * half, hi = seen.hi - kHalf * half;
  return keep(a, lo < 0 ? 0 : lo > kHalf ? kHalf : lo, hi < 0 ? 0 : hi > kHalf ? kHalf : hi, other);
}

// s[r] = q[r] . k for 32 keys, dimensions ascending.
template <class T, int N>
OCTAVO_INLINE void score(const T* q, int64_t dim, const Tile<T>& tile, F16 (&s)[N][2]) {
  using P = Product<T>;
#pragma GCC unroll 8
  for (int r = 0; r < N; r++) s[r][0] = s[r][1] = zero();
  const T *k0 = tile.k[0], *k1 = tile.k[1];
  for (int64_t i = 0; i < dim; i += P::kDepth, k0 += tile.k_stride, k1 += tile.k_stride) {
    auto a = P::load(k0), b = P::load(k1);
#pragma GCC unroll 8
    for (int r = 0; r < N; r++) {
      auto x = P::spread(q + r * dim + i);
      s[r][0] = P::add(s[r][0], x, a);
      s[r][1] = P::add(s[r][1], x, b);
    }
  }
}

// Scores to probabilities relative to each row's new maximum; updates l and m and leaves each row's factor of o in alpha.
template <class T, int N, bool kFull>
OCTAVO_INLINE void soften(const RowSet<T>& set, F16 (&s)[N][2], const Range* seen, float* states, float* alpha) {
  alignas(64) float old_max[16] = {}, new_max[16] = {};
  const float infinity = __builtin_inff();
#pragma GCC unroll 8
  for (int r = 0; r < N; r++) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      s[r][h] = s[r][h] * set1(set.scale);
      if (set.softcap != 0) s[r][h] = set1(set.softcap) * tanh(s[r][h] / set1(set.softcap));
      if (!kFull) s[r][h] = keep_seen(s[r][h], seen[r], h, -infinity);
    }
    old_max[r] = states[r * set.layout.size + set.layout.max];
    new_max[r] = lane_max(max(s[r][0], s[r][1]));
  }
  F16 m = max(load(new_max), load(old_max));
  store(alpha, exp(load(old_max) - m));
  store(new_max, m);
#pragma GCC unroll 8
  for (int r = 0; r < N; r++) {
    float* state = states + r * set.layout.size;
    F16 p[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      p[h] = exp(s[r][h] - set1(new_max[r]));
      if (!kFull) p[h] = keep_seen(p[h], seen[r], h, 0.0f);
      p[h] = Product<T>::round_to(set.p + r * kTile + h * kHalf, p[h]);
    }
    store(state + set.layout.sum, fmadd(load(state + set.layout.sum), set1(alpha[r]), p[0] + p[1]));
    state[set.layout.max] = new_max[r];
  }
}

// o[r] = o[r] * alpha[r] + sum of p[r][j] v[j] over the keys j of a range, ascending, for V vectors of dims.
template <class T, int N, int V>
OCTAVO_INLINE void weigh(const T* p, const Tile<T>& tile, int64_t column, Range seen, float* states, int64_t state_size, const float* alpha) {
  using P = Product<T>;
  constexpr int kDepth = P::kDepth;
  F16 acc[N][V];
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) acc[r][c] = load(states + r * state_size + column + 16 * c) * set1(alpha[r]);

  auto step = [&](int s, auto cut) __attribute__((always_inline)) {
    constexpr int kSteps = kHalf / kDepth;
    const T* v = tile.v[s / kSteps] + s % kSteps * tile.v_stride + column * kDepth;
    typename P::Vector x[V];
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) x[c] = cut(P::load(v + 16 * c * kDepth));
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) {
      auto weight = P::spread(p + r * kTile + s * kDepth);
#pragma GCC unroll 4
      for (int c = 0; c < V; c++) acc[r][c] = P::add(acc[r][c], weight, x[c]);
    }
  };
  auto whole = [](auto a) { return a; };
  if constexpr (kDepth == 2) {  // the partner of a range's odd end is not seen: its value must not even meet a zero
    if (seen.lo % 2) step(seen.lo / 2, [](B32 a) { return second_of_pairs(a); });
    for (int s = (seen.lo + 1) / 2; s < seen.hi / 2; s++) step(s, whole);
    if (seen.hi % 2) step(seen.hi / 2, [](B32 a) { return first_of_pairs(a); });
  } else {
    for (int s = seen.lo; s < seen.hi; s++) step(s, whole);
  }
#pragma GCC unroll 4
  for (int r = 0; r < N; r++)
#pragma GCC unroll 4
    for (int c = 0; c < V; c++) store(states + r * state_size + column + 16 * c, acc[r][c]);
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// f(Count<n>) for 1 <= n <= Max: a run-time count becomes a compile-time one.
template <int Max, class F>
OCTAVO_INLINE void with_count(int n, const F& f) {
  if constexpr (Max > 1)
    if (n < Max) return with_count<Max - 1>(n, f);
  f(Count<Max>{});
}

// All dims of up to kValueRows rows that see the same range.
template <class T>
OCTAVO_INLINE void weigh_rows(int n, const RowSet<T>& set, const T* p, const Tile<T>& tile, Range seen, float* states, const float* alpha) {
  with_count<kValueRows>(n, [&](auto rows) __attribute__((always_inline)) {
    int64_t c = 0;
    for (; c + kValueVectors <= set.num_vectors; c += kValueVectors)
      weigh<T, rows.value, kValueVectors>(p, tile, 16 * c, seen, states, set.layout.size, alpha);
    for (; c < set.num_vectors; c++) weigh<T, rows.value, 1>(p, tile, 16 * c, seen, states, set.layout.size, alpha);
  });
}

// Passes the states of `n` <= kScoreRows consecutive rows, from `row` on, through one tile. Where kFull, all see all of it.
template <class T, bool kFull>
static void attend_tile(const RowSet<T>& set, int row, int n, const Tile<T>& tile, const Range* seen, float* states) {
  alignas(64) float alpha[16];
  float* first = states + row * set.layout.size;
  with_count<kScoreRows>(n, [&](auto rows) __attribute__((always_inline)) {
    F16 s[rows.value][2];
    score<T, rows.value>(set.q + row * set.dim, set.dim, tile, s);
    soften<T, rows.value, kFull>(set, s, seen, first, alpha);
  });
  for (int r = 0, same; r < n; r += same) {
    Range range = kFull ? Range{0, kTile} : seen[r];
    for (same = 1; same < kValueRows && r + same < n && (kFull || seen[r + same] == range);) same++;
    weigh_rows(same, set, set.p + r * kTile, tile, range, first + r * set.layout.size, alpha + r);
  }
}

}  // namespace octavo::OCTAVO_ISA
