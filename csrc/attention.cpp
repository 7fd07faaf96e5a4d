// Paged attention over a ragged batch: units of a plan, each a block of rows over a range of chunks for one KV head.
//
//   keys    |chunk 0 = 16 tiles of 32|chunk 1|chunk 2 ..     at absolute positions, wherever their blocks lie
//   row     state passes through the tiles of a chunk, ascending; then total = merge(total, chunk), ascending
//
// Requests that begin with the same blocks are passed over those first, all their rows at once; each then goes on alone.
#include "attention_plan.h"
#include "attention_source.h"
#include "attention_states.h"
#include "attention_tile.h"
#include "kernels.h"
#include "kv_ahead.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline constexpr int64_t kTilesAhead = 2;  // a tile is fetched while the second one before it is at work

// The first tiles of the unit that this thread will probably claim next, fetched while the last ones of its own are at work.
template <class T>
struct Following {
  Tile<T> tiles[kTilesAhead + 1];
  int64_t count;
};

// The rows of one unit, of one request or of several.
template <class T>
struct Rows {
  RowSet<T> set;
  int count;
  int64_t window;  // 0: none
  int64_t keys_end;  // no row of this unit is passed over keys from here on
  int32_t lowest, highest;  // of the positions
  Following<T> following;
  int32_t positions[kMaxUnitRows];

  int64_t first_key_at(int64_t position) const { return window ? most(0, position - window + 1) : 0; }
  int64_t first_key() const { return first_key_at(lowest); }
  Range seen(int64_t row, int64_t start) const {
    return {static_cast<int>(least(most(first_key_at(positions[row]) - start, 0), kTile)),
            static_cast<int>(most(least(positions[row] + 1 - start, kTile), 0))};
  }
  // Keys of a tile that any row may see.
  OCTAVO_MEMBER Range bounds(int64_t start) const {
    return {static_cast<int>(most(first_key() - start, 0)), static_cast<int>(least(keys_end - start, kTile))};
  }
  bool all_see(int64_t start) const { return lowest >= start + kTile - 1 && first_key_at(highest) <= start; }
};

// A tile's first rows fetch the next one for all.
template <class T, bool kFull>
OCTAVO_INLINE void attend_some(const Rows<T>& rows, int row, int64_t n, const TilePair<T>& tiles, const Range* seen, float* states) {
  if (row == 0) attend_tile<T, kFull, true>(rows.set, row, static_cast<int>(n), tiles, seen, states);
  else attend_tile<T, kFull, false>(rows.set, row, static_cast<int>(n), tiles, seen, states);
}

// Few rows, tiles that all of them see whole and that lie in place: the next tile's scores are begun before this one's
// probabilities are needed, so that neither waits for the other's results.
template <class T, int N>
void attend_run(const Rows<T>& rows, const Source<T>& source, int64_t begin, int64_t end, float* states) {
  Growth growth;
  alignas(64) float scores[2][N * kTile];
  const RowSet<T>& set = rows.set;
  float* first = states + set.layout.rows;
  Tile<T> ring[4];  // tile t at t % 4; past the last one those of the unit to follow
  const int64_t last = (rows.keys_end - 1) / kTile;
  auto find = [&](int64_t t) __attribute__((always_inline)) {
    if (t <= last) ring[t % 4] = source.in_place(t * kTile, rows.bounds(t * kTile));
    else ring[t % 4] = t - last <= rows.following.count ? rows.following.tiles[t - last - 1] : ring[(t - 1) % 4];
  };
  auto pair_at = [&](int64_t t) __attribute__((always_inline)) { return TilePair<T>{ring[t % 4], ring[(t + kTilesAhead) % 4]}; };
  for (int64_t t = begin; t <= begin + kTilesAhead; t++) find(t);
  keep_scores<T, N>(set, pair_at(begin), scores[0]);
  for (int64_t t = begin; t < end; t++) {
    if (t + 1 < end) {
      find(t + 1 + kTilesAhead);
      keep_scores<T, N>(set, pair_at(t + 1), scores[(t + 1 - begin) % 2]);
    }
    const TilePair<T> tiles = pair_at(t);
    soften_kept<T, N>(set, scores[(t - begin) % 2], tiles.now, states, growth);
    for (int r = 0; r < N; r += kValueRows) weigh_rows<T, true>(r, N - r < kValueRows ? N - r : kValueRows, set, tiles, {0, kTile}, first, growth);
  }
}

