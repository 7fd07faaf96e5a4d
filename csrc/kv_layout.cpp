#include "kv_layout.h"

#include <algorithm>
#include <bit>

namespace octavo {
namespace {

uint16_t round_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float widen(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype == Dtype::bf16 ? 2 : 1; }

template <class T>
void read(const KVLayout& kv, int32_t layer, int32_t block, T* keys, T* values) {
  for (int64_t j = 0; j < kv.block_size; j++)
    for (int64_t head = 0; head < kv.num_kv_heads; head++) {
      const T* k = reinterpret_cast<const T*>(keys_of(kv, layer, block, head));
      const T* v = reinterpret_cast<const T*>(values_of(kv, layer, block, head));
      for (int64_t i = 0; i < kv.head_dim; i++) {
        *keys++ = k[key_index(kv, j, i)];
        *values++ = v[value_index(kv, j, i)];
      }
    }
}

void read_codes(const KVLayout& kv, int32_t layer, int32_t block, float* keys, float* values) {
  for (int64_t j = 0; j < kv.block_size; j++)
    for (int64_t head = 0; head < kv.num_kv_heads; head++) {
      const auto* k = reinterpret_cast<const int8_t*>(keys_of(kv, layer, block, head));
      const auto* v = reinterpret_cast<const int8_t*>(values_of(kv, layer, block, head));
      float key_scale = widen(key_scales_of(kv, layer, block, head)[j]), value_scale = widen(value_scales_of(kv, layer, block, head)[j]);
      for (int64_t i = 0; i < kv.head_dim; i++) {
        *keys++ = static_cast<float>(k[key_index(kv, j, i)]) * key_scale;
        *values++ = static_cast<float>(v[value_index(kv, j, i)]) * value_scale;
      }
    }
}

template <class T>
void fill_head(const KVLayout& kv, int32_t layer, int32_t block, int32_t head, T value) {
  std::fill_n(reinterpret_cast<T*>(keys_of(kv, layer, block, head)), 2 * kv.head_bytes / static_cast<int64_t>(sizeof(T)), value);
}

void fill_head(const KVLayout& kv, int32_t layer, int32_t block, int32_t head, float value) {
  if (kv.dtype == Dtype::f32) return fill_head<float>(kv, layer, block, head, value);
  if (kv.dtype == Dtype::bf16) return fill_head(kv, layer, block, head, round_to_bf16(value));
  fill_head(kv, layer, block, head, int8_t{1});
  std::fill_n(key_scales_of(kv, layer, block, head), 2 * kv.block_size, round_to_bf16(value));
}

}  // namespace

KVLayout make_kv_layout(char* base, int32_t num_layers, int32_t num_blocks, int32_t block_size, int32_t num_kv_heads, int32_t head_dim, Dtype dtype) {
  int64_t head_bytes = int64_t{block_size} * head_dim * element_bytes(dtype);
  int64_t scales = dtype == Dtype::int8 ? 2 * block_size * static_cast<int64_t>(sizeof(uint16_t)) : 0;
  int64_t head_stride = 2 * head_bytes + scales;
  return {base, num_kv_heads * head_stride, head_stride, head_bytes, num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype};
}

void read_block(const KVLayout& kv, int32_t layer, int32_t block, void* keys, void* values) {
  if (kv.dtype == Dtype::bf16) read(kv, layer, block, static_cast<uint16_t*>(keys), static_cast<uint16_t*>(values));
  else if (kv.dtype == Dtype::int8) read_codes(kv, layer, block, static_cast<float*>(keys), static_cast<float*>(values));
  else read(kv, layer, block, static_cast<uint32_t*>(keys), static_cast<uint32_t*>(values));
}

void fill_block(const KVLayout& kv, int32_t block, float value) {
  for (int32_t layer = 0; layer < kv.num_layers; layer++)
    for (int32_t head = 0; head < kv.num_kv_heads; head++) fill_head(kv, layer, block, head, value);
}

}  // namespace octavo
