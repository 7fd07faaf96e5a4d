// Which requests of a step begin with the same blocks, so that attention can read those once for all of them.
//
//   tables   7 3 9 | 4        7 3 9 is shared by three requests, and 7 3 9 5 by two of them: of the groups that a
//            7 3 9 | 5 8      tree of tables allows, those are taken that save the most keys, here 2 x 3 blocks
//            7 3 9 | 5 6      rather than 1 x 4
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace octavo {

inline constexpr int32_t kMinSharedKeys = 128;  // with fewer, handing states on takes as long as what is saved

// A request that may take part, with the blocks of which its first row sees all keys.
struct PrefixMember {
  const int32_t* table;
  int32_t num_blocks;
  int32_t request;
  int32_t key;  // by which members are parted
};

// Members [begin, end) share the keys of their first tiles, and all their rows lie behind those.
struct PrefixGroup {
  int32_t begin, end;
  int32_t num_tiles;
};

class PrefixGroups {
 public:
  PrefixGroups(int32_t max_requests, int32_t block_size);

  // Groups among a step's requests of at most `max_tokens` tokens. Reads each table once, up to what it shares.
  void find(const AttentionBatch& batch, int32_t max_tokens);

  const std::vector<PrefixMember>& members() const { return members_; }
  const std::vector<PrefixGroup>& groups() const { return groups_; }

 private:
  int64_t split(int32_t begin, int32_t end, int32_t known);
  int64_t split_parts(int32_t begin, int32_t end, int32_t common);

  int32_t block_size_;
  std::vector<PrefixMember> members_;
  std::vector<PrefixGroup> groups_;
};

}  // namespace octavo