// Passes the rows' states through tiles [begin, end), ascending. The states are the caller's: they come in and go on.
template <class T>
void attend(const Rows<T>& rows, const Source<T>& source, int64_t begin, int64_t end, float* states) {
  Range seen[kMaxUnitRows];
  for (int64_t t = begin; t < end; t++) {
    int64_t start = t * kTile;
    if (rows.count <= kScoreRows && source.direct && rows.all_see(start)) {
      int64_t last = least(end, (rows.lowest + 1) / kTile);
      with_count<kScoreRows>(rows.count, [&](auto count) __attribute__((always_inline)) {
        attend_run<T, decltype(count)::value>(rows, source, t, last, states);
      });
      t = last - 1;
      continue;
    }
    TilePair<T> tiles = source.tiles(start, rows.bounds(start), rows.bounds(start + kTile));
    if (rows.following.count > 1 && start + kTile >= rows.keys_end) tiles.ahead = rows.following.tiles[1];
    if (rows.all_see(start)) {
      for (int r = 0; r < rows.count; r += kScoreRows) attend_some<T, true>(rows, r, least(kScoreRows, rows.count - r), tiles, nullptr, states);
      continue;
    }
    for (int r = 0; r < rows.count; r++) seen[r] = rows.seen(r, start);
    for (int r = 0, n; r < rows.count; r += n) {
      n = 1;
      if (seen[r].empty()) continue;
      while ((r + n) % kScoreRows && r + n < rows.count && !seen[r + n].empty() && seen[r + n].full() == seen[r].full()) n++;
      if (seen[r].full()) attend_some<T, true>(rows, r, n, tiles, nullptr, states);
      else attend_some<T, false>(rows, r, n, tiles, seen + r, states);
    }
  }
}

// Where the row r of a row block is found: its token's row in the arrays and its query head.
struct RowPlace {
  const AttentionArgs& a;
  RowBlock block;
  int64_t kv_head;
  OCTAVO_MEMBER int64_t group() const { return a.plan->group; }
  OCTAVO_MEMBER int64_t token(int64_t r) const { return a.batch->query_starts[block.request] + (block.row_begin + r) / group(); }
  OCTAVO_MEMBER int64_t column(int64_t r) const { return (kv_head * group() + (block.row_begin + r) % group()) * a.cache->head_dim; }
};

void write_output(const RowPlace& place, const float* states) {
  const AttentionArgs& a = place.a;
  int64_t dim = a.cache->head_dim;
  StateLayout layout = layout_of(dim, place.block.num_rows);
  for (int r = 0; r < place.block.num_rows; r++) {
    const float* state = states + layout.rows + r * layout.size;
    F16 sum = set1(reduce_add(load(state + layout.sum)));
    int64_t at = place.token(r) * a.out_stride + place.column(r);
    for (int64_t i = 0; i < dim; i += 16) {
      F16 x = load(state + i) / sum;
      int n = static_cast<int>(least(dim - i, 16));
      alignas(64) uint16_t rounded[16];
      if (a.out_dtype == Dtype::f32) {
        store_first(static_cast<float*>(a.out) + at + i, x, n);
      } else {
        store_bf16(rounded, x);
        std::memcpy(static_cast<uint16_t*>(a.out) + at + i, rounded, static_cast<size_t>(n) * sizeof(uint16_t));
      }
    }
  }
}

