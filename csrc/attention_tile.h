// One tile of keys against a few rows: the only place where scores, probabilities and outputs are computed.
//
//   tile    32 keys at absolute positions 32 t .. 32 t + 31, as two halves of 16 that lie anywhere
//   range   keys [lo, hi) of the tile that a row sees; the others are skipped, never multiplied by zero
//   state   of one row: maximum m, output o [dims] and sum l [16 lanes], both relative to exp(m)
//
// Where the cache holds codes (int8), queries and probabilities enter the products as 16-bit integers, relative to the largest of a query,
// and of a row's probabilities in a tile after each took in its value's scale. The sums are exact: 256 x 127 x 32767 < 2^31.
//
//   score   sum(q codes x k codes) x k scale x factor of the row: 16-bit unit of q x softmax scale
//   o       o x alpha + sum(p codes x v codes) x gain of the row: the tile's 16-bit unit of p x v scale
//
// What happens to a row's state is a function of its range and the tile alone. How many rows share a call, and whether
// they see the whole tile, selects code and never an operation: each row has the same ones in the same order.
#pragma once
#include "attention_plan.h"
#include "attention_product.h"
#include "kernels.h"
#include "lanes.h"
#include "simd.h"
#include "unroll.h"

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
// Where the scales of a half's 16 keys and values lie.
template <class T>
struct Scales {};
template <>
struct Scales<int8_t> {
  const uint16_t* k[2];
  const uint16_t* v[2];
};

template <class T>
struct Tile {
  const T* k[2];     // step s of a half: 16 keys at k + s * k_stride
  const T* v[2];     // step s of a half: all dims at v + s * v_stride
  int64_t k_stride;  // elements
  int64_t v_stride;
  [[no_unique_address]] Scales<T> scales;
};

// The tile at work, and the one to fetch meanwhile: each load asks for its counterpart there, so that requests to memory
// are spread over the products (in a burst they would hold up the loads of the tile at work). Both have the same strides.
template <class T>
struct TilePair {
  Tile<T> now;
  Tile<T> ahead;
};

struct Range {
  int lo, hi;
  bool empty() const { return lo >= hi; }
  bool full() const { return lo == 0 && hi == kTile; }
  bool operator==(const Range& other) const { return lo == other.lo && hi == other.hi; }
};

// The states of a unit's rows:  m of all rows, then o and l of row 0, of row 1, ...   (state_floats in attention_plan.h)
struct StateLayout {
  int64_t rows;  // where row 0 begins
  int64_t size;  // floats from row to row
  int64_t sum;   // where l begins within a row
};

// What the rows of a unit have in common.
template <class T>
struct RowSet {
  const Input<T>* q;     // [rows / kScoreRows][steps along dim][kScoreRows][elements of a step], rounded: a step reads one line
  const float* factors;  // [rows] what turns sums of products into scores
  int64_t dim;
  int64_t num_vectors;  // of 16 dims, rounded up
  float softcap;        // 0: none
  StateLayout layout;
  Input<T>* p;  // [kScoreRows][kTile] scratch
};

// By what a row's output so far is multiplied and, where the cache holds codes, a tile's part of it; of up to kScoreRows rows.
struct Growth {
  alignas(64) float alpha[16];
  alignas(64) float gain[16];
};

// Lane r: the maximum over the lanes of x[r], for r < N <= 8; minus infinity in the other lanes.
template <int N>
OCTAVO_INLINE F16 row_maxima(const F16 (&x)[N]) {
#if defined(__AVX512F__)
  auto halves = [&](int a, int b) __attribute__((always_inline)) {  // 2 x 128 bits of either
    __m512 u = x[a < N ? a : 0].v, w = x[b < N ? b : 0].v;
    return _mm512_max_ps(_mm512_shuffle_f32x4(u, w, 0x44), _mm512_shuffle_f32x4(u, w, 0xee));
  };
  auto quarters = [](__m512 u, __m512 w) __attribute__((always_inline)) {  // 128 bits of each of four
    return _mm512_max_ps(_mm512_shuffle_f32x4(u, w, 0x88), _mm512_shuffle_f32x4(u, w, 0xdd));
  };
  __m512 low = quarters(halves(0, 1), halves(2, 3)), high = N > 4 ? quarters(halves(4, 5), halves(6, 7)) : low;
  __m512 both = _mm512_max_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  both = _mm512_max_ps(both, _mm512_permute_ps(both, 0xb1));
  F16 ordered{_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0), both)};
#else
  alignas(64) float m[16];
  for (int r = 0; r < N; r++) m[r] = reduce_max(x[r]);
  F16 ordered = load(m);
