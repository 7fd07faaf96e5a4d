#include "program.h"

#include <chrono>

namespace octavo {

Program::~Program() {
  for (auto& [key, plan] : plans_) free_attention_plan(plan);
}

AttentionPlan* Program::plan_for(const AttentionBatch& batch, const AttentionShape& shape) {
  auto [entry, is_new] = plans_.try_emplace({&batch, shape}, nullptr);
  if (is_new) {
    entry->second = make_attention_plan(shape);
    nodes_.push_back(PlanNode{&batch, entry->second});
  }
  return entry->second;
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
