// One step's attention work, cut once for all layers. Knows requests and positions, never arrays or instruction sets.
//
//   request   rows = scheduled tokens x query heads of one KV head, token by token
//   unit      a block of such rows x a range of chunks x one KV head: what a thread does at a time
//
//   rows of a unit    [first chunk ........ ][chunk][chunk][chunk]     a long context, where units are too few for the threads
//                      unit 0: running total  unit 1   unit 2          chunk states are kept and merged in ascending order
//
// Requests that begin with the same blocks are passed over those tiles together, before any other unit runs:
//
//   pass      rows of several requests x their common tiles: leaves its complete chunks and the one it ended in, per row
//   unit      a request's own unit merges those complete chunks, goes on in the chunk that was begun, and then as always
//
// Cutting changes who computes a chunk and never what is computed: merge(total, chunk) in ascending order, always.
#pragma once
#include <compare>
#include <cstdint>

#include "kernels.h"

namespace octavo {

class PrefixGroups;

inline constexpr int kMaxUnitRows = 64;
inline constexpr int32_t kMaxBlocksAhead = 4096;  // that a plan lists for products to ask for

// What a plan is made for; its memory is a function of this alone.
struct AttentionShape {
  int32_t max_requests;
  int32_t max_rows;  // tokens scheduled in a step
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_threads;
  int32_t block_size;
  bool share_prefix;  // whether keys that requests have in common are read once for all of them

  auto operator<=>(const AttentionShape&) const = default;
};

// Rows [row_begin, row_begin + num_rows) of a request's rows; row r is its token r / group and head r % group of the KV head's group.
struct RowBlock {
  int32_t request;
  int32_t row_begin;
  int32_t num_rows;
};

// A row block's chunks in a KV head's workspace: a total of those below first_kept at `states`, then single chunks.
struct KeptStates {
  int64_t states;  // -1: nothing is kept
  int32_t first_kept;
};

// A row block over some chunks; where nothing is kept, it writes the output.
struct AttentionUnit {
  RowBlock rows;
  int32_t chunk_begin;
  int32_t chunk_end;
  KeptStates kept;
  int64_t cost;
};

// All rows of some requests, pieces[piece_begin, piece_end), over the first tiles of all their tables.
struct SharedPass {
  int32_t piece_begin;
  int32_t piece_end;
  int32_t num_rows;
  int32_t num_tiles;
  KeptStates kept;  // the chunk that it ends in, where that is not complete, is kept too
};

struct SharedUnit {
  int32_t pass;
  int32_t chunk_begin;
  int32_t chunk_end;
  int64_t cost;
};

// Where a request's rows are in a shared pass.
struct SharedRows {
  int32_t pass;  // -1: in none
  int32_t row_begin;
};

// The states of one divided row block: a running total, then single chunks.
struct AttentionMerge {
  RowBlock rows;
  int32_t num_states;
  int64_t states;
};

// Which blocks a step's list has: a table of twice its length, found by a block's lowest bits.
struct BlockMarks {
  static constexpr int32_t kSize = 2 * kMaxBlocksAhead;
  int64_t step;
  int64_t steps[kSize];  // in which an entry was taken
  int32_t blocks[kSize];

  // Whether the block was not there yet.
  bool add(int32_t block) {
    int32_t at = block % kSize;
    for (; steps[at] == step; at = (at + 1) % kSize)
      if (blocks[at] == block) return false;
    steps[at] = step;
    blocks[at] = block;
    return true;
  }
};

struct AttentionPlan {
  AttentionShape shape;
  int32_t group;       // query heads of a KV head
  int32_t unit_rows;   // rows of a full row block
  int32_t num_units;   // of one KV head; a thread's unit u is units[u / num_kv_heads] of KV head u % num_kv_heads
  int32_t num_merges;  // of one KV head
  int32_t num_passes;
  int32_t num_shared_units;  // of one KV head; they run before all others
  int32_t max_units;         // of either kind
  AttentionUnit* units;
  AttentionMerge* merges;
  SharedPass* passes;
  SharedUnit* shared_units;
  RowBlock* pieces;        // the requests of all passes
  SharedRows* shared_rows;  // of each request
  int32_t num_blocks_ahead;  // what layers without a window read, each block once: of passes, then of units in their order; the first kMaxBlocksAhead
  int32_t* blocks_ahead;
  BlockMarks* marks;
  PrefixGroups* groups;
  float* states;         // [num_kv_heads][states_stride]
  int64_t states_stride;  // floats of one KV head's workspace, and ...
  int64_t states_used;    // ... how many of them this step needs
};

// Floats of some rows' running states. Maxima first, eight rows to a line, so that a vector of them starts at any row; then each
// row's output [head_dim, rounded up to 16] and sum [16 lanes].
inline constexpr int64_t state_maximum(int64_t row) { return row / 8 * 16 + row % 8; }
inline constexpr int64_t state_maxima_floats(int64_t rows) { return (rows + 7) / 8 * 16 + 16; }
inline constexpr int64_t state_row_floats(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }
inline constexpr int64_t state_floats(int64_t head_dim, int64_t rows) { return state_maxima_floats(rows) + rows * state_row_floats(head_dim); }

AttentionPlan* make_attention_plan(const AttentionShape& shape);
void free_attention_plan(AttentionPlan* plan);
int64_t attention_plan_bytes(const AttentionShape& shape);

// Fills units and merges from a step's batch.
void cut_attention(const AttentionBatch& batch, AttentionPlan& plan);

}  // namespace octavo
