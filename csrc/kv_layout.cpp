#include "kv_layout.h"

#include <bit>

namespace octavo {
namespace {

uint16_t round_to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

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

template <class T>
void fill(const KVLayout& kv, int32_t block, T value) {
  for (int64_t layer = 0; layer < kv.num_layers; layer++) {
    T* p = reinterpret_cast<T*>(keys_of(kv, layer, block, 0));
    for (int64_t i = 0; i < kv.block_bytes / static_cast<int64_t>(sizeof(T)); i++) p[i] = value;
  }
}

}  // namespace

void read_block(const KVLayout& kv, int32_t layer, int32_t block, void* keys, void* values) {
  if (kv.dtype == Dtype::bf16) read(kv, layer, block, static_cast<uint16_t*>(keys), static_cast<uint16_t*>(values));
  else read(kv, layer, block, static_cast<uint32_t*>(keys), static_cast<uint32_t*>(values));
}

void fill_block(const KVLayout& kv, int32_t block, float value) {
  if (kv.dtype == Dtype::bf16) fill(kv, block, round_to_bf16(value));
  else fill(kv, block, value);
}

}  // namespace octavo
