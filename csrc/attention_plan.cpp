#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "shared_prefix.h"

namespace octavo {
namespace {

constexpr int kUnitsPerThread = 4;      // enough to even out, few enough to keep row blocks whole
constexpr int kStatesPerThread = 1024;  // rows' states: bounds the workspace, whatever the context
constexpr int kSharedTokens = 256;      // in shared passes, where fewer requests than that may run: bounds the workspace too
constexpr int kStateFloats = 4096;      // output floats of a full row block: its states stay in the first-level cache
constexpr int kKeyCost = 4;             // reading a key costs as much as multiplying it with this many rows

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

int32_t rows_per_unit(const AttentionShape& s) { return std::clamp(kStateFloats / s.head_dim, 8, kMaxUnitRows); }

int32_t group_of(const AttentionShape& s) { return s.num_heads / s.num_kv_heads; }

int32_t count_units(const AttentionShape& s) {
  int32_t blocks = ceil_div(int64_t{s.max_rows} * group_of(s), rows_per_unit(s)) + s.max_requests;
  return 2 * blocks + kUnitsPerThread * s.num_threads;  // dividing at most doubles the blocks and adds the threads' share
}

// Most tokens of a request in a shared pass: with more rows than half a unit, a key is read for many rows anyway.
int32_t max_shared_tokens(const AttentionShape& s) { return s.share_prefix ? rows_per_unit(s) / 2 / group_of(s) : 0; }

// Floats of the states that shared passes must keep: two of each row, with room for a pass of a few rows' maxima.
int64_t shared_floats(const AttentionShape& s) {
  if (max_shared_tokens(s) == 0) return 0;
  int64_t rows = int64_t{std::min(s.max_rows, std::max(s.max_requests, kSharedTokens))} * group_of(s);
  return 2 * rows * (state_row_floats(s.head_dim) + 16);
}

// Floats of the states of divided row blocks.
int64_t divided_floats(const AttentionShape& s) {
  if (s.num_threads == 1) return 0;
  int64_t states = ceil_div(int64_t{s.num_threads} * kStatesPerThread, s.num_kv_heads);
  return states * state_floats(s.head_dim, rows_per_unit(s)) / rows_per_unit(s) / 16 * 16;
}

// Floats of one KV head's workspace.
int64_t states_stride(const AttentionShape& s) { return shared_floats(s) + divided_floats(s); }

int64_t workspace_bytes(const AttentionShape& s) { return s.num_kv_heads * states_stride(s) * static_cast<int64_t>(sizeof(float)); }

// Makes shared passes, and divides row blocks that cost more than a fair share into ranges of chunks.
class Cutter {
 public:
  Cutter(const AttentionBatch& batch, AttentionPlan& plan) : batch_(batch), plan_(plan) {}

  void run() {
    plan_.num_units = plan_.num_merges = plan_.num_passes = plan_.num_shared_units = 0;
    plan_.states_used = 0;
    for (int32_t i = 0; i < *batch_.num_requests; i++) plan_.shared_rows[i] = {-1, 0};
    if (plan_.groups != nullptr) share_prefixes();
    int64_t total = 0;
    each_block([&](const RowBlock& rows) { total += cost(rows.num_rows, num_chunks(rows) - first_chunk(rows)); });
    share_ = share_of(total);
    each_block([&](const RowBlock& rows) { add(rows); });
    std::sort(plan_.units, plan_.units + plan_.num_units, [](const AttentionUnit& a, const AttentionUnit& b) {
      if (a.cost != b.cost) return a.cost > b.cost;
      if (a.rows.request != b.rows.request) return a.rows.request < b.rows.request;
      return a.rows.row_begin != b.rows.row_begin ? a.rows.row_begin < b.rows.row_begin : a.chunk_begin < b.chunk_begin;
    });
    list_blocks();
  }

 private:
  // A unit's fair share of some cost per KV head.
  int64_t share_of(int64_t total) const {
    return total / (int64_t{kUnitsPerThread} * plan_.shape.num_threads) * plan_.shape.num_kv_heads + 1;
  }

  static int64_t cost(int32_t rows, int32_t chunks) { return int64_t{chunks} * (rows + kKeyCost); }

  // Into how many parts chunks of that cost are divided, if there is room for their states.
  int32_t num_parts(int64_t cost, int32_t chunks) const {
    return plan_.shape.num_threads > 1 ? std::min(chunks, ceil_div(cost, share_)) : 1;
  }

  int64_t states_size(int32_t rows) const { return state_floats(plan_.shape.head_dim, rows); }

  int32_t num_rows(int32_t request) const { return (batch_.query_starts[request + 1] - batch_.query_starts[request]) * plan_.group; }