// A query as an input of products, in steps that lie kScoreRows apart (RowSet). Returns its unit.
OCTAVO_INLINE float place_query(const float* q, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; i++) out[i * kScoreRows] = q[i];
  return 1.0f;
}
OCTAVO_INLINE float place_query(const float* q, int64_t dim, uint16_t* out) {
  alignas(64) uint16_t rounded[16];
  for (int64_t i = 0; i < dim; i += 16) {
    int n = static_cast<int>(least(dim - i, 16));
    store_bf16(rounded, load_first(q + i, n));
    for (int j = 0; j < n; j += 2) std::memcpy(out + (i + j) * kScoreRows, rounded + j, 2 * sizeof(uint16_t));
  }
  return 1.0f;
}
OCTAVO_INLINE float place_query(const float* q, int64_t dim, int16_t* out) {
  auto part = [&](int64_t i) __attribute__((always_inline)) { return load_first(q + i, static_cast<int>(least(dim - i, 16))); };
  F16 top = set1(kLeastTop);
  for (int64_t i = 0; i < dim; i += 16) top = max(abs(part(i)), top);
  const float unit = reduce_max(top) * (1 / kMaxInput);
  alignas(64) int16_t rounded[16];
  for (int64_t i = 0; i < dim; i += 16) {
    store_int16(rounded, part(i) * set1(1 / unit));
    for (int j = 0; j < least(dim - i, 16); j += 2) std::memcpy(out + (i + j) * kScoreRows, rounded + j, 2 * sizeof(int16_t));
  }
  return unit;
}

// A thread's memory for one unit.
template <class T>
struct Scratch {
  Input<T>* q;
  Input<T>* p;
  float* factors;
  T* tile;
  uint16_t* scales;
  float* total;
  float* chunk;

  Scratch(Pool& pool, int thread, const AttentionPlan& plan, int64_t padded_dim) {
    int64_t states = state_floats(padded_dim, plan.unit_rows);
    int64_t q_size = (plan.unit_rows + kScoreRows) * padded_dim, tile_size = 2 * kTile * padded_dim;
    int64_t bytes = size_of(q, q_size) + size_of(p, kScoreRows * kTile) + size_of(factors, kMaxUnitRows) + size_of(tile, tile_size) +
                    size_of(scales, 2 * kTile) + 2 * size_of(total, states);
    char* at = static_cast<char*>(pool.scratch(thread, bytes));
    take(at, q, q_size);
    take(at, p, kScoreRows * kTile);
    take(at, factors, kMaxUnitRows);
    take(at, tile, tile_size);
    take(at, scales, 2 * kTile);
    take(at, total, states);
    take(at, chunk, states);
  }
  template <class E>
  static int64_t size_of(const E*, int64_t count) { return round_up(static_cast<uint64_t>(count) * sizeof(E)); }
  template <class E>
  static void take(char*& at, E*& elements, int64_t count) {
    elements = reinterpret_cast<E*>(at);
    at += size_of(elements, count);
  }
  static int64_t round_up(uint64_t bytes) { return static_cast<int64_t>((bytes + 63) / 64 * 64); }
};

// The rows of some row blocks, one after the other.
template <class T>
Rows<T> make_rows(const AttentionArgs& a, const RowBlock* blocks, int num_blocks, int64_t kv_head, const Scratch<T>& scratch, int64_t padded_dim) {
  int64_t dim = a.cache->head_dim;
  Rows<T> rows{{scratch.q, scratch.factors, dim, padded_dim / 16, a.softcap, {}, scratch.p}, 0, a.window, 0, INT32_MAX, 0, {}, {}};
  for (int i = 0; i < num_blocks; i++) {
    RowPlace place{a, blocks[i], kv_head};
    for (int r = 0; r < blocks[i].num_rows; r++) {
      int32_t position = rows.positions[rows.count] = a.batch->positions[place.token(r)];
      if (position < rows.lowest) rows.lowest = position;
      if (position > rows.highest) rows.highest = position;
      Input<T>* first_of_group = scratch.q + rows.count / kScoreRows * kScoreRows * dim;
      const float* q = a.q + place.token(r) * a.q_stride + place.column(r);
      scratch.factors[rows.count] = a.scale * place_query(q, dim, first_of_group + rows.count % kScoreRows * Product<T>::kDepth);
      rows.count++;
    }
  }
  rows.set.layout = layout_of(dim, rows.count);
  rows.keys_end = rows.highest + 1;
  return rows;
}

