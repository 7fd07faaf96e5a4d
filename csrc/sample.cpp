// From one row of logits to a token; the order of steps is that of ops.sample and reference_sampling.py.
//
//   logits ── bias, mask, penalties ──► adjusted ── maxima of groups ──► greedy: the first maximum
//                                          │
//                                          ├── no filter: weights summed by block, inversion in one block
//                                          └── candidates above a lower bound ── top-k ── top-p ── min-p ──► inversion
//
// One thread does one row, and every sum is taken in one order, so a token depends on its own row alone.
// Weights are e^((logit - best) / temperature) in float32, summed in double; below e^-87 they are zero.
#include <cfloat>

#include "kernels.h"
#include "parallel.h"
#include "pool.h"
#include "select.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kGroup = 1024;  // logits whose maxima are kept, lane by lane
constexpr int64_t kBlock = 256;   // weights per sum

struct Row {
  const float* x;
  int64_t size;
};

OCTAVO_INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- chance: ops.uniform

OCTAVO_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

double uniform(const SampleRow& row) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
  uint64_t state = mix64(row.seed + golden);
  state = mix64(state + golden * (static_cast<uint64_t>(row.sample_index) + 1));
  state = mix64(state + golden * (static_cast<uint64_t>(row.position) + 1));
  return static_cast<double>(state >> 11) * 0x1p-53;
}

// ---- bias, mask, penalties

void apply_mask(float* x, int64_t size, const uint32_t* mask) {
  for (int64_t i = 0; i < size; i += 16) {
    const uint32_t allowed = mask[i / 32] >> (i % 32) & 0xffff;
    if (allowed == 0xffff) continue;
    const int n = static_cast<int>(least_of(16, size - i));
    store_first(x + i, select_lanes(allowed, load_first(x + i, n), set1(-kInf)), n);
  }
}

// counts[t]: kSeen, plus the occurrences in the output. Only entries of tokens in the history are touched.
void apply_penalties(float* x, const SampleRow& row, const int32_t* history, uint32_t* counts) {
  constexpr uint32_t kSeen = 1u << 31;
  for (int32_t i = 0; i < row.num_known; i++) counts[history[i]] = kSeen;
  for (int32_t i = row.prompt_len; i < row.num_known; i++) counts[history[i]]++;
  for (int32_t i = 0; i < row.num_known; i++) {
    float& logit = x[history[i]];
    const uint32_t count = counts[history[i]];
    if (!(count & kSeen)) continue;
    logit = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
    if (count != kSeen) logit -= row.frequency * static_cast<float>(count & ~kSeen) + row.presence;
    counts[history[i]] = 0;
  }
}

bool is_adjusted(const SampleRow& row) { return row.bias_count > 0 || row.mask_row >= 0 || row.history_row >= 0; }

void adjust(const SampleArgs& a, const SampleRow& row, const float* logits, float* x, Work& work) {
  std::memcpy(x, logits, static_cast<size_t>(a.vocab) * sizeof(float));
  for (int32_t i = row.bias_start; i < row.bias_start + row.bias_count; i++) x[a.bias_ids[i]] += a.bias_values[i];
  if (row.mask_row >= 0) apply_mask(x, a.vocab, a.masks + row.mask_row * a.mask_stride);
  if (row.history_row >= 0) apply_penalties(x, row, a.history + row.history_row * a.history_stride, work.counts);
}

// ---- the best: one read of the row

struct Summary {
  float best;
  bool has_nan;
  int64_t num_groups;  // entries of work.groups
};

OCTAVO_INLINE F16 group_maxima(const float* x, int64_t n, uint32_t& nan) {
  F16 best[4] = {set1(-kInf), set1(-kInf), set1(-kInf), set1(-kInf)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const F16 v[4] = {load(x + i), load(x + i + 16), load(x + i + 32), load(x + i + 48)};
    for (int j = 0; j < 4; j++) best[j] = max(best[j], v[j]);
    nan |= mask_unordered(v[0], v[1]) | mask_unordered(v[2], v[3]);
  }
  for (; i < n; i += 16) {
    const F16 v = load_or(x + i, n - i, -kInf);
    best[0] = max(best[0], v);
    nan |= mask_unordered(v, v);
  }
  return max(max(best[0], best[1]), max(best[2], best[3]));
}

