#include "program.h"

#include <chrono>

namespace octavo {

Program::~Program() {
  for (auto& ahead : ahead_) delete[] ahead->cursors;
  for (auto& [key, plan] : plans_) free_attention_plan(plan);
}

void Program::record_attention(void (*op)(const AttentionArgs&, Pool&), AttentionArgs args) {
  auto first = nodes_.end();
  while (first != nodes_.begin() && !std::holds_alternative<Node<AttentionArgs>>(*(first - 1))) --first;
  if (first != nodes_.begin() && args.window == 0) {
    auto* cursors = new KVCursor[static_cast<size_t>(num_threads())]{};
    for (int thread = 0; thread < num_threads(); thread++) cursors[thread].next = INT32_MAX;  // until the first step has been
    ahead_.emplace_back(new KVAhead{args.plan, args.cache, args.layer, num_threads(), cursors});
    args.ahead = ahead_.back().get();
    for (; first != nodes_.end(); ++first)
      if (auto* product = std::get_if<Node<LinearArgs>>(&*first)) product->args.ahead = args.ahead;
  }
  record(op, args);
}

AttentionPlan* Program::plan_for(const AttentionBatch& batch, const AttentionShape& shape) {
  auto [entry, is_new] = plans_.try_emplace({&batch, shape}, nullptr);
  if (is_new) {
    entry->second = make_attention_plan(shape);
    nodes_.push_back(PlanNode{&batch, entry->second});
  }
  return entry->second;
}

std::vector<int32_t> Program::blocks_ahead() const {
  std::vector<int32_t> blocks;
  for (auto& [key, plan] : plans_) blocks.insert(blocks.end(), plan->blocks_ahead, plan->blocks_ahead + plan->num_blocks_ahead);
  return blocks;
}

int64_t Program::num_shared_rows() const {
  int64_t rows = 0;
  for (auto& [key, plan] : plans_)
    for (int32_t i = 0; i < plan->num_passes; i++) rows += plan->passes[i].num_rows;
  return rows;
}

void Program::run() {
  pool_.begin_step();
  for (const AnyNode& node : nodes_) std::visit([this](const auto& n) { n(pool_); }, node);
  pool_.end_step();
}

std::map<std::string, double> Program::profile() {
  using Clock = std::chrono::steady_clock;
  std::map<std::string, double> seconds;
  pool_.begin_step();
  for (const AnyNode& node : nodes_) {
    auto start = Clock::now();
    std::visit([this](const auto& n) { n(pool_); }, node);
    seconds[kNames[node.index()]] += std::chrono::duration<double>(Clock::now() - start).count();
  }
  pool_.end_step();
  return seconds;
}

}  // namespace octavo