// The chunks of a unit, and the first of its tiles: a shared pass has done those before.
struct Chunks {
  int64_t begin, end, first_tile;
};

// Chunks, ascending: merged into the total, or from `first_kept` on each into a state of its own.
template <class T>
void run_chunks(const Rows<T>& rows, const Source<T>& source, const Chunks& chunks, int64_t first_kept, float* kept, Progress& at) {
  const StateLayout& layout = rows.set.layout;
  int64_t size = state_floats(source.kv->head_dim, rows.count);
  for (int64_t c = chunks.begin; c < chunks.end; c++) {
    int64_t begin = most(most(c * (kChunk / kTile), rows.first_key() / kTile), chunks.first_tile);
    int64_t end = least((c + 1) * (kChunk / kTile), (rows.keys_end + kTile - 1) / kTile);
    bool single = c >= first_kept;
    if (!single && !at.inside && begin >= end) continue;
    float* states = single ? kept + (1 + c - first_kept) * size : at.at_work();
    if (!at.inside) clear_states(layout, rows.count, states);
    attend(rows, source, begin, end, states);
    if (single) continue;
    if (at.started) merge_states({at.total, layout}, rows.count, {states, layout});
    at.started = true, at.inside = false;
  }
  if (!at.started) clear_states(layout, rows.count, at.total);
}

template <class T>
Source<T> source_of(const AttentionArgs& a, int32_t request, int64_t kv_head, const Scratch<T>& scratch, int64_t padded_dim) {
  return {a.cache, a.batch->block_tables + a.batch->table_rows[request] * a.batch->table_stride, a.layer, kv_head, padded_dim, scratch.tile, scratch.scales};
}

OCTAVO_INLINE float* states_at(const AttentionPlan& plan, int64_t kv_head, int64_t states) { return plan.states + kv_head * plan.states_stride + states; }

OCTAVO_INLINE int64_t padded_dim_of(const AttentionArgs& a) { return (a.cache->head_dim + 15) / 16 * 16; }

// The tile in which a unit begins, but for a window.
OCTAVO_INLINE int64_t first_tile_of(const AttentionPlan& plan, const AttentionUnit& unit) {
  const SharedRows& shared = plan.shared_rows[unit.rows.request];
  return most(int64_t{unit.chunk_begin} * (kChunk / kTile), shared.pass < 0 ? 0 : plan.passes[shared.pass].num_tiles);
}

template <class T>
Following<T> following_of(const AttentionArgs& a, int64_t unit, const Scratch<T>& scratch, int64_t padded_dim) {
  const AttentionPlan& plan = *a.plan;
  const int64_t heads = a.cache->num_kv_heads;
  Following<T> following{};
  if (unit >= plan.num_units * heads || a.window != 0) return following;
  const AttentionUnit& next = plan.units[unit / heads];
  Source<T> source = source_of(a, next.rows.request, unit % heads, scratch, padded_dim);
  const int64_t first = first_tile_of(plan, next), keys = a.batch->positions[RowPlace{a, next.rows, 0}.token(0)] + 1;
  if (!source.direct) return following;
  while (following.count <= kTilesAhead && (first + following.count + 1) * kTile <= keys) {
    following.tiles[following.count] = source.in_place((first + following.count) * kTile, {0, kTile});
    following.count++;
  }
  return following;
}

