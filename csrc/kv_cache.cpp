// Writing keys and values into their slots, and copying whole blocks.
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "kv_layout.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kRowsPerUnit = 16;

OCTAVO_INLINE void convert(float x, uint16_t& out) { out = float_to_bf16(x); }
OCTAVO_INLINE void convert(float x, float& out) { out = x; }
OCTAVO_INLINE void convert(int16_t x, int8_t& out) { out = static_cast<int8_t>(x); }

// The least bf16 that is not less than x >= 0.
OCTAVO_INLINE uint16_t ceil_bf16(float x) { return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + 0xffff) >> 16); }

// One head's key or value as codes from -127 to 127; returns their scale. What is not finite makes the scale NaN.
OCTAVO_INLINE uint16_t quantise(const float* x, int64_t size, int16_t* codes) {
  F16 top = zero(), finite = zero();
  for (int64_t i = 0; i < size; i += 16) {
    F16 a = load_first(x + i, static_cast<int>(size - i < 16 ? size - i : 16));
    top = max(max(a, zero() - a), top);
    finite = fmadd(a, zero(), finite);
  }
  const bool is_finite = reduce_add(finite) == 0;
  uint16_t scale = is_finite ? ceil_bf16(reduce_max(top) / 127.0f) : 0x7fc0;
  F16 divisor = set1(scale == 0 ? 1.0f : bf16_to_float(scale));
  for (int64_t i = 0; i < size; i += 16)
    store_int16(codes + i, load_first(x + i, static_cast<int>(size - i < 16 ? size - i : 16)) / divisor);
  return scale;
}

// One head's key or value, to `out[start + i / 2 * pair + i % 2 * odd]`: both layouts in strides of their own.
template <class X, class T>
OCTAVO_INLINE void scatter(const X* x, int64_t size, T* out, int64_t pair, int64_t odd) {
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
    const float *key = a.k + row * a.k_stride + head * dim, *value = a.v + row * a.v_stride + head * dim;
    if constexpr (std::is_same_v<T, int8_t>) {
      alignas(64) int16_t codes[kMaxHeadDim];
      key_scales_of(kv, a.layer, block, head)[j] = quantise(key, dim, codes);
      scatter(codes, dim, k, key_pair, key_odd);
      value_scales_of(kv, a.layer, block, head)[j] = quantise(value, dim, codes);
      scatter(codes, dim, v, 2 * value_odd, value_odd);
    } else {
      scatter(key, dim, k, key_pair, key_odd);
      scatter(value, dim, v, 2 * value_odd, value_odd);
    }
  }
}

}  // namespace

void write_kv(const WriteKVArgs& a, Pool& pool) {
  int64_t rows = *a.count;
  parallel_for(pool, (rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit, int) {
    int64_t end = (unit + 1) * kRowsPerUnit < rows ? (unit + 1) * kRowsPerUnit : rows;
    for (int64_t row = unit * kRowsPerUnit; row < end; row++) {
      if (a.cache->dtype == Dtype::bf16) write_row<uint16_t>(a, row);
      else if (a.cache->dtype == Dtype::int8) write_row<int8_t>(a, row);
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
