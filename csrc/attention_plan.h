// One step's attention work, cut once for all layers. Knows requests and positions, never arrays or instruction sets.
//
//   request   rows = scheduled tokens x query heads of one KV head, token by token
//   unit      a block of such rows x a range of chunks x one KV head: what a thread does at a time
//
//   rows of a unit    [first chunk ........ ][chunk][chunk][chunk]     a long context, where units are too few for the threads
//                      unit 0: running total  unit 1   unit 2          chunk states are kept and merged in ascending order
//
// Cutting changes who computes a chunk and never what is computed: merge(total, chunk) in ascending order, always.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace octavo {

inline constexpr int kMaxUnitRows = 64;

// What a plan is made for; its memory is a function of this alone.
struct AttentionShape {
  int32_t max_requests;
  int32_t max_rows;  // tokens scheduled in a step
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_threads;
};

// Rows [row_begin, row_begin + num_rows) of a request's rows; row r is its token r / group and head r % group of the KV head's group.
struct RowBlock {
  int32_t request;
  int32_t row_begin;
  int32_t num_rows;
};

// A row block over some chunks. States are slots of the plan's workspace, each of one row; -1: none, the unit writes the output.
struct AttentionUnit {
  RowBlock rows;
  int32_t chunk_begin;
  int32_t chunk_end;
  int32_t first_state;
  int64_t cost;
};

// The states of one divided row block: a running total, then single chunks, each of num_rows slots.
struct AttentionMerge {
  RowBlock rows;
  int32_t first_state;
  int32_t num_states;
};

struct AttentionPlan {
  AttentionShape shape;
  int32_t group;       // query heads of a KV head
  int32_t unit_rows;   // rows of a full row block
  int32_t num_units;   // of one KV head; a thread's unit u is units[u / num_kv_heads] of KV head u % num_kv_heads
  int32_t num_merges;  // of one KV head
  int32_t max_units;
  int32_t max_states;  // of one KV head
  int32_t num_states;
  int64_t state_size;  // floats of one row's state
  AttentionUnit* units;
  AttentionMerge* merges;
  float* states;  // [num_kv_heads][max_states][state_size]
};

// Floats of one row's running state: output [head_dim rounded up to 16], sum [16 lanes], maximum, padding to a cache line.
inline constexpr int64_t state_size(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 32; }

AttentionPlan* make_attention_plan(const AttentionShape& shape);
void free_attention_plan(AttentionPlan* plan);
int64_t attention_plan_bytes(const AttentionShape& shape);

// Fills units and merges from a step's batch.
void cut_attention(const AttentionBatch& batch, AttentionPlan& plan);

}  // namespace octavo