Summary summarise(Row row, Work& work) {
  F16 best = set1(-kInf);
  uint32_t nan = 0;
  int64_t num_groups = 0;
  for (int64_t i = 0; i < row.size; i += kGroup, num_groups += 16) {
    const F16 maxima = group_maxima(row.x + i, least_of(kGroup, row.size - i), nan);
    store(work.groups + num_groups, maxima);
    best = max(best, maxima);
  }
  return {reduce_max(best), nan != 0, num_groups};
}

int64_t first_at_least(const float* x, int64_t size, float value) {
  for (int64_t i = 0; i < size; i += 16) {
    const uint32_t mask = mask_at_least(load_or(x + i, size - i, -kInf), set1(value));
    if (mask) return i + __builtin_ctz(mask);
  }
  return -1;
}

int32_t first_best(Row row, const Summary& summary, const Work& work) {
  const int64_t start = first_at_least(work.groups, summary.num_groups, summary.best) / 16 * kGroup;
  return static_cast<int32_t>(start + first_at_least(row.x + start, row.size - start, summary.best));
}

// A value that at least k logits reach, from the maxima of the groups: -inf if there are too few groups to tell.
float reached_by(int64_t k, const Summary& summary, Work& work) {
  const int64_t n = collect(work.groups, summary.num_groups, -FLT_MAX, work);
  return n < k ? -kInf : select(work.values, nullptr, n, static_cast<double>(k), work).value;
}

// ---- weights

struct Softmax {
  float best, inverse_temperature;
};

OCTAVO_INLINE F16 weight(F16 logit, const Softmax& softmax) {
  const F16 x = (logit - set1(softmax.best)) * set1(softmax.inverse_temperature);
  return greater(x, set1(-87.0f), exp(x), zero());
}

void weigh(const float* x, int64_t size, const Softmax& softmax, float* weights) {
  for (int64_t i = 0; i < size; i += 16)
    store_first(weights + i, weight(load_or(x + i, size - i, -kInf), softmax), static_cast<int>(least_of(16, size - i)));
}

// Total of n weights, where block_sum(start, size) gives that of a block; work.sums holds all of those.
template <class BlockSum>
OCTAVO_INLINE double sum_blocks(int64_t n, Work& work, const BlockSum& block_sum) {
  double total = 0.0;
  for (int64_t i = 0; i < n; i += kBlock) total += work.sums[i / kBlock] = reduce_add(block_sum(i, least_of(kBlock, n - i)));
  return total;
}

double sum_row(Row row, const Softmax& softmax, Work& work) {
  return sum_blocks(row.size, work, [&](int64_t start, int64_t size) {
    F16 sum = zero();
    for (int64_t i = 0; i < size; i += 16) sum = sum + weight(load_or(row.x + start + i, size - i, -kInf), softmax);
    return sum;
  });
}

double sum_candidates(int64_t n, Work& work) {
  return sum_blocks(n, work, [&](int64_t start, int64_t size) {
    F16 sum = zero();
    for (int64_t i = 0; i < size; i += 16) sum = sum + load_or(work.weights + start + i, size - i, 0.0f);
    return sum;
  });
}

// ---- inversion

// Index of the first entry with which the running sum exceeds the target; the last that weighs anything, where rounding leaves none.
template <class T>
OCTAVO_INLINE int64_t invert(const T* weights, int64_t n, double target, double& sum) {
  int64_t last = -1;
  for (int64_t i = 0; i < n; i++) {
    if (!(weights[i] > T(0))) continue;
    if (sum + weights[i] > target) return i;
    sum += weights[i];
    last = i;
  }
  if (last >= 0) sum -= weights[last];
  return last;
}

