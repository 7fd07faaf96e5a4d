// Keys and values that the next attention will read, asked for while the products before it multiply: products of many rows wait for
// arithmetic, a decode's attention for memory, so memory works on the one's behalf while the other runs.
//
//   attention of layer i-1 | o | gate_up | down | qkv | attention of layer i
//                          '-- each tile asks for some lines --'  ^ reads them from the second- and third-level caches
//
// It is a hint: which lines, how many and by whom changes no result. A program's plan lists the blocks of its step (a second plan, made for
// another shape, is cut only before its first attention: until then products go by the list of the step before).
#pragma once
#include "attention_plan.h"
#include "kernels.h"

namespace octavo {

inline constexpr int64_t kMostAheadBytes = 12 << 20;  // of a layer: beyond that it would push itself and the weights out of the cache
inline constexpr int32_t kFewestAheadRows = 12;       // products of fewer rows wait for memory themselves

// How far a thread has come in the step. Of the blocks listed it takes every num_threads-th.
struct alignas(64) KVCursor {
  int32_t next;   // block in the plan's list
  const char* at;  // the line to ask for next, in the block before that
  int64_t lines;  // left in it
};

// What the products between two layers' attention ask for: the blocks of the second one.
struct KVAhead {
  const AttentionPlan* plan;
  const KVLayout* cache;
  int32_t layer;
  int32_t num_threads;
  KVCursor* cursors;  // one a thread; that attention sets them back, for the next step
};

}  // namespace octavo