// Unit `index` of a request and a KV head: writes its rows, or keeps states for the merge to come.
template <class T>
void run_unit(const AttentionArgs& a, Pool& pool, int64_t index, int thread) {
  const AttentionPlan& plan = *a.plan;
  const AttentionUnit& unit = plan.units[index / a.cache->num_kv_heads];
  const int64_t kv_head = index % a.cache->num_kv_heads;
  int64_t padded_dim = padded_dim_of(a);
  Scratch<T> scratch(pool, thread, plan, padded_dim);
  Rows<T> rows = make_rows(a, &unit.rows, 1, kv_head, scratch, padded_dim);
  Source<T> source = source_of(a, unit.rows.request, kv_head, scratch, padded_dim);
  rows.following = following_of(a, index + pool.num_threads(), scratch, padded_dim);
  const SharedRows& shared = plan.shared_rows[unit.rows.request];
  float* kept = unit.kept.states < 0 ? nullptr : states_at(plan, kv_head, unit.kept.states);
  bool totals = unit.chunk_begin < unit.kept.first_kept || !kept;  // later units of a divided row block keep single chunks
  Chunks chunks{unit.chunk_begin, unit.chunk_end, first_tile_of(plan, unit)};
  Progress at{kept && totals ? kept : scratch.total, scratch.chunk, false, false};
  if (totals && shared.pass >= 0) take_over(plan, shared, kv_head, rows.count, at);
  run_chunks(rows, source, chunks, unit.kept.first_kept, kept, at);
  if (!kept) write_output({a, unit.rows, kv_head}, at.total);
}

// One unit of a shared pass. Its keys are found through the table of any of its requests.
template <class T>
void run_shared_unit(const AttentionArgs& a, Pool& pool, const SharedUnit& unit, int64_t kv_head, int thread) {
  const AttentionPlan& plan = *a.plan;
  const SharedPass& pass = plan.passes[unit.pass];
  const RowBlock* pieces = plan.pieces + pass.piece_begin;
  int64_t padded_dim = padded_dim_of(a);
  Scratch<T> scratch(pool, thread, plan, padded_dim);
  Rows<T> rows = make_rows(a, pieces, pass.piece_end - pass.piece_begin, kv_head, scratch, padded_dim);
  rows.keys_end = int64_t{pass.num_tiles} * kTile;
  Source<T> source = source_of(a, pieces->request, kv_head, scratch, padded_dim);
  float* kept = states_at(plan, kv_head, pass.kept.states);
  bool totals = unit.chunk_begin < pass.kept.first_kept;
  Progress at{totals ? kept : scratch.total, scratch.chunk, false, false};
  run_chunks(rows, source, {unit.chunk_begin, unit.chunk_end, 0}, pass.kept.first_kept, kept, at);
}

void run_merge(const AttentionArgs& a, const AttentionMerge& merge, int64_t kv_head) {
  int64_t dim = a.cache->head_dim, size = state_floats(dim, merge.rows.num_rows);
  StateLayout layout = layout_of(dim, merge.rows.num_rows);
  float* total = states_at(*a.plan, kv_head, merge.states);
  for (int64_t i = 1; i < merge.num_states; i++) merge_states({total, layout}, merge.rows.num_rows, {total + i * size, layout});
  write_output({a, merge.rows, kv_head}, total);
}

template <class T>
void run_units(const AttentionArgs& a, Pool& pool) {
  const AttentionPlan& plan = *a.plan;
  int64_t heads = a.cache->num_kv_heads;
  parallel_for(pool, plan.num_shared_units * heads,
               [&](int64_t unit, int thread) { run_shared_unit<T>(a, pool, plan.shared_units[unit / heads], unit % heads, thread); });
  parallel_for(pool, plan.num_units * heads,
               [&](int64_t unit, int thread) { run_unit<T>(a, pool, unit, thread); });
  if (plan.num_merges)
    parallel_for(pool, plan.num_merges * heads, [&](int64_t unit, int) { run_merge(a, plan.merges[unit / heads], unit % heads); });
}

}  // namespace

void paged_attention(const AttentionArgs& a, Pool& pool) {
  if (a.ahead != nullptr)
    for (int32_t thread = 0; thread < a.ahead->num_threads; thread++) a.ahead->cursors[thread] = {thread, nullptr, 0};
  if (a.cache->dtype == Dtype::bf16) run_units<uint16_t>(a, pool);
  else if (a.cache->dtype == Dtype::int8) run_units<int8_t>(a, pool);
  else run_units<float>(a, pool);
}

}  // namespace octavo::OCTAVO_ISA
