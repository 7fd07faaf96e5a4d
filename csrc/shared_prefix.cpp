#include "shared_prefix.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

// How many leading entries two tables have in common, between `known` and `most`.
int32_t common_blocks(const int32_t* a, const int32_t* b, int32_t known, int32_t most) {
  constexpr int32_t kStep = 16;
  int32_t n = known;
  while (n + kStep <= most && std::memcmp(a + n, b + n, kStep * sizeof(int32_t)) == 0) n += kStep;
  while (n < most && a[n] == b[n]) n++;
  return n;
}

}  // namespace

PrefixGroups::PrefixGroups(int32_t max_requests, int32_t block_size) : block_size_(block_size) {
  members_.reserve(static_cast<size_t>(max_requests));
  groups_.reserve(static_cast<size_t>(max_requests));
}

void PrefixGroups::find(const AttentionBatch& batch, int32_t max_tokens) {
  members_.clear();
  groups_.clear();
  for (int32_t i = 0; i < *batch.num_requests; i++) {
    int32_t first = batch.query_starts[i], seen = batch.positions[first] + 1;
    if (batch.query_starts[i + 1] - first > max_tokens || seen < kMinSharedKeys) continue;
    members_.push_back({batch.block_tables + batch.table_rows[i] * batch.table_stride, seen / block_size_, i, 0});
  }
  if (!members_.empty()) split(0, static_cast<int32_t>(members_.size()), 0);
}

// Members [begin, end) have their first `known` blocks in common. Adds the best groups among them; returns the tiles saved.
int64_t PrefixGroups::split(int32_t begin, int32_t end, int32_t known) {
  const PrefixMember& first = members_[static_cast<size_t>(begin)];
  int32_t common = first.num_blocks;
  for (int32_t i = begin + 1; i < end && common > known; i++) {
    const PrefixMember& other = members_[static_cast<size_t>(i)];
    common = common_blocks(first.table, other.table, known, std::min(common, other.num_blocks));
  }
  int32_t tiles = static_cast<int32_t>(int64_t{common} * block_size_ / kTile);
  int64_t together = tiles * kTile < kMinSharedKeys ? 0 : int64_t{end - begin - 1} * tiles;
  size_t before = groups_.size();
  int64_t apart = split_parts(begin, end, common);
  if (together == 0 || together < apart) return apart;
  groups_.resize(before);
  groups_.push_back({begin, end, tiles});
  return together;
}

// Parts members by the block that follows what they have in common.
int64_t PrefixGroups::split_parts(int32_t begin, int32_t end, int32_t common) {
  auto from = members_.begin() + begin, to = members_.begin() + end;
  for (auto m = from; m < to; ++m) m->key = common < m->num_blocks ? m->table[common] : -1 - m->request;
  std::sort(from, to, [](const PrefixMember& a, const PrefixMember& b) { return a.key != b.key ? a.key < b.key : a.request < b.request; });
  int64_t saved = 0;
  for (auto m = from; m < to;) {
    auto next = std::find_if(m, to, [&](const PrefixMember& other) { return other.key != m->key; });
    if (next - m > 1) saved += split(static_cast<int32_t>(m - members_.begin()), static_cast<int32_t>(next - members_.begin()), common + 1);
    m = next;
  }
  return saved;
}

}  // namespace octavo