#endif
  return keep(ordered, 0, N, -__builtin_inff());
}

// tanh(x) = 1 - 2 / (e^2x + 1)
OCTAVO_INLINE F16 tanh(F16 x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

OCTAVO_INLINE int clamp_half(int key) { return key < 0 ? 0 : key > kHalf ? kHalf : key; }

// Asks for a line in the second-level cache: fewer requests can be under way to the first.
OCTAVO_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Lanes of one half that a row sees.
OCTAVO_INLINE F16 keep_seen(F16 a, Range seen, int half, float other) {
  return keep(a, clamp_half(seen.lo - kHalf * half), clamp_half(seen.hi - kHalf * half), other);
}

// s[r] = q[r] . k in the products' own sums, for 32 keys, dimensions ascending. q: the first row's place within its kScoreRows.
template <class T, int N, bool kAhead>
OCTAVO_INLINE void multiply_keys(const Input<T>* q, int64_t dim, const TilePair<T>& tiles, typename Product<T>::Sum (&s)[N][2]) {
  using P = Product<T>;
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) s[r][0] = s[r][1] = P::none();
  const T *k0 = tiles.now.k[0], *k1 = tiles.now.k[1], *next0 = tiles.ahead.k[0], *next1 = tiles.ahead.k[1];
  const int64_t stride = tiles.now.k_stride;
  for (int64_t i = 0; i < dim; i += P::kDepth, q += kScoreRows * P::kDepth) {
    auto a = P::load(k0), b = P::load(k1);
    if (kAhead) fetch(next0), fetch(next1);
    OCTAVO_UNROLL
    for (int r = 0; r < N; r++) {
      auto x = P::spread(q + r * P::kDepth);
      s[r][0] = P::add(s[r][0], x, a);
      s[r][1] = P::add(s[r][1], x, b);
    }
    k0 += stride, k1 += stride;
    if (kAhead) next0 += stride, next1 += stride;
  }
}

// The same as floats, each key's scale taken in.
template <class T, int N, bool kAhead>
OCTAVO_INLINE void score(const Input<T>* q, int64_t dim, const TilePair<T>& tiles, F16 (&s)[N][2]) {
  if constexpr (kIsCodes<T>) {
    I16 sums[N][2];
    multiply_keys<T, N, kAhead>(q, dim, tiles, sums);
    const F16 first = load_bf16(tiles.now.scales.k[0]), second = load_bf16(tiles.now.scales.k[1]);
    OCTAVO_UNROLL
    for (int r = 0; r < N; r++) s[r][0] = to_float(sums[r][0]) * first, s[r][1] = to_float(sums[r][1]) * second;
    if (kAhead)
      for (int h = 0; h < 2; h++) fetch(tiles.ahead.scales.k[h]), fetch(tiles.ahead.scales.v[h]);
  } else {
    multiply_keys<T, N, kAhead>(q, dim, tiles, s);
  }
}

// A row's probabilities x their values' scales in place of the probabilities, which l takes in; returns the largest by lane. Products of integers
// would hide a scale of NaN, so l shows it.
template <bool kFull>
OCTAVO_INLINE F16 take_in_scales(const Tile<int8_t>& tile, Range seen, F16 (&p)[2], float* l, float alpha) {
  F16 sum = fmadd(load(l), set1(alpha), p[0] + p[1]);
  for (int h = 0; h < 2; h++) {
    p[h] = p[h] * load_bf16(tile.scales.v[h]);
    if (!kFull) p[h] = keep_seen(p[h], seen, h, 0.0f);
  }
  store(l, fmadd(p[0] + p[1], zero(), sum));
  return max(p[0], p[1]);
}

// What that made of N rows, as 16-bit integers, and each row's unit of them. top: the largest of each row, by lane.
template <int N>
OCTAVO_INLINE void place_codes(const RowSet<int8_t>& set, const F16 (&p)[N][2], const F16 (&top)[N], Growth& growth) {
  alignas(64) float inverse[16];
  F16 unit = max(row_maxima(top), set1(kLeastTop)) * set1(1 / kMaxInput);
  store(growth.gain, unit);
  store(inverse, set1(1.0f) / unit);
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++)
    for (int h = 0; h < 2; h++) store_int16(set.p + r * kTile + h * kHalf, p[r][h] * set1(inverse[r]));
}

