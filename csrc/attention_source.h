// Where a tile's keys and values are: in the blocks themselves, or gathered from blocks that are too small for whole vectors.
#pragma once
#include "attention_tile.h"
#include "kv_layout.h"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// f(Count<n>) for a power of two n <= Max.
template <int Max, class F>
OCTAVO_INLINE void with_power(int64_t n, const F& f) {
  if constexpr (Max > 1)
    if (n < Max) return with_power<Max / 2>(n, f);
  f(Count<Max>{});
}

// The keys and values of one request and one KV head, tile by tile.
template <class T>
struct Source {
  const KVLayout* kv;
  const int32_t* table;
  int64_t layer, head;
  int64_t padded_dim;
  T* copy;  // [kTile] keys, then as many values, in the layout of a block of kTile keys; only where not `direct`
  uint16_t* copied_scales;  // [kTile] of those keys, then of the values
  int block_bits = __builtin_ctz(static_cast<unsigned>(kv->block_size));
  bool direct = kv->block_size >= kHalf && padded_dim == kv->head_dim;  // halves of 16 keys are read where they lie

  static constexpr int kDepth = Product<T>::kDepth;

  OCTAVO_MEMBER const T* keys(int64_t position) const {
    return reinterpret_cast<const T*>(keys_of(*kv, layer, table[position >> block_bits], head));
  }
  OCTAVO_MEMBER const T* values(int64_t position) const {
    return reinterpret_cast<const T*>(values_of(*kv, layer, table[position >> block_bits], head));
  }
  OCTAVO_MEMBER const uint16_t* key_scales(int64_t position) const {
    return key_scales_of(*kv, layer, table[position >> block_bits], head) + offset(position);
  }
  OCTAVO_MEMBER const uint16_t* value_scales(int64_t position) const { return key_scales(position) + kv->block_size; }
  OCTAVO_MEMBER int64_t offset(int64_t position) const { return position & (kv->block_size - 1); }

  // The tile that starts at `start` and the one after it, of which some row sees the keys of these ranges: no other block is looked up.
  OCTAVO_MEMBER TilePair<T> tiles(int64_t start, Range seen, Range seen_ahead) const {
    if (!direct) {
      Tile<T> now = gathered(start, seen, seen_ahead);
      return {now, now};
    }
    Tile<T> now = in_place(start, seen);
    return {now, seen_ahead.empty() ? now : in_place(start + kTile, seen_ahead)};
  }

  OCTAVO_MEMBER Tile<T> in_place(int64_t start, Range seen) const {
    int first = seen.lo / kHalf, last = (seen.hi - 1) / kHalf;
    Tile<T> t{{}, {}, int64_t{kv->block_size} * kDepth, padded_dim * kDepth, {}};
    for (int half = first; half <= last; half++) {
      int64_t position = start + half * kHalf;
      t.k[half] = keys(position) + offset(position) * kDepth;
      t.v[half] = values(position) + offset(position) * padded_dim;
      if constexpr (kIsCodes<T>) t.scales.k[half] = key_scales(position), t.scales.v[half] = value_scales(position);
    }
    if (first == last) {  // nobody sees the other half, so any memory will do
      t.k[1 - first] = t.k[first];
      t.v[1 - first] = t.v[first];
      if constexpr (kIsCodes<T>) t.scales.k[1 - first] = t.scales.k[first], t.scales.v[1 - first] = t.scales.v[first];
    }
    return t;
  }

  Tile<T> gathered(int64_t start, Range seen, Range seen_ahead) const {
    T* v = copy + kTile * padded_dim;
    with_power<kTile>(kv->block_size, [&](auto count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(count)::value;  // keys of a tile that share a block
      for (int j = seen.lo / kCount * kCount; j < seen.hi; j += kCount) {
        copy_keys<kCount>(start + j, copy + j * kDepth);
        if constexpr (kIsCodes<T>) copy_scales<kCount>(start + j, copied_scales + j);
        if constexpr (kDepth == 2 && kCount == 1) copy_single_values(start, j, seen, v);
        else copy_values<kCount>(start + j, v + j * padded_dim);
        if (j >= seen_ahead.lo && j < seen_ahead.hi) prefetch(start + kTile + j);
      }
    });
    Tile<T> t{{copy, copy + kHalf * kDepth}, {v, v + kHalf * padded_dim}, kTile * kDepth, padded_dim * kDepth, {}};
    if constexpr (kIsCodes<T>) {
      const uint16_t *k_scales = copied_scales, *v_scales = copied_scales + kTile;
      t.scales = {{k_scales, k_scales + kHalf}, {v_scales, v_scales + kHalf}};
    }
    return t;
  }

  template <int kCount>
  OCTAVO_MEMBER void copy_scales(int64_t position, uint16_t* out) const {
    std::memcpy(out, key_scales(position), kCount * sizeof(uint16_t));
    std::memcpy(out + kTile, value_scales(position), kCount * sizeof(uint16_t));
  }

  template <int kCount>
  OCTAVO_MEMBER void copy_keys(int64_t position, T* out) const {
    const T* in = keys(position) + offset(position) * kDepth;
    int64_t stride = int64_t{kv->block_size} * kDepth;
    for (int64_t i = 0; i < kv->head_dim; i += kDepth, in += stride, out += kTile * kDepth) std::memcpy(out, in, kCount * kDepth * sizeof(T));
  }

  template <int kCount>
  OCTAVO_MEMBER void copy_values(int64_t position, T* out) const {
    const T* in = values(position) + offset(position) * kv->head_dim;
    for (int s = 0; s < kCount; s += kDepth)
      std::memcpy(out + s * padded_dim, in + s * kv->head_dim, static_cast<size_t>(kv->head_dim * kDepth) * sizeof(T));
  }

  // Blocks of one key hold no pairs. A key whose partner is not seen is its own partner.
  void copy_single_values(int64_t start, int j, Range seen, T* v) const {
    if (j % 2 && j > seen.lo) return;
    bool alone = j % 2 || j + 1 == seen.hi;
    const T *a = values(start + j), *b = alone ? a : values(start + j + 1);
    T* out = v + j / 2 * 2 * padded_dim;
    for (int64_t i = 0; i < kv->head_dim; i++) out[2 * i] = a[i], out[2 * i + 1] = b[i];
  }

  OCTAVO_MEMBER void prefetch(int64_t position) const {
    const char *k = reinterpret_cast<const char*>(keys(position)), *v = reinterpret_cast<const char*>(values(position));
    for (int64_t byte = 0; byte < least(kv->head_bytes, kMaxPrefetch); byte += 64) fetch(k + byte), fetch(v + byte);
    if constexpr (kIsCodes<T>) fetch(key_scales(position));
  }
  static constexpr int64_t kMaxPrefetch = 4096;  // of a block's keys: a tile's, where blocks are no larger
};

}  // namespace octavo::OCTAVO_ISA
