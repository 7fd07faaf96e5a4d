// The best of many candidates, without sorting them: which value divides those to keep from the rest.
#pragma once
#include <limits>

#include "lanes.h"

namespace octavo::OCTAVO_ISA {

inline constexpr int64_t kBuckets = 1024;
inline constexpr int64_t kFew = 64;  // as many are sorted by insertion

// Memory of one thread for one row of `vocab` candidates.
struct Work {
  float* groups;      // [ceil(vocab / 1024)][16] maxima
  float* values;      // candidates: logits,
  float* weights;     //   probabilities relative to the best one's,
  int32_t* ids;       //   tokens, ascending
  float* few_values;  // those that select() is narrowing down
  float* few_weights;
  double* buckets;  // [kBuckets]
  double* sums;     // [ceil(vocab / 256)]
  uint32_t* counts;  // [vocab]
};

// Of the candidates in the order (value descending, id ascending) a prefix: all above `value`, and the first `ties` at it.
struct Boundary {
  float value;
  int64_t ties;
};

struct Range {
  float low, high;
};

OCTAVO_INLINE Range range_of(const float* x, int64_t n) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  F16 low = set1(inf), high = set1(-inf);
  for (int64_t i = 0; i < n; i += 16) {
    low = min(low, load_or(x + i, n - i, inf));
    high = max(high, load_or(x + i, n - i, -inf));
  }
  return {-reduce_max(zero() - low), reduce_max(high)};
}

// Buckets of equal width between the lowest and the highest value; a greater value is never in a lower bucket.
struct Buckets {
  double low, scale;
  int64_t operator()(float value) const { return static_cast<int64_t>((value - low) * scale); }
};

static inline int64_t boundary_bucket(const double* buckets, double target, double& above) {
  int64_t b = kBuckets - 1;
  for (; b > 0 && above + buckets[b] < target; b--) above += buckets[b];
  return b;
}

// Copies the candidates of one bucket; `weights` may be null. Works in place.
static inline int64_t narrow(const float* values, const float* weights, int64_t n, Buckets bucket_of, int64_t bucket, Work& work) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) {
    if (bucket_of(values[i]) != bucket) continue;
    if (weights) work.few_weights[kept] = weights[i];
    work.few_values[kept++] = values[i];
  }
  return kept;
}

static inline void sort_descending(float* values, float* weights, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    const float value = values[i], weight = weights ? weights[i] : 0.0f;
    int64_t j = i;
    for (; j > 0 && values[j - 1] < value; j--) {
      values[j] = values[j - 1];
      if (weights) weights[j] = weights[j - 1];
    }
    values[j] = value;
    if (weights) weights[j] = weight;
  }
}

static inline void histogram(const float* values, const float* weights, int64_t n, Buckets bucket_of, double* buckets) {
  for (int64_t b = 0; b < kBuckets; b++) buckets[b] = 0.0;
  for (int64_t i = 0; i < n; i++) buckets[bucket_of(values[i])] += weights ? weights[i] : 1.0;
}

// The shortest prefix of the n > 0 candidates whose weights (null: one each) sum to `target` or more; all, if they do not.
// Each round makes a histogram of what is left and goes on with the bucket that the boundary is in; equal values end it.
static inline Boundary select(const float* values, const float* weights, int64_t n, double target, Work& work) {
  double above = 0.0;
  Range range = range_of(values, n);
  Buckets bucket_of{range.low, 0.0};
  for (bool first = true; range.low < range.high && (first || n > kFew); first = false) {
    int64_t bucket = 0;
    if (n > kFew) {
      bucket_of = {range.low, (kBuckets - 1) / (static_cast<double>(range.high) - range.low)};
      histogram(values, weights, n, bucket_of, work.buckets);
      bucket = boundary_bucket(work.buckets, target, above);
    }
    n = narrow(values, weights, n, bucket_of, bucket, work);
    values = work.few_values;
    weights = weights ? work.few_weights : nullptr;
    range = range_of(values, n);
  }
  if (range.low < range.high) sort_descending(work.few_values, weights ? work.few_weights : nullptr, n);
  Boundary boundary{values[0], 0};
  for (int64_t i = 0; i < n; i++) {
    boundary = {values[i], values[i] == boundary.value ? boundary.ties + 1 : 1};
    above += weights ? weights[i] : 1.0;
    if (above >= target) break;
  }
  return boundary;
}

// The lowest n bits of those set.
OCTAVO_INLINE uint32_t lowest_bits(uint32_t mask, int64_t n) {
  uint32_t rest = mask;
  for (; n > 0 && rest; n--) rest &= rest - 1;
  return mask & ~rest;
}

// Keeps the candidates whose bits keep(i) sets, of those from i to i + 16; returns how many there are. The order stays.
template <class Keep>
OCTAVO_INLINE int64_t keep_where(int64_t n, Work& work, const Keep& keep) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const uint32_t mask = keep(i) & mask_first(n - i);
    compress(work.values + kept, mask, load(work.values + i));
    compress_ids(work.ids + kept, mask, work.ids + i);
    kept += compress(work.weights + kept, mask, load(work.weights + i));
  }
  return kept;
}

OCTAVO_INLINE int64_t keep_prefix(Boundary boundary, int64_t n, Work& work) {
  return keep_where(n, work, [&](int64_t i) {
    const F16 value = load(work.values + i), divide = set1(boundary.value);
    const uint32_t above = mask_greater(value, divide), ties = mask_at_least(value, divide) & ~above & mask_first(n - i);
    const uint32_t kept = lowest_bits(ties, boundary.ties);
    boundary.ties -= __builtin_popcount(kept);
    return above | kept;
  });
}

OCTAVO_INLINE int64_t keep_heavy(float least, int64_t n, Work& work) {
  return keep_where(n, work, [&](int64_t i) { return mask_at_least(load(work.weights + i), set1(least)); });
}

// Candidates are the tokens whose logit is at least `least`, ascending. Returns how many.
OCTAVO_INLINE int64_t collect(const float* x, int64_t size, float least, Work& work) {
  int64_t n = 0;
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_or(x + i, size - i, 0.0f);
    const uint32_t mask = mask_at_least(v, set1(least)) & mask_first(size - i);
    if (!mask) continue;
    compress_ids(work.ids + n, mask, static_cast<int32_t>(i));
    n += compress(work.values + n, mask, v);
  }
  return n;
}

}  // namespace octavo::OCTAVO_ISA
