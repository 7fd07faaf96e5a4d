// Keys and values that the next attention will read, asked for while the products before it multiply: products of many rows wait for
// arithmetic, a decode's attention for memory, so memory works on the one's behalf while the other runs.
//
//   attention of layer i-1 | o | gate_up | down | qkv | attention of layer i
//                          ^ cursors start again        ^ its keys and values are in the second- and third-level caches
//                            each product asks for a line or none at every step
//
// What is asked for is a hint: which lines, how many and by whom changes no result.
#pragma once
#include "attention_plan.h"
#include "kernels.h"

namespace octavo {

inline constexpr int64_t kMostAheadBytes = 12 << 20;  // of a layer: beyond that it would push itself and the weights out of the cache

// How far a thread has come. Of the blocks to come it takes every num_threads-th.
struct alignas(64) KVCursor {
  int32_t next;     // block in the plan's list
  const char* at;   // the line to ask for next, in the block before that
  int64_t lines;    // left in it
};

struct KVAhead {
  const AttentionPlan* plan;
  const KVLayout* cache;
  int32_t layer;
  int32_t num_threads;
  KVCursor* cursors;  // one a thread
};

}  // namespace octavo