// Inversion over n weights: first the block, then the entry, among those block_weights(start, size) points at.
template <class BlockWeights>
OCTAVO_INLINE int64_t invert_blocks(int64_t n, double target, Work& work, const BlockWeights& block_weights) {
  double sum = 0.0;
  const int64_t start = invert(work.sums, (n + kBlock - 1) / kBlock, target, sum) * kBlock;
  const int64_t size = least_of(kBlock, n - start);
  return start + invert(block_weights(start, size), size, target, sum);
}

int32_t draw(Row row, const Softmax& softmax, double u, Work& work) {
  const double target = u * sum_row(row, softmax, work);
  return static_cast<int32_t>(invert_blocks(row.size, target, work, [&](int64_t start, int64_t size) {
    weigh(row.x + start, size, softmax, work.weights);
    return work.weights;
  }));
}

int32_t draw_candidate(int64_t n, double u, Work& work) {
  const double target = u * sum_candidates(n, work);
  return work.ids[invert_blocks(n, target, work, [&](int64_t start, int64_t) { return work.weights + start; })];
}

// ---- filters

struct Filters {
  int64_t top_k;  // 0: off
  double top_p;   // 1: off
  float min_p;    // 0: off
};

// The logit of a weight, lowered by more than any error of the weights.
float lowered_logit(double weight, const Softmax& softmax) {
  const double temperature = 1.0 / softmax.inverse_temperature;
  return static_cast<float>(softmax.best + temperature * (std::log(weight) - 1e-3) - 1e-6 * std::fabs(softmax.best));
}

// All that the filters keep is at least this. Tokens lighter than their equal share of the mass that top-p drops weigh less than
// it, all together, so top-p is decided among the others.
float lower_bound(Row row, const Filters& f, const Summary& summary, const Softmax& softmax, double& mass, Work& work) {
  float least = -FLT_MAX;
  if (f.top_k) least = std::fmax(least, reached_by(f.top_k, summary, work));
  else if (f.top_p < 1.0) {
    mass = sum_row(row, softmax, work);
    least = std::fmax(least, lowered_logit((1.0 - f.top_p) * mass / static_cast<double>(row.size), softmax));
  }
  if (f.min_p > 0.0f && (f.top_p >= 1.0 || !f.top_k)) least = std::fmax(least, lowered_logit(f.min_p, softmax));
  return least;
}

// Leaves in work.ids and work.weights what the filters keep, ascending; returns how many.
int64_t filter(Row row, const Filters& f, const Summary& summary, const Softmax& softmax, Work& work) {
  double mass = 0.0;
  const float least = lower_bound(row, f, summary, softmax, mass, work);
  int64_t n = collect(row.x, row.size, least, work);
  weigh(work.values, n, softmax, work.weights);
  if (f.top_k && f.top_k < n) n = keep_prefix(select(work.values, nullptr, n, static_cast<double>(f.top_k), work), n, work);
  if (f.top_p < 1.0) {
    if (f.top_k) mass = sum_candidates(n, work);
    n = keep_prefix(select(work.values, work.weights, n, f.top_p * mass, work), n, work);
  }
  return f.min_p > 0.0f ? keep_heavy(f.min_p, n, work) : n;
}

int32_t choose(Row row, const SampleRow& params, const Summary& summary, Work& work) {
  if (summary.has_nan || summary.best == -kInf) return -1;
  if (params.temperature == 0.0f || summary.best == kInf) return first_best(row, summary, work);
  const Softmax softmax{summary.best, std::fmin(1.0f / params.temperature, FLT_MAX)};
  const Filters filters{params.top_k > 0 && params.top_k < row.size ? params.top_k : 0, params.top_p, params.min_p};
  const double u = uniform(params);
  if (!filters.top_k && filters.top_p >= 1.0 && !(filters.min_p > 0.0f)) return draw(row, softmax, u, work);
  return draw_candidate(filter(row, filters, summary, softmax, work), u, work);
}

