// What products of all packed formats share: how work is cut into units, which memory is asked for early, how outputs are stored.
#pragma once
#include "kernels.h"
#include "kv_ahead.h"
#include "kv_layout.h"
#include "packed.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr int kGroupRows = 64;             // rows that a unit of work multiplies with the panels it holds
constexpr int64_t kUnitBytes = 256 << 10;  // of weights per unit: they stay in the L2 cache while rows pass
constexpr int64_t kUnitsPerThread = 8;

OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory to ask for while multiplying, `stride` bytes at a step.
struct Ahead {
  const char* next;
  int64_t stride;
};

// A thread's way through the keys and values to come: the next lines of one block, spread over `steps` steps; at most one every other step,
// since with more of them under way the weights would wait. Where there are none left, a line that is cached anyway.
OCTAVO_INLINE Ahead next_lines(const LinearArgs& a, int thread, int64_t steps, const char* cached) {
  if (a.ahead == nullptr || *a.count < kFewestAheadRows || steps < 2) return {cached, 0};
  const KVAhead& kv = *a.ahead;
  KVCursor& cursor = kv.cursors[thread];
  if (cursor.lines == 0) {
    if (cursor.next >= least(kv.plan->num_blocks_ahead, kMostAheadBytes / kv.cache->block_bytes)) return {cached, 0};
    cursor.at = keys_of(*kv.cache, kv.layer, kv.plan->blocks_ahead[cursor.next], 0);
    cursor.lines = ceil_div(kv.cache->block_bytes, 64);
    cursor.next += kv.num_threads;
  }
  const int64_t lines = least(cursor.lines, steps / 2);
  const Ahead ahead{cursor.at, ceil_div(lines * 64, steps)};
  cursor.at += lines * 64;
  cursor.lines -= lines;
  return ahead;
}

// Where a tile's outputs go: `width` columns from `out` on, of which the last panel may be partly filled.
struct Output {
  float* out;
  int64_t stride;
  const float* bias;
  int64_t width;
};

// The sums of one row and one panel, `start` columns from the output's first.
OCTAVO_INLINE void store_sums(F16 sum, const Output& o, int64_t row, int64_t start) {
  const int lanes = static_cast<int>(least(o.width - start, kPanel));
  if (o.bias != nullptr) sum = sum + load_first(o.bias + start, lanes);
  if (lanes == kPanel) store(o.out + row * o.stride + start, sum);
  else store_first(o.out + row * o.stride + start, sum, lanes);
}

// A product cut into units: blocks of panels x groups of rows, the groups of one block one after the other: its weights are read once.
struct Cut {
  int64_t rows, panels, group_rows, block;

  int64_t num_groups() const { return ceil_div(rows, group_rows); }
};

// Units begin at multiples of `row_step` rows and `panel_step` panels. There must be rows.
OCTAVO_INLINE Cut cut_product(const LinearArgs& a, int64_t row_step, int64_t panel_step, int num_threads) {
  const PackedMatrix& m = *a.weight;
  const int64_t rows = *a.count, panels = ceil_div(m.out_features, kPanel);
  const int64_t groups = ceil_div(rows, kGroupRows), group_rows = ceil_div(ceil_div(rows, groups), row_step) * row_step;
  const int64_t steps_per_unit = ceil_div(ceil_div(panels, panel_step) * groups, kUnitsPerThread * num_threads);
  const int64_t most = kUnitBytes / (panel_step * panel_bytes(m.format, m.in_features));
  return {rows, panels, group_rows, least(steps_per_unit, most > 1 ? most : 1) * panel_step};
}

// Rows [row, row + count) and panels [panel, last_panel); `then` is the panel that this thread's next unit probably begins with.
struct Unit {
  int64_t row, count, panel, last_panel, then;
};

// body(unit, thread) for each unit.
template <class Body>
OCTAVO_INLINE void for_units(Pool& pool, const Cut& cut, const Body& body) {
  const int64_t groups = cut.num_groups();
  parallel_for(pool, ceil_div(cut.panels, cut.block) * groups, [&](int64_t unit, int thread) {
    const int64_t row = unit % groups * cut.group_rows, panel = unit / groups * cut.block;
    const int64_t then = (unit + pool.num_threads()) / groups * cut.block;
    body(Unit{row, least(cut.group_rows, cut.rows - row), panel, least(panel + cut.block, cut.panels), then}, thread);
  });
}

// body<n>(first panel's weights, memory to ask for meanwhile, outputs) for the panels of a unit, n = PANELS or 1 of them at a time.
// What is asked for may lie past the matrix: there begins the one that was packed after it, and is usually multiplied after it.
template <int PANELS, class Body>
OCTAVO_INLINE void for_panels(const LinearArgs& a, const Unit& unit, const Body& body) {
  const PackedMatrix& m = *a.weight;
  const int64_t size = panel_bytes(m.format, m.in_features);
  const char* weights = static_cast<const char*>(m.data);
  for (int64_t panel = unit.panel; panel < unit.last_panel;) {
    const int64_t count = unit.last_panel - panel < PANELS ? 1 : PANELS, column = panel * kPanel;
    const int64_t next = panel + count < unit.last_panel ? panel + count : unit.then;
    const Output o{a.out + unit.row * a.out_stride + column, a.out_stride, m.bias ? m.bias + column : nullptr, m.out_features - column};
    if (count == PANELS) body.template operator()<PANELS>(weights + panel * size, weights + next * size, o);
    else body.template operator()<1>(weights + panel * size, weights + next * size, o);
    panel += count;
  }
}

}  // namespace octavo::OCTAVO_ISA
