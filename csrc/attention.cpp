// Paged attention over a ragged batch: units of a plan, each a block of rows over a range of chunks for one KV head.
//
//   keys    |chunk 0 = 16 tiles of 32|chunk 1|chunk 2 ..     at absolute positions, wherever their blocks lie
//   row     state passes through the tiles of a chunk, ascending; then total = merge(total, chunk), ascending
#include "attention_plan.h"
#include "attention_tile.h"
#include "kernels.h"
#include "kv_layout.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys and values of one request and one KV head, tile by tile.
template <class T>
struct Source {
  const KVLayout* kv;
  const int32_t* table;
  int64_t layer, head;
  int64_t padded_dim;
  T* copy;  // [kTile] keys, then as many values, in the layout of a block of kTile keys; only where `direct` is false
  bool direct;  // halves of 16 keys can be read where they lie

  static constexpr int kDepth = Product<T>::kDepth;

  OCTAVO_MEMBER const T* keys(int64_t position) const {
    return reinterpret_cast<const T*>(keys_of(*kv, layer, table[position / kv->block_size], head));
  }
  OCTAVO_MEMBER const T* values(int64_t position) const {
    return reinterpret_cast<const T*>(values_of(*kv, layer, table[position / kv->block_size], head));
  }

  // The tile that starts at `start`, of which keys [lo, hi) are seen by some row: no other block is looked up.
  OCTAVO_MEMBER Tile<T> tile(int64_t start, int lo, int hi) const { return direct ? in_place(start, lo, hi) : gathered(start, lo, hi); }

  OCTAVO_MEMBER Tile<T> in_place(int64_t start, int lo, int hi) const {
    int first = lo / kHalf, last = (hi - 1) / kHalf;
    Tile<T> t{{}, {}, int64_t{kv->block_size} * kDepth, padded_dim * kDepth};
    for (int half = first; half <= last; half++) {
      int64_t position = start + half * kHalf, offset = position % kv->block_size;
      t.k[half] = keys(position) + offset * kDepth;
      t.v[half] = values(position) + offset * padded_dim;
    }
    if (first == last) {  // nobody sees the other half, so any memory will do
      t.k[1 - first] = t.k[first];
      t.v[1 - first] = t.v[first];
    }
    return t;
  }

  Tile<T> gathered(int64_t start, int lo, int hi) const {
    int64_t span = least(kv->block_size, kTile);
    T* v = copy + kTile * padded_dim;
    for (int64_t j = lo / span * span; j < hi; j += span) {
      int64_t offset = (start + j) % kv->block_size;
      copy_keys(keys(start + j), offset, span, copy + j * kDepth);
      copy_values(values(start + j), offset, span, j, v);
    }
    return {{copy, copy + kHalf * kDepth}, {v, v + kHalf * padded_dim}, kTile * kDepth, padded_dim * kDepth};
  }

  OCTAVO_MEMBER void copy_keys(const T* block, int64_t offset, int64_t count, T* out) const {
    int64_t stride = int64_t{kv->block_size} * kDepth;
    const T* in = block + offset * kDepth;
    for (int64_t i = 0; i < kv->head_dim; i += kDepth, in += stride, out += kTile * kDepth)
      for (int64_t j = 0; j < count * kDepth; j++) out[j] = in[j];
  }

  OCTAVO_MEMBER void copy_values(const T* block, int64_t offset, int64_t count, int64_t j, T* v) const {
    int64_t dim = kv->head_dim;
    if (kDepth == 2 && count == 1) {
      for (int64_t i = 0; i < dim; i++) v[(j / 2 * padded_dim + i) * 2 + j % 2] = block[i];
      return;
    }
    for (int64_t s = 0; s < count; s += kDepth)
      std::memcpy(v + (j + s) * padded_dim, block + (offset + s) * dim, static_cast<size_t>(dim * kDepth) * sizeof(T));
  }

  // Asks for a tile that will be read soon.
  OCTAVO_MEMBER void prefetch(int64_t start, int lo, int hi) const {
    if (!direct) return;
    Tile<T> t = in_place(start, lo, hi);
    for (int half = 0; half < 2; half++) {
      for (int64_t i = 0; i < kv->head_dim / kDepth; i++) __builtin_prefetch(t.k[half] + i * t.k_stride);
      for (int64_t i = 0; i < kHalf * padded_dim; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(t.v[half] + i);
    }
  }
};

// The rows of one unit.
template <class T>
struct Rows {
  RowSet<T> set;
  int count;
  int64_t window;                   // 0: none
  int32_t positions[kMaxUnitRows];  // ascending