// Scores to probabilities relative to each row's new maximum; updates m and l, and leaves what o is multiplied by in growth.
template <class T, int N, bool kFull>
OCTAVO_INLINE void soften(const RowSet<T>& set, int row, F16 (&s)[N][2], const Tile<T>& tile, const Range* seen, float* states, Growth& growth) {
  float *maxima = states + state_maximum(row), *rows = states + set.layout.rows + row * set.layout.size;
  const float* factors = set.factors + row;
  F16 highest[N];
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) s[r][0] = s[r][0] * set1(factors[r]), s[r][1] = s[r][1] * set1(factors[r]);
  if (set.softcap != 0)
    for (int r = 0; r < N; r++)
      for (int h = 0; h < 2; h++) s[r][h] = set1(set.softcap) * tanh(s[r][h] / set1(set.softcap));
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) {
    if (!kFull) s[r][0] = keep_seen(s[r][0], seen[r], 0, -__builtin_inff()), s[r][1] = keep_seen(s[r][1], seen[r], 1, -__builtin_inff());
    highest[r] = max(s[r][0], s[r][1]);
  }
  alignas(64) float new_max[16];
  F16 old = load(maxima), m = max(row_maxima(highest), old);
  store(new_max, m);
  store(maxima, m);  // a whole vector, so that the next tile can take it before it has reached the cache; other rows' stay as they are
  store(growth.alpha, exp(old - m));
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) {
    s[r][0] = exp(s[r][0] - set1(new_max[r])), s[r][1] = exp(s[r][1] - set1(new_max[r]));
    if (!kFull) s[r][0] = keep_seen(s[r][0], seen[r], 0, 0.0f), s[r][1] = keep_seen(s[r][1], seen[r], 1, 0.0f);
    float* sum = rows + r * set.layout.size + set.layout.sum;
    if constexpr (kIsCodes<T>) highest[r] = take_in_scales<kFull>(tile, kFull ? Range{0, kTile} : seen[r], s[r], sum, growth.alpha[r]);
    else store(sum, Product<T>::add_rounded(load(sum) * set1(growth.alpha[r]), set.p + r * kTile, s[r][0], s[r][1]));
  }
  if constexpr (kIsCodes<T>) place_codes(set, s, highest, growth);
}

enum class Part { both, first, second };  // of a step's two keys

// acc[r] += p[r][j] v[j] for the keys j of one step.
template <class T, int N, int V, bool kAhead, Part kPart>
OCTAVO_INLINE void weigh_step(typename Product<T>::Sum (&acc)[N][V], const Input<T>* p, const T* v, const T* next) {
  using P = Product<T>;
  typename P::Vector weight[N];
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) weight[r] = P::spread(p + r * kTile);
  OCTAVO_UNROLL
  for (int c = 0; c < V; c++) {
    auto x = P::load(v + 16 * c * P::kDepth);
    if constexpr (kPart == Part::first) x = first_of_pairs(x);
    if constexpr (kPart == Part::second) x = second_of_pairs(x);
    if (kAhead && 16 * c * P::kDepth * sizeof(T) % 64 == 0) fetch(next + 16 * c * P::kDepth);
    OCTAVO_UNROLL
    for (int r = 0; r < N; r++) acc[r][c] = P::add(acc[r][c], weight[r], x);
  }
}

// The keys [lo, hi) of one half, ascending. The partner of an odd end is not seen: its value must not even meet a zero, unless it is a code.
template <class T, int N, int V, bool kAhead>
OCTAVO_INLINE void weigh_half(typename Product<T>::Sum (&acc)[N][V], const Input<T>* p, const T* v, const T* next, int64_t stride, int lo, int hi) {
  constexpr int kDepth = Product<T>::kDepth;
  constexpr bool kPartners = kDepth == 2 && !kIsCodes<T>;
  int64_t s = lo / kDepth;
  if constexpr (kIsCodes<T>) hi = (hi + 1) / 2 * 2;
  if constexpr (kPartners)
    if (lo % 2) weigh_step<T, N, V, kAhead, Part::second>(acc, p + 2 * s, v + s * stride, next + s * stride), s++;
  for (; s < hi / kDepth; s++) weigh_step<T, N, V, kAhead, Part::both>(acc, p + s * kDepth, v + s * stride, next + s * stride);
  if constexpr (kPartners)
    if (hi % 2) weigh_step<T, N, V, kAhead, Part::first>(acc, p + 2 * s, v + s * stride, next + s * stride);
}

