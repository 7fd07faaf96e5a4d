#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace octavo {
namespace {

constexpr int kUnitsPerThread = 4;      // enough to even out, few enough to keep row blocks whole
constexpr int kStatesPerThread = 1024;  // rows' states: bounds the workspace, whatever the context
constexpr int kStateFloats = 4096;      // output floats of a full row block: its states stay in the first-level cache
constexpr int kKeyCost = 4;             // reading a key costs as much as multiplying it with this many rows

int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

int32_t rows_per_unit(const AttentionShape& s) { return std::clamp(kStateFloats / s.head_dim, 8, kMaxUnitRows); }

int32_t group_of(const AttentionShape& s) { return s.num_heads / s.num_kv_heads; }

int32_t count_units(const AttentionShape& s) {
  int32_t blocks = ceil_div(int64_t{s.max_rows} * group_of(s), rows_per_unit(s)) + s.max_requests;
  return 2 * blocks + kUnitsPerThread * s.num_threads;  // dividing at most doubles the blocks and adds the threads' share
}

// Floats of one KV head's workspace.
int64_t states_stride(const AttentionShape& s) {
  if (s.num_threads == 1) return 0;
  int64_t states = ceil_div(int64_t{s.num_threads} * kStatesPerThread, s.num_kv_heads);
  return states * state_floats(s.head_dim, rows_per_unit(s)) / rows_per_unit(s) / 16 * 16;
}

int64_t workspace_bytes(const AttentionShape& s) { return s.num_kv_heads * states_stride(s) * static_cast<int64_t>(sizeof(float)); }

// Divides row blocks that cost more than a fair share into ranges of chunks.
class Cutter {
 public:
  Cutter(const AttentionBatch& batch, AttentionPlan& plan) : batch_(batch), plan_(plan) {}

  void run() {
    plan_.num_units = plan_.num_merges = 0;
    plan_.states_used = 0;
    int64_t total = 0;
    each_block([&](const RowBlock& rows) { total += cost(rows, num_chunks(rows)); });
    share_ = total / (int64_t{kUnitsPerThread} * plan_.shape.num_threads) * plan_.shape.num_kv_heads + 1;
    each_block([&](const RowBlock& rows) { add(rows); });
    std::sort(plan_.units, plan_.units + plan_.num_units, [](const AttentionUnit& a, const AttentionUnit& b) {
      if (a.cost != b.cost) return a.cost > b.cost;
      if (a.rows.request != b.rows.request) return a.rows.request < b.rows.request;
      return a.rows.row_begin != b.rows.row_begin ? a.rows.row_begin < b.rows.row_begin : a.chunk_begin < b.chunk_begin;
    });
  }

 private:
  template <class F>
  void each_block(const F& f) {
    for (int32_t i = 0; i < *batch_.num_requests; i++) {
      int32_t rows = (batch_.query_starts[i + 1] - batch_.query_starts[i]) * plan_.group;
      for (int32_t r = 0; r < rows; r += plan_.unit_rows) f(RowBlock{i, r, std::min(plan_.unit_rows, rows - r)});
    }
  }

  int32_t num_chunks(const RowBlock& rows) const {
    int32_t token = batch_.query_starts[rows.request] + (rows.row_begin + rows.num_rows - 1) / plan_.group;
    return batch_.positions[token] / kChunk + 1;
  }

  static int64_t cost(const RowBlock& rows, int32_t chunks) { return int64_t{chunks} * (rows.num_rows + kKeyCost); }

  void add(const RowBlock& rows) {
    int32_t chunks = num_chunks(rows);
    int32_t parts = plan_.shape.num_threads > 1 ? std::min(chunks, ceil_div(cost(rows, chunks), share_)) : 1;
    int64_t size = state_floats(plan_.shape.head_dim, rows.num_rows);
    int64_t room = (plan_.states_stride - plan_.states_used) / size - 1;  // for states of chunks, besides the total's
    if (parts <= 1 || room < 1) {
      push(rows, 0, chunks, -1);
      return;
    }
    int32_t length = ceil_div(chunks, parts), first = static_cast<int32_t>(std::max<int64_t>(length, chunks - room));
    auto states_of = [&](int32_t chunk) { return plan_.states_used + (1 + chunk - first) * size; };
    push(rows, 0, first, plan_.states_used);
    for (int32_t c = first; c < chunks; c += length) push(rows, c, std::min(c + length, chunks), states_of(c));
    plan_.merges[plan_.num_merges++] = {rows, 1 + chunks - first, plan_.states_used};
    plan_.states_used = states_of(chunks);
  }

  void push(const RowBlock& rows, int32_t begin, int32_t end, int64_t states) {
    if (plan_.num_units == plan_.max_units) std::abort();  // more rows or requests than the plan was made for
    plan_.units[plan_.num_units++] = {rows, begin, end, states, cost(rows, end - begin)};
  }

  const AttentionBatch& batch_;
  AttentionPlan& plan_;
  int64_t share_ = 1;
};

}  // namespace

AttentionPlan* make_attention_plan(const AttentionShape& s) {
  auto* plan = new AttentionPlan{};
  plan->shape = s;
  plan->group = group_of(s);
  plan->unit_rows = rows_per_unit(s);
  plan->max_units = count_units(s);
  plan->states_stride = states_stride(s);
  plan->units = new AttentionUnit[plan->max_units];
  plan->merges = new AttentionMerge[plan->max_units];
  plan->states = static_cast<float*>(::operator new(static_cast<size_t>(workspace_bytes(s)), std::align_val_t{64}));
  return plan;
}

void free_attention_plan(AttentionPlan* plan) {
  if (plan == nullptr) return;
  ::operator delete(plan->states, std::align_val_t{64});
  delete[] plan->merges;
  delete[] plan->units;
  delete plan;
}

int64_t attention_plan_bytes(const AttentionShape& s) {
  return static_cast<int64_t>(sizeof(AttentionPlan)) + count_units(s) * static_cast<int64_t>(sizeof(AttentionUnit) + sizeof(AttentionMerge)) + workspace_bytes(s);
}

void cut_attention(const AttentionBatch& batch, AttentionPlan& plan) { Cutter(batch, plan).run(); }

}  // namespace octavo
