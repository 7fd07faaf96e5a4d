// Running states of rows: cleared, merged, and taken over from a pass that many requests shared.
#pragma once
#include "attention_plan.h"
#include "attention_tile.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE StateLayout layout_of(int64_t head_dim, int64_t rows) {
  return {state_maxima_floats(rows), state_row_floats(head_dim), state_row_floats(head_dim) - 16};
}

// States from row `first` on of those that lie at `states`.
struct RowStates {
  float* states;
  StateLayout layout;
  int64_t first = 0;

  OCTAVO_MEMBER float& maximum(int64_t r) const { return states[state_maximum(first + r)]; }
  OCTAVO_MEMBER float* row(int64_t r) const { return states + layout.rows + (first + r) * layout.size; }
};

static inline void clear_states(const StateLayout& layout, int count, float* states) {
  for (int64_t i = 0; i < layout.rows; i += 16) store(states + i, set1(-__builtin_inff()));
  for (int64_t i = 0; i < count * layout.size; i += 16) store(states + layout.rows + i, zero());
}

// total = merge(total, chunk) for each row; a state without keys changes nothing, and is changed into the other.
static void merge_states(const RowStates& totals, int count, const RowStates& chunks) {
  const int64_t size = totals.layout.size;
  for (int r = 0; r < count; r++) {
    float *total = totals.row(r), *chunk = chunks.row(r);
    float before = totals.maximum(r), other = chunks.maximum(r), m = before > other ? before : other;
    if (other == -__builtin_inff()) continue;
    totals.maximum(r) = m;
    if (before == -__builtin_inff()) {
      for (int64_t i = 0; i < size; i += 16) store(total + i, load(chunk + i));
      continue;
    }
    F16 a = exp(set1(before - m)), b = exp(set1(other - m));
    for (int64_t i = 0; i < size; i += 16) store(total + i, fmadd(load(chunk + i), b, load(total + i) * a));
  }
}

// The states of a unit at work.
struct Progress {
  float* total;  // of the chunks so far
  float* chunk;  // the chunk at work, but for the first, which is at work in the total itself
  bool started;  // there is a total
  bool inside;   // the chunk at work was begun by a shared pass
  OCTAVO_MEMBER float* at_work() const { return started ? chunk : total; }
};

// What a shared pass left of `count` rows, its own from row `first` on: complete chunks become the total, and a chunk
// that it ended in is the one at work.
static void take_over(const AttentionPlan& plan, const SharedRows& shared, int64_t kv_head, int count, Progress& at) {
  const SharedPass& pass = plan.passes[shared.pass];
  const int64_t dim = plan.shape.head_dim, size = state_floats(dim, pass.num_rows);
  const int32_t complete = pass.num_tiles / (kChunk / kTile);
  float* left = plan.states + kv_head * plan.states_stride + pass.kept.states;
  auto left_in = [&](int64_t i) { return RowStates{left + i * size, layout_of(dim, pass.num_rows), shared.row_begin}; };
  const StateLayout layout = layout_of(dim, count);
  if (complete > 0) {
    clear_states(layout, count, at.total);
    for (int32_t i = 0; i <= complete - pass.kept.first_kept; i++) merge_states({at.total, layout}, count, left_in(i));
    at.started = true;
  }
  at.inside = pass.num_tiles % (kChunk / kTile) != 0;
  if (!at.inside) return;
  clear_states(layout, count, at.at_work());
  merge_states({at.at_work(), layout}, count, left_in(1 + complete - pass.kept.first_kept));
}

}  // namespace octavo::OCTAVO_ISA