  void share_prefixes() {
    plan_.groups->find(batch_, max_shared_tokens(plan_.shape));
    int64_t room = shared_floats(plan_.shape), total = 0;
    num_pieces_ = 0;
    for (const PrefixGroup& group : plan_.groups->groups()) make_passes(group, room);
    for (int32_t i = 0; i < plan_.num_passes; i++) total += cost(plan_.passes[i].num_rows, chunks_of(plan_.passes[i]));
    share_ = share_of(total);
    promised_ = shared_floats(plan_.shape) - room;
    for (int32_t i = 0; i < plan_.num_passes; i++) divide(i);
    std::sort(plan_.shared_units, plan_.shared_units + plan_.num_shared_units, [](const SharedUnit& a, const SharedUnit& b) {
      if (a.cost != b.cost) return a.cost > b.cost;
      return a.pass != b.pass ? a.pass < b.pass : a.chunk_begin < b.chunk_begin;
    });
  }

  // Deals a group's requests to passes of about equal size.
  void make_passes(const PrefixGroup& group, int64_t& room) {
    int32_t total = 0, largest = 0;
    for (int32_t i = group.begin; i < group.end; i++) total += num_rows(member(i)), largest = std::max(largest, num_rows(member(i)));
    int32_t target = ceil_div(total, ceil_div(total, plan_.unit_rows / largest * largest));
    for (int32_t i = group.begin, end; i < group.end; i = end) {
      int32_t rows = 0;
      for (end = i; end < group.end && rows < target && rows + num_rows(member(end)) <= plan_.unit_rows; end++) rows += num_rows(member(end));
      int64_t size = 2 * states_size(rows);
      if (end - i < 2 || size > room) continue;
      room -= size;
      add_pass(i, end, group.num_tiles);
    }
  }

  int32_t member(int32_t i) const { return plan_.groups->members()[static_cast<size_t>(i)].request; }

  void add_pass(int32_t begin, int32_t end, int32_t num_tiles) {
    SharedPass pass{num_pieces_, num_pieces_ + end - begin, 0, num_tiles, {}};
    for (int32_t i = begin; i < end; i++) {
      RowBlock piece{member(i), 0, num_rows(member(i))};
      plan_.shared_rows[piece.request] = {plan_.num_passes, pass.num_rows};
      plan_.pieces[num_pieces_++] = piece;
      pass.num_rows += piece.num_rows;
    }
    plan_.passes[plan_.num_passes++] = pass;
  }

  static int32_t chunks_of(const SharedPass& pass) { return ceil_div(int64_t{pass.num_tiles} * kTile, kChunk); }

  // Units of a pass: a total of chunks, then more chunks by themselves where the work is worth dividing.
  void divide(int32_t index) {
    SharedPass& pass = plan_.passes[index];
    int32_t chunks = chunks_of(pass), complete = pass.num_tiles / (kChunk / kTile);
    int32_t parts = num_parts(cost(pass.num_rows, chunks), chunks);
    int64_t size = states_size(pass.num_rows);
    promised_ -= 2 * size;
    int64_t room = (plan_.states_stride - plan_.states_used - promised_) / size - 1;
    int32_t length = ceil_div(chunks, parts), first = chunks;
    pass.kept = {plan_.states_used, complete};
    if (parts > 1) first = pass.kept.first_kept = static_cast<int32_t>(std::min<int64_t>(complete, std::max<int64_t>(length, chunks - room)));
    push_shared(index, 0, first);
    for (int32_t c = first; c < chunks; c += length) push_shared(index, c, std::min(c + length, chunks));
    plan_.states_used += (1 + chunks - pass.kept.first_kept) * size;
  }

  void push_shared(int32_t pass, int32_t begin, int32_t end) {
    plan_.shared_units[plan_.num_shared_units++] = {pass, begin, end, cost(plan_.passes[pass].num_rows, end - begin)};
  }

  template <class F>
  void each_block(const F& f) {
    for (int32_t i = 0; i < *batch_.num_requests; i++) {
      int32_t rows = num_rows(i);
      for (int32_t r = 0; r < rows; r += plan_.unit_rows) f(RowBlock{i, r, std::min(plan_.unit_rows, rows - r)});
    }
  }

  // The chunk in which a row block's own units begin.
  int32_t first_chunk(const RowBlock& rows) const {
    int32_t pass = plan_.shared_rows[rows.request].pass;
    return pass < 0 ? 0 : plan_.passes[pass].num_tiles / (kChunk / kTile);
  }

  int32_t num_chunks(const RowBlock& rows) const {
    int32_t token = batch_.query_starts[rows.request] + (rows.row_begin + rows.num_rows - 1) / plan_.group;
    return batch_.positions[token] / kChunk + 1;
  }

  void add(const RowBlock& rows) {
    int32_t begin = first_chunk(rows), end = num_chunks(rows), chunks = end - begin;
    int32_t parts = num_parts(cost(rows.num_rows, chunks), chunks);
    int64_t size = states_size(rows.num_rows);
    int64_t room = (plan_.states_stride - plan_.states_used) / size - 1;  // for states of chunks, besides the total's
    if (parts <= 1 || room < 1) {
      push(rows, begin, end, {-1, end});
      return;
    }
    int32_t length = ceil_div(chunks, parts), first = static_cast<int32_t>(std::max<int64_t>(begin + length, end - room));
    KeptStates kept{plan_.states_used, first};
    push(rows, begin, first, kept);
    for (int32_t c = first; c < end; c += length) push(rows, c, std::min(c + length, end), kept);
    plan_.merges[plan_.num_merges++] = {rows, 1 + end - first, kept.states};
    plan_.states_used += (1 + end - first) * size;
  }