  int64_t first_key(int64_t row) const { return window ? most(0, positions[row] - window + 1) : 0; }
  Range seen(int64_t row, int64_t start) const {
    return {static_cast<int>(least(most(first_key(row) - start, 0), kTile)), static_cast<int>(most(least(positions[row] + 1 - start, kTile), 0))};
  }
  bool all_see(int64_t start) const { return positions[0] >= start + kTile - 1 && first_key(count - 1) <= start; }
};

constexpr int kPrefetchRows = 16;  // with more, a tile's products take longer than its reading

// Passes the rows' states through tiles [begin, end), ascending. The states are the caller's: they come in and go on.
template <class T>
void attend(const Rows<T>& rows, const Source<T>& source, int64_t begin, int64_t end, float* states) {
  Range seen[kMaxUnitRows];
  auto bounds = [&](int64_t start) {
    return Range{static_cast<int>(most(rows.first_key(0) - start, 0)), static_cast<int>(least(rows.positions[rows.count - 1] + 1 - start, kTile))};
  };
  for (int64_t t = begin; t < end; t++) {
    int64_t start = t * kTile;
    Range range = bounds(start);
    Tile<T> tile = source.tile(start, range.lo, range.hi);
    if (t + 1 < end && rows.count <= kPrefetchRows) source.prefetch(start + kTile, 0, bounds(start + kTile).hi);
    if (rows.all_see(start)) {
      for (int r = 0; r < rows.count; r += kScoreRows)
        attend_tile<T, true>(rows.set, r, static_cast<int>(least(kScoreRows, rows.count - r)), tile, nullptr, states);
      continue;
    }
    for (int r = 0; r < rows.count; r++) seen[r] = rows.seen(r, start);
    for (int r = 0, n; r < rows.count; r += n) {
      n = 1;
      if (seen[r].empty()) continue;
      while (n < kScoreRows && r + n < rows.count && !seen[r + n].empty() && seen[r + n].full() == seen[r].full()) n++;
      if (seen[r].full()) attend_tile<T, true>(rows.set, r, n, tile, nullptr, states);
      else attend_tile<T, false>(rows.set, r, n, tile, seen + r, states);
    }
  }
}

void clear_states(const StateLayout& layout, int count, float* states) {
  for (int64_t i = 0; i < count * layout.size; i += 16) store(states + i, zero());
  for (int r = 0; r < count; r++) states[r * layout.size + layout.max] = -__builtin_inff();
}

// total = merge(total, chunk) for each row; a state without keys changes nothing, and is changed into the other.
void merge_states(const StateLayout& layout, int count, float* totals, const float* chunks) {
  for (int r = 0; r < count; r++) {
    float* total = totals + r * layout.size;
    const float* chunk = chunks + r * layout.size;
    if (chunk[layout.max] == -__builtin_inff()) continue;
    if (total[layout.max] == -__builtin_inff()) {
      for (int64_t i = 0; i < layout.size; i += 16) store(total + i, load(chunk + i));
      continue;
    }
    float m = total[layout.max] > chunk[layout.max] ? total[layout.max] : chunk[layout.max];
    F16 a = exp(set1(total[layout.max] - m)), b = exp(set1(chunk[layout.max] - m));
    for (int64_t i = 0; i < layout.max; i += 16) store(total + i, fmadd(load(chunk + i), b, load(total + i) * a));
    total[layout.max] = m;
  }
}

StateLayout layout_of(int64_t head_dim) {
  int64_t size = state_size(head_dim);
  return {size, size - 32, size - 16};
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
  StateLayout layout = layout_of(dim);
  for (int r = 0; r < place.block.num_rows; r++) {
    const float* state = states + r * layout.size;
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

OCTAVO_INLINE void round_query(const float* q, int64_t dim, float* out) { std::memcpy(out, q, static_cast<size_t>(dim) * sizeof(float)); }
OCTAVO_INLINE void round_query(const float* q, int64_t dim, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) store_bf16(out + i, load(q + i));
  for (; i < dim; i++) out[i] = float_to_bf16(q[i]);
}

// A thread's memory for one unit.
template <class T>
struct Scratch {
  T* q;
  T* p;
  T* tile;
  float* total;
  float* chunk;

  Scratch(Pool& pool, int thread, const AttentionPlan& plan, int64_t padded_dim) {
    int64_t sizes[] = {round_up(plan.unit_rows * padded_dim * sizeof(T)), round_up(kScoreRows * kTile * sizeof(T)),
                       round_up(2 * kTile * padded_dim * sizeof(T)), round_up(plan.unit_rows * plan.state_size * sizeof(float)),
                       round_up(plan.unit_rows * plan.state_size * sizeof(float))};
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += size;
    char* at = static_cast<char*>(pool.scratch(thread, bytes));
    auto take = [&](int i) { return at += sizes[i], at - sizes[i]; };
    q = reinterpret_cast<T*>(take(0));
    p = reinterpret_cast<T*>(take(1));
    tile = reinterpret_cast<T*>(take(2));
    total = reinterpret_cast<float*>(take(3));
    chunk = reinterpret_cast<float*>(take(4));
  }
  static int64_t round_up(uint64_t bytes) { return static_cast<int64_t>((bytes + 63) / 64 * 64); }
};

template <class T>
Rows<T> make_rows(const RowPlace& place, const Scratch<T>& scratch, int64_t padded_dim) {
  const AttentionArgs& a = place.a;
  int64_t dim = a.cache->head_dim;
  Rows<T> rows{{scratch.q, dim, padded_dim / 16, a.scale, a.softcap, layout_of(dim), scratch.p}, place.block.num_rows, a.window, {}};
  for (int r = 0; r < rows.count; r++) {
    rows.positions[r] = a.batch->positions[place.token(r)];
    round_query(a.q + place.token(r) * a.q_stride + place.column(r), dim, scratch.q + r * dim);
  }
  return rows;
}

// One unit: its chunks, ascending, merged into a total or kept as states for the merge to come.
template <class T>
void run_unit(const AttentionArgs& a, Pool& pool, const AttentionUnit& unit, int64_t kv_head, int thread) {
  const AttentionPlan& plan = *a.plan;
  int64_t padded_dim = (a.cache->head_dim + 15) / 16 * 16;
  RowPlace place{a, unit.rows, kv_head};
  Scratch<T> scratch(pool, thread, plan, padded_dim);
  Rows<T> rows = make_rows(place, scratch, padded_dim);
  const int32_t* table = a.batch->block_tables + a.batch->table_rows[unit.rows.request] * a.batch->table_stride;
  bool direct = a.cache->block_size >= kHalf && padded_dim == a.cache->head_dim;
  Source<T> source{a.cache, table, a.layer, kv_head, padded_dim, scratch.tile, direct};

  const StateLayout& layout = rows.set.layout;
  float* kept = unit.first_state < 0 ? nullptr : plan.states + (kv_head * plan.max_states + unit.first_state) * plan.state_size;
  bool totals = unit.chunk_begin == 0;  // later units of a divided row block keep single chunks
  float* total = kept && totals ? kept : scratch.total;
  bool started = false;
  for (int64_t c = unit.chunk_begin; c < unit.chunk_end; c++) {
    int64_t begin = most(c * (kChunk / kTile), rows.first_key(0) / kTile);
    int64_t end = least((c + 1) * (kChunk / kTile), rows.positions[rows.count - 1] / kTile + 1);
    float* states = !totals ? kept + (c - unit.chunk_begin) * unit.rows.num_rows * plan.state_size : started ? scratch.chunk : total;
    if (totals && begin >= end) continue;
    clear_states(layout, rows.count, states);
    attend(rows, source, begin, end, states);
    if (totals && started) merge_states(layout, rows.count, total, states);
    started = true;
  }
  if (totals && !started) clear_states(layout, rows.count, total);
  if (!kept) write_output(place, total);
}

void run_merge(const AttentionArgs& a, const AttentionMerge& merge, int64_t kv_head) {
  const AttentionPlan& plan = *a.plan;
  float* total = plan.states + (kv_head * plan.max_states + merge.first_state) * plan.state_size;
  for (int64_t i = 1; i < merge.num_states; i++)
    merge_states(layout_of(a.cache->head_dim), merge.rows.num_rows, total, total + i * merge.rows.num_rows * plan.state_size);
  write_output({a, merge.rows, kv_head}, total);
}

}  // namespace

void paged_attention(const AttentionArgs& a, Pool& pool) {
  const AttentionPlan& plan = *a.plan;
  int64_t heads = a.cache->num_kv_heads;
  parallel_for(pool, plan.num_units * heads, [&](int64_t unit, int thread) {
    if (a.cache->dtype == Dtype::bf16) run_unit<uint16_t>(a, pool, plan.units[unit / heads], unit % heads, thread);
    else run_unit<float>(a, pool, plan.units[unit / heads], unit % heads, thread);
  });
  if (plan.num_merges)
    parallel_for(pool, plan.num_merges * heads, [&](int64_t unit, int) { run_merge(a, plan.merges[unit / heads], unit % heads); });
}

}  // namespace octavo::OCTAVO_ISA
