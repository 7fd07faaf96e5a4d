#include "program.h"

namespace octavo {

Program::~Program() {
  for (auto& [batch, plan] : plans_) free_attention_plan(plan);
}

AttentionPlan* Program::plan_for(const AttentionBatch& batch, const AttentionShape& shape) {
  auto [entry, is_new] = plans_.try_emplace(&batch, nullptr);
  if (is_new) {
    entry->second = make_attention_plan(shape);
    nodes_.push_back(PlanNode{&batch, entry->second});
  }
  return entry->second;
}

void Program::run() {
  pool_.begin_step();
  for (const AnyNode& node : nodes_) std::visit([this](const auto& n) { n(pool_); }, node);
  pool_.end_step();
}

}  // namespace octavo