// o[r] = o[r] * alpha[r] + sum of p[r][j] v[j] over the keys j of a range, ascending, for V vectors of dims.
template <class T, int N, int V, bool kAhead>
static void weigh(const Input<T>* p, const TilePair<T>& tiles, int64_t column, Range seen, float* rows, int64_t row_size, int row, const Growth& growth) {
  typename Product<T>::Sum acc[N][V];
  auto before = [&](int r, int c) __attribute__((always_inline)) { return load(rows + r * row_size + column + 16 * c) * set1(growth.alpha[row + r]); };
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++)
    OCTAVO_UNROLL
    for (int c = 0; c < V; c++)
      if constexpr (kIsCodes<T>) acc[r][c] = zero_int();
      else acc[r][c] = before(r, c);
  const int64_t start = column * Product<T>::kDepth, stride = tiles.now.v_stride;
  for (int h = 0; h < 2; h++) {
    int lo = clamp_half(seen.lo - kHalf * h), hi = clamp_half(seen.hi - kHalf * h);
    if (lo < hi) weigh_half<T, N, V, kAhead>(acc, p + h * kHalf, tiles.now.v[h] + start, tiles.ahead.v[h] + start, stride, lo, hi);
  }
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++)
    OCTAVO_UNROLL
    for (int c = 0; c < V; c++)
      if constexpr (kIsCodes<T>) store(rows + r * row_size + column + 16 * c, fmadd(to_float(acc[r][c]), set1(growth.gain[row + r]), before(r, c)));
      else store(rows + r * row_size + column + 16 * c, acc[r][c]);
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

// All dims of up to kValueRows rows, from `row` on of those at `rows`, that see the same range.
template <class T, bool kAhead>
OCTAVO_INLINE void weigh_rows(int row, int n, const RowSet<T>& set, const TilePair<T>& tiles, Range seen, float* rows, const Growth& growth) {
  const Input<T>* p = set.p + row * kTile;
  rows += row * set.layout.size;
  with_count<kValueRows>(n, [&](auto count) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    int64_t c = 0;
    for (; c + kValueVectors <= set.num_vectors; c += kValueVectors)
      weigh<T, N, kValueVectors, kAhead>(p, tiles, 16 * c, seen, rows, set.layout.size, row, growth);
    for (; c < set.num_vectors; c++) weigh<T, N, 1, kAhead>(p, tiles, 16 * c, seen, rows, set.layout.size, row, growth);
  });
}

// Scores and probabilities of N rows that follow each other from `row` on.
template <class T, int N, bool kFull, bool kAhead>
static void score_rows(const RowSet<T>& set, int row, const TilePair<T>& tiles, const Range* seen, float* states, Growth& growth) {
  F16 s[N][2];
  const Input<T>* q = set.q + (row / kScoreRows * set.dim * kScoreRows + row % kScoreRows * Product<T>::kDepth);
  score<T, N, kAhead>(q, set.dim, tiles, s);
  soften<T, N, kFull>(set, row, s, tiles.now, seen, states, growth);
}

// The same in two steps, for a unit's first N rows and a tile that they see whole.
template <class T, int N>
static __attribute__((noinline)) void keep_scores(const RowSet<T>& set, const TilePair<T>& tiles, float* scores) {
  F16 s[N][2];
  score<T, N, true>(set.q, set.dim, tiles, s);
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) store(scores + r * kTile, s[r][0]), store(scores + r * kTile + kHalf, s[r][1]);
}
template <class T, int N>
static __attribute__((noinline)) void soften_kept(const RowSet<T>& set, const float* scores, const Tile<T>& tile, float* states, Growth& growth) {
  F16 s[N][2];
  OCTAVO_UNROLL
  for (int r = 0; r < N; r++) s[r][0] = load(scores + r * kTile), s[r][1] = load(scores + r * kTile + kHalf);
  soften<T, N, true>(set, 0, s, tile, nullptr, states, growth);
}

// Passes the states of `n` rows, from `row` on and within one group of kScoreRows, through one tile. kFull: all see all of it.
template <class T, bool kFull, bool kAhead>
static void attend_tile(const RowSet<T>& set, int row, int n, const TilePair<T>& tiles, const Range* seen, float* states) {
  Growth growth;
  with_count<kScoreRows>(n, [&](auto count) __attribute__((always_inline)) {
    score_rows<T, decltype(count)::value, kFull, kAhead>(set, row, tiles, seen, states, growth);
  });
  float* rows = states + set.layout.rows + row * set.layout.size;
  for (int r = 0, same; r < n; r += same) {
    Range range = kFull ? Range{0, kTile} : seen[r];
    for (same = 1; same < kValueRows && r + same < n && (kFull || seen[r + same] == range);) same++;
    weigh_rows<T, kAhead>(r, same, set, tiles, range, rows, growth);
  }
}

}  // namespace octavo::OCTAVO_ISA
