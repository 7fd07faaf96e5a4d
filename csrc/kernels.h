// The native kernels' contract: plain structs of pointers and sizes, one function per op, one table per instruction set.
//
// Every op reads how many rows it has through a pointer, when it runs, so that one recorded program serves every step.
// Strides are in elements. "bf16" is uint16_t holding the upper half of a float32.
//
// Sources of kernels are compiled once per instruction set, with OCTAVO_ISA naming the namespace. They must not emit
// shared inline code (no std containers, no std::function): the linker would keep one copy for all instruction sets.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

class Pool;

enum class Dtype : int32_t { f32 = 0, bf16 = 1, int8 = 2 };  // int8: of the KV pool

inline constexpr int kPanel = 16;      // outputs per packed panel
inline constexpr int kTile = 32;       // keys per attention tile (T): absolute positions, whatever the block size
inline constexpr int kChunk = 512;     // keys per attention chunk (C), a multiple of kTile
inline constexpr int kMaxTop = 64;     // log-probabilities per sampled row
inline constexpr int kMaxHeadDim = 256;

// A packed matrix: [ceil(out/16)] panels, laid out as packed.h draws them; outputs past the last are zero.
struct PackedMatrix {
  const void* data;
  const float* bias;  // [out] or null
  int64_t out_features;
  int64_t in_features;
  int32_t format;  // of kFormats in dequantize.h: F32, BF16 or a quantised one
};

// Tensors as they lie in a checkpoint: rows of `row_bytes`, one after the other, in an element format of dequantize.cpp.
struct PackSource {
  const uint8_t* data;
  const int32_t* row_order;  // logical row r lies at row_order[r]; null: at r
  int64_t num_rows;
  int64_t row_bytes;
  int32_t format;
};

// Stacks the rows of the sources into one packed matrix: rounded to F32 or BF16, or as they are, all in one quantised format.
struct PackArgs {
  const PackSource* sources;
  int64_t num_sources;
  void* out;  // whole panels of 16 rows
  int64_t in_features;
  int32_t format;
};

enum class QuantizedTo : int32_t { q8_0, q4_1 };

// One tensor to blocks of 32 columns, in logical order of rows.
struct QuantizeArgs {
  PackSource source;
  int64_t columns;  // a multiple of 32
  QuantizedTo to;
  uint8_t* out;  // num_rows x columns / 32 blocks
};

struct EmbedArgs {
  const int32_t* token_ids;
  const PackedMatrix* table;
  float* out;
  int64_t out_stride;
  const int32_t* count;
};

struct KVAhead;  // what to ask for while multiplying; kv_ahead.h

struct LinearArgs {
  const void* x;  // bf16 where the matrix is, else float
  int64_t x_stride;
  const PackedMatrix* weight;
  float* out;
  int64_t out_stride;
  const int32_t* count;
  KVAhead* ahead;  // null: nothing but the weights
};

struct NormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;  // null: norm of x alone
  int64_t residual_stride;
  const float* weight;
  void* out;
  int64_t out_stride;
  Dtype out_dtype;
  int64_t size;
  float eps;
  const int32_t* count;
};

struct RotaryArgs {
  float* x;
  int64_t x_stride;
  const int32_t* positions;
  const float* cos;  // [positions, half]
  const float* sin;
  int64_t half;
  int64_t num_heads;
  int64_t head_dim;
  const int32_t* count;
};

struct GatedArgs {
  const float* gate_up;  // [rows, 2 * size]
  int64_t stride;
  void* out;
  int64_t out_stride;
  Dtype out_dtype;
  int64_t size;
  int32_t kind;  // 0 silu, 1 gelu (erf), 2 gelu_tanh
  const int32_t* count;
};

struct GatherArgs {
  const float* x;
  int64_t x_stride;
  const int32_t* indices;
  float* out;
  int64_t out_stride;
  int64_t size;
  const int32_t* count;
};

// The KV pool. Within one block of one layer, per KV head (so a tile of keys is read in whole vectors):
//   bf16, int8  K [head_dim/2][block_size][2]   V [block_size/2][head_dim][2]   (block size 1: V [head_dim])
//   f32         K [head_dim][block_size]        V [block_size][head_dim]
//   int8        then bf16 scales of the keys [block_size] and of the values [block_size]: an element is code * scale
// The pool is [num_blocks][num_layers][num_kv_heads][K, V, scales]; kv_layout.h says why.
struct KVLayout {
  char* base;
  int64_t block_bytes;  // of one layer: num_kv_heads * head_stride
  int64_t head_stride;  // from head to head: keys, values and scales
  int64_t head_bytes;   // of the keys, or of the values: block_size * head_dim * element
  int32_t num_layers, num_blocks, block_size, num_kv_heads, head_dim;
  Dtype dtype;
};

struct WriteKVArgs {
  const float* k;
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  const int32_t* slots;
  const KVLayout* cache;
  int32_t layer;
  const int32_t* count;
};

struct CopyBlocksArgs {
  const KVLayout* cache;
  const int32_t* sources;
  const int32_t* targets;
  const int32_t* count;
};

struct AttentionBatch {
  const int32_t* query_starts;
  const int32_t* table_rows;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* positions;
  const int32_t* num_requests;
  const int32_t* num_rows;
};

struct AttentionPlan;  // work of one step, cut once for all layers; attention_plan.h

struct AttentionArgs {
  const float* q;
  int64_t q_stride;
  const AttentionBatch* batch;
  AttentionPlan* plan;
  const KVLayout* cache;
  int32_t layer;
  void* out;
  int64_t out_stride;
  Dtype out_dtype;
  int32_t num_heads;
  float scale;
  int32_t window;  // 0: none
  float softcap;   // 0: none
  KVAhead* ahead;  // of this layer: what products asked for; null: nothing
};

// Mirrors SAMPLE_ROW of ops.py.
struct SampleRow {
  float temperature;
  int32_t top_k;
  float top_p, min_p, repetition, frequency, presence;
  int32_t num_logprobs, target, history_row, prompt_len, num_known, bias_start, bias_count, mask_row;
  uint32_t sample_index, position;
  uint64_t seed;
};

struct SampleArgs {
  const float* logits;
  int64_t logits_stride;
  int64_t vocab;
  const SampleRow* rows;
  const int32_t* history;
  int64_t history_stride;
  const int32_t* bias_ids;
  const float* bias_values;
  const uint32_t* masks;
  int64_t mask_stride;
  float* scratch;  // [threads][scratch_stride]
  int64_t scratch_stride;
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  int64_t top_stride;
  float* top_logprobs;
  const int32_t* count;
};

// One table per instruction set; table.cpp fills it from its own namespace.
struct Kernels {
  const char* name;
  void (*embed)(const EmbedArgs&, Pool&);
  void (*linear)(const LinearArgs&, Pool&);
  void (*rms_norm)(const NormArgs&, Pool&);
  void (*rotary)(const RotaryArgs&, Pool&);
  void (*gated_activation)(const GatedArgs&, Pool&);
  void (*gather_rows)(const GatherArgs&, Pool&);
  void (*write_kv)(const WriteKVArgs&, Pool&);
  void (*copy_blocks)(const CopyBlocksArgs&, Pool&);
  void (*paged_attention)(const AttentionArgs&, Pool&);
  void (*sample)(const SampleArgs&, Pool&);
  void (*pack)(const PackArgs&, Pool&);
  bool (*quantize)(const QuantizeArgs&, Pool&);  // false: a weight or scale is not finite
  void (*dequantize)(const PackSource&, float* out, int64_t size);  // one row, on the caller
};

}  // namespace octavo
