#include "step_layout.h"

#include <cstring>

namespace octavo {
namespace {

// Puts a request's new blocks behind those of its computed tokens; the first may take the place of the last one. Returns those after them.
const int32_t* append_blocks(const LayOutRowsArgs& a, int32_t i, const int32_t* blocks) {
  const int32_t count = a.columns.num_new_blocks[i], table = a.columns.table_rows[i];
  if (count == 0) return blocks;
  const int32_t held = (a.columns.num_computed[i] + a.block_size - 1) / a.block_size - a.columns.replaced[i];
  std::memcpy(a.block_tables + table * a.table_stride + held, blocks, count * sizeof(int32_t));
  return blocks + count;
}

// Places a request's tokens from row `row` on. Returns the row after them.
int32_t place_tokens(const LayOutRowsArgs& a, int32_t i, int32_t row) {
  const int32_t count = a.columns.num_scheduled[i], table = a.columns.table_rows[i];
  const int32_t* blocks = a.block_tables + table * a.table_stride;
  int32_t position = a.columns.num_computed[i];
  std::memcpy(a.history + table * a.history_stride + position, a.token_ids + row, count * sizeof(int32_t));
  for (const int32_t end = row + count; row < end; row++, position++) {
    a.positions[row] = position;
    a.slots[row] = blocks[position / a.block_size] * a.block_size + position % a.block_size;
  }
  return row;
}

}  // namespace

void lay_out_rows(const LayOutRowsArgs& a, Pool&) {
  const int32_t* blocks = a.columns.new_block_ids;
  int32_t row = 0;
  for (int32_t i = 0; i < *a.columns.num_requests; i++) {
    blocks = append_blocks(a, i, blocks);
    a.query_starts[i] = row;
    row = place_tokens(a, i, row);
  }
  a.query_starts[*a.columns.num_requests] = row;
}

void lay_out_samples(const LayOutSamplesArgs& a, Pool&) {
  int32_t s = 0;
  for (int32_t i = 0; i < *a.columns.num_requests; i++) {
    const int32_t count = a.columns.num_samples[i], num_drafts = a.columns.num_drafts[i];
    for (int32_t sample = 0; sample < count; sample++, s++) {
      SampleRow& row = a.rows[s] = a.params[a.columns.table_rows[i]];
      const int32_t left = num_drafts > 0 ? num_drafts - sample : 0;  // rows of this request behind this one
      row.num_known = a.columns.num_computed[i] + a.columns.num_scheduled[i] - left;
      row.position = static_cast<uint32_t>(row.num_known - row.prompt_len);
      if (count > 1 && num_drafts == 0) row.sample_index = static_cast<uint32_t>(sample);
      a.sampled_rows[s] = a.query_starts[i + 1] - 1 - left;
    }
  }
}

}  // namespace octavo