// ---- log-probabilities of the raw distribution

int32_t rank_of(Row row, float logit) {
  int32_t greater = 0;
  for (int64_t i = 0; i < row.size; i += 16)
    greater += __builtin_popcount(mask_greater(load_or(row.x + i, row.size - i, -kInf), set1(logit)));
  return 1 + greater;
}

// The `num` best of the row, best first, ties by lower id, into ids and logits.
void best_of(Row row, int64_t num, const Summary& summary, int32_t* ids, float* logits, Work& work) {
  const int64_t n = collect(row.x, row.size, reached_by(num, summary, work), work);
  int64_t size = 0;
  for (int64_t i = 0; i < n; i++) {
    const float logit = work.values[i];
    if (size == num && !(logit > logits[size - 1])) continue;
    int64_t at = size < num ? size++ : size - 1;
    for (; at > 0 && logits[at - 1] < logit; at--) {
      logits[at] = logits[at - 1];
      ids[at] = ids[at - 1];
    }
    logits[at] = logit;
    ids[at] = work.ids[i];
  }
  for (; size < num; size++) {  // NaN is not among the best
    logits[size] = std::numeric_limits<float>::quiet_NaN();
    ids[size] = -1;
  }
}

void report(const SampleArgs& a, int64_t r, Row raw, const Summary& summary, Work& work) {
  const float logit = raw.x[a.token_ids[r]];
  const double total = summary.best + std::log(sum_row(raw, {summary.best, 1.0f}, work));
  a.logprobs[r] = static_cast<float>(logit - total);
  a.ranks[r] = rank_of(raw, logit);
  const int64_t num = least_of(a.rows[r].num_logprobs, raw.size);
  if (num <= 0) return;
  float* top = a.top_logprobs + r * a.top_stride;
  best_of(raw, num, summary, a.top_ids + r * a.top_stride, top, work);
  for (int64_t i = 0; i < num; i++) top[i] = static_cast<float>(top[i] - total);
}

// ---- one row

Work work_of(Pool& pool, int thread, int64_t vocab) {
  const int64_t floats = (vocab + 16 + 15) / 16 * 16;  // compress() writes up to 16 past the last
  const int64_t groups = (vocab + kGroup - 1) / kGroup * 16, sums = (vocab + kBlock - 1) / kBlock;
  const int64_t bytes = (6 * floats + groups) * 4 + (kBuckets + sums) * 8;
  double* doubles = static_cast<double*>(pool.scratch(thread, bytes));
  float* p = reinterpret_cast<float*>(doubles + kBuckets + sums);
  return {p + 6 * floats, p, p + floats, reinterpret_cast<int32_t*>(p + 2 * floats), p + 3 * floats, p + 4 * floats, doubles,
          doubles + kBuckets, reinterpret_cast<uint32_t*>(p + 5 * floats)};
}

void sample_row(const SampleArgs& a, int64_t r, int thread, Pool& pool) {
  const SampleRow& params = a.rows[r];
  const Row raw{a.logits + r * a.logits_stride, a.vocab};
  Work work = work_of(pool, thread, a.vocab);
  a.token_ids[r] = params.target;
  if (params.target < 0) {
    Row row = raw;
    if (is_adjusted(params)) {
      float* x = a.scratch + thread * a.scratch_stride;
      adjust(a, params, raw.x, x, work);
      row.x = x;
    }
    a.token_ids[r] = choose(row, params, summarise(row, work), work);
  }
  if (params.num_logprobs >= 0 && a.token_ids[r] >= 0) report(a, r, raw, summarise(raw, work), work);
}

}  // namespace

void sample(const SampleArgs& a, Pool& pool) {
  parallel_for(pool, *a.count, [&](int64_t r, int thread) { sample_row(a, r, thread, pool); });
}

}  // namespace octavo::OCTAVO_ISA
