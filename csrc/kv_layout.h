// Where a key and a value lie inside a block of the KV pool (KVLayout in kernels.h).
//
//   pool        [block][layer][head][K, V, scales]: what a decode reads of a block lies together (measured 13 % faster than all K before
//               all V); a block's layers too, so that new blocks reach new pages one after the other, and not one of each layer in the same step
//   bf16, int8  K [head_dim/2][block_size][2]    V [block_size/2][head_dim][2]   (block size 1: V [head_dim])
//   f32         K [head_dim][block_size]         V [block_size][head_dim]
//
//   int8, one head of a block of 16 keys of 64 dimensions, 33 cache lines:
//     | K codes 1024 bytes | V codes 1024 bytes | K scales 32 | V scales 32 |
#pragma once
#include <cstdint>

#include "kernels.h"

namespace octavo {

KVLayout make_kv_layout(char* base, int32_t num_layers, int32_t num_blocks, int32_t block_size, int32_t num_kv_heads, int32_t head_dim, Dtype dtype);

// Keys of one head in a block, its values, and where the cache holds codes the scales of either.
static inline char* keys_of(const KVLayout& kv, int64_t layer, int64_t block, int64_t head) {
  return kv.base + (block * kv.num_layers + layer) * kv.block_bytes + head * kv.head_stride;
}
static inline char* values_of(const KVLayout& kv, int64_t layer, int64_t block, int64_t head) {
  return keys_of(kv, layer, block, head) + kv.head_bytes;
}
static inline uint16_t* key_scales_of(const KVLayout& kv, int64_t layer, int64_t block, int64_t head) {
  return reinterpret_cast<uint16_t*>(keys_of(kv, layer, block, head) + 2 * kv.head_bytes);
}
static inline uint16_t* value_scales_of(const KVLayout& kv, int64_t layer, int64_t block, int64_t head) {
  return key_scales_of(kv, layer, block, head) + kv.block_size;
}

// Element index, within a head, of dimension `i` of the key or value at offset `j` of its block.
static inline int64_t key_index(const KVLayout& kv, int64_t j, int64_t i) {
  return kv.dtype != Dtype::f32 ? (i / 2 * kv.block_size + j) * 2 + i % 2 : i * kv.block_size + j;
}
static inline int64_t value_index(const KVLayout& kv, int64_t j, int64_t i) {
  if (kv.dtype != Dtype::f32 && kv.block_size > 1) return (j / 2 * kv.head_dim + i) * 2 + j % 2;
  return j * kv.head_dim + i;
}

// For tests and inspection; not compiled per instruction set.

// Copies one block to logical order, [block_size][num_kv_heads][head_dim] in the cache's dtype; codes as the float32 that they mean.
void read_block(const KVLayout& kv, int32_t layer, int32_t block, void* keys, void* values);

// Sets all slots of a block, in all layers, to one value, rounded to bf16 where the cache holds codes.
void fill_block(const KVLayout& kv, int32_t block, float value);

}  // namespace octavo
