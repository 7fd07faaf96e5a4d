// From a plan's columns, one entry per request, to the arrays that the other ops of a step read, one entry per row.
//
//   request   0      1                 2                      num_scheduled 1, 5, 1
//   row       [ 0 ][ 1  2  3  4  5 ][ 6 ]                     query_starts  0, 1, 6, 7
//   position  num_computed[i], + 1, + 2 ...                   slot = block of the position x block size + offset
//
// Moves integers alone: one source for all instruction sets, and no threads.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace octavo {

// Mirrors StepColumns of ops.py; table_rows and the number of requests are the batch's.
struct StepColumns {
  const int32_t* table_rows;
  const int32_t* num_computed;
  const int32_t* num_scheduled;
  const int32_t* num_samples;
  const int32_t* num_drafts;
  const int32_t* num_new_blocks;
  const int32_t* new_block_ids;
  const int8_t* replaced;
  const int32_t* num_requests;
};

struct LayOutRowsArgs {
  StepColumns columns;
  const int32_t* token_ids;
  int32_t block_size;
  int32_t* block_tables;  // [max_num_seqs, table_stride]
  int64_t table_stride;
  int32_t* history;  // [max_num_seqs, history_stride]
  int64_t history_stride;
  int32_t* query_starts;
  int32_t* positions;
  int32_t* slots;
};

struct LayOutSamplesArgs {
  StepColumns columns;
  const int32_t* query_starts;
  const SampleRow* params;  // [max_num_seqs]
  int32_t* sampled_rows;
  SampleRow* rows;
};

void lay_out_rows(const LayOutRowsArgs& args, Pool& pool);
void lay_out_samples(const LayOutSamplesArgs& args, Pool& pool);

}  // namespace octavo
