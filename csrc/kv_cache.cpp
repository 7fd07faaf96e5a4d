// Writing keys and values into their slots, and copying whole blocks.
#include <cstring>

#include "kernels.h"
#include "kv_layout.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kRowsPerUnit = 16;

OCTAVO_INLINE void convert(float x, uint16_t& out) { out = float_to_bf16(x); }
OCTAVO_INLINE void convert(float x, float& out) { out = x; }

// One head's key or value, to `out[start + i / 2 * pair + i % 2 * odd]`: both layouts in strides of their own.
template <class T>
OCTAVO_INLINE void scatter(const float* x, int64_t size, T* out, int64_t pair, int64_t odd) {
  int64_t i = 0;
  for (; i + 1 < size; i += 2, out += pair) {
    convert(x[i], out[0]);
    convert(x[i + 1], out[odd]);
  }
  if (i < size) convert(x[i], out[0]);
}

template <class T>
OCTAVO_INLINE void write_row(const WriteKVArgs& a, int64_t row) {
  const KVLayout& kv = *a.cache;
  int64_t block = a.slots[row] / kv.block_size, j = a.slots[row] % kv.block_size, dim = kv.head_dim;
  int64_t key_odd = key_index(kv, j, 1) - key_index(kv, j, 0), key_pair = key_index(kv, j, 2) - key_index(kv, j, 0);
  int64_t value_odd = value_index(kv, j, 1) - value_index(kv, j, 0);
  for (int64_t head = 0; head < kv.num_kv_heads; head++) {
    T* k = reinterpret_cast<T*>(keys_of(kv, a.layer, block, head)) + key_index(kv, j, 0);
    T* v = reinterpret_cast<T*>(values_of(kv, a.layer, block, head)) + value_index(kv, j, 0);
    scatter(a.k + row * a.k_stride + head * dim, dim, k, key_pair, key_odd);
    scatter(a.v + row * a.v_stride + head * dim, dim, v, 2 * value_odd, value_odd);
  }
}

}  // namespace

void write_kv(const WriteKVArgs& a, Pool& pool) {
  int64_t rows = *a.count;
  parallel_for(pool, (rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit, int) {
    int64_t end = (unit + 1) * kRowsPerUnit < rows ? (unit + 1) * kRowsPerUnit : rows;
    for (int64_t row = unit * kRowsPerUnit; row < end; row++) {
      if (a.cache->dtype == Dtype::bf16) write_row<uint16_t>(a, row);
      else write_row<float>(a, row);
    }
  });
}

void copy_blocks(const CopyBlocksArgs& a, Pool& pool) {
  const KVLayout& kv = *a.cache;
  int64_t layers = kv.num_layers;
  parallel_for(pool, *a.count * layers, [&](int64_t unit, int) {
    int64_t i = unit / layers, layer = unit % layers;
    std::memcpy(keys_of(kv, layer, a.targets[i], 0), keys_of(kv, layer, a.sources[i], 0), static_cast<size_t>(kv.block_bytes));
  });
}

}  // namespace octavo::OCTAVO_ISA