  void push(const RowBlock& rows, int32_t begin, int32_t end, const KeptStates& kept) {
    if (plan_.num_units == plan_.max_units) std::abort();  // more rows or requests than the plan was made for
    plan_.units[plan_.num_units++] = {rows, begin, end, kept, cost(rows.num_rows, end - begin)};
  }

  // What products ask for before layers without a window read it. Blocks that units find in common, outside passes, are listed by the first.
  void list_blocks() {
    plan_.num_blocks_ahead = 0;
    plan_.marks->step++;
    for (int32_t i = 0; i < plan_.num_passes; i++)
      list_keys(plan_.pieces[plan_.passes[i].piece_begin].request, 0, int64_t{plan_.passes[i].num_tiles} * kTile);
    for (int32_t i = 0; i < plan_.num_units; i++) {
      const AttentionUnit& unit = plan_.units[i];
      const int32_t request = unit.rows.request, pass = plan_.shared_rows[request].pass;
      const int64_t shared = pass < 0 ? 0 : int64_t{plan_.passes[pass].num_tiles} * kTile;
      const int64_t keys = batch_.positions[batch_.query_starts[request + 1] - 1] + 1;
      list_keys(request, std::max(shared, int64_t{unit.chunk_begin} * kChunk), std::min(keys, int64_t{unit.chunk_end} * kChunk));
    }
  }

  void list_keys(int32_t request, int64_t begin, int64_t end) {
    const int32_t* table = batch_.block_tables + batch_.table_rows[request] * batch_.table_stride;
    const int64_t size = plan_.shape.block_size;
    for (int64_t block = begin / size; block * size < end && plan_.num_blocks_ahead < kMaxBlocksAhead; block++)
      if (plan_.marks->add(table[block])) plan_.blocks_ahead[plan_.num_blocks_ahead++] = table[block];
  }

  const AttentionBatch& batch_;
  AttentionPlan& plan_;
  int64_t share_ = 1;
  int64_t promised_ = 0;  // floats that passes to come will need
  int32_t num_pieces_ = 0;
};

}  // namespace

AttentionPlan* make_attention_plan(const AttentionShape& s) {
  auto* plan = new AttentionPlan{};
  auto requests = static_cast<size_t>(s.max_requests);
  plan->shape = s;
  plan->group = group_of(s);
  plan->unit_rows = rows_per_unit(s);
  plan->max_units = count_units(s);
  plan->states_stride = states_stride(s);
  plan->units = new AttentionUnit[static_cast<size_t>(plan->max_units)];
  plan->merges = new AttentionMerge[static_cast<size_t>(plan->max_units)];
  plan->shared_rows = new SharedRows[requests];
  plan->blocks_ahead = new int32_t[kMaxBlocksAhead];
  plan->marks = new BlockMarks{};
  if (max_shared_tokens(s) > 0) {
    plan->passes = new SharedPass[requests];
    plan->shared_units = new SharedUnit[static_cast<size_t>(plan->max_units)];
    plan->pieces = new RowBlock[requests];
    plan->groups = new PrefixGroups(s.max_requests, s.block_size);
  }
  plan->states = static_cast<float*>(::operator new(static_cast<size_t>(workspace_bytes(s)), std::align_val_t{64}));
  return plan;
}

void free_attention_plan(AttentionPlan* plan) {
  if (plan == nullptr) return;
  ::operator delete(plan->states, std::align_val_t{64});
  delete plan->groups;
  delete[] plan->pieces;
  delete[] plan->shared_units;
  delete[] plan->passes;
  delete plan->marks;
  delete[] plan->blocks_ahead;
  delete[] plan->shared_rows;
  delete[] plan->merges;
  delete[] plan->units;
  delete plan;
}

int64_t attention_plan_bytes(const AttentionShape& s) {
  int64_t requests = sizeof(SharedRows) + sizeof(SharedPass) + sizeof(RowBlock) + sizeof(PrefixMember) + sizeof(PrefixGroup);
  int64_t units = sizeof(AttentionUnit) + sizeof(AttentionMerge) + sizeof(SharedUnit);
  int64_t ahead = sizeof(BlockMarks) + kMaxBlocksAhead * sizeof(int32_t);
  return static_cast<int64_t>(sizeof(AttentionPlan)) + ahead + s.max_requests * requests + count_units(s) * units + workspace_bytes(s);
}

void cut_attention(const AttentionBatch& batch, AttentionPlan& plan) { Cutter(batch, plan).run(); }

}  // namespace octavo
