// A step, recorded once: ops with their arguments by value. Running it is one call, whatever the step's shape.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "kv_ahead.h"
#include "pool.h"
#include "step_layout.h"

namespace octavo {

class Program {
 public:
  // share_prefix: attention reads the keys that requests have in common once for all of them.
  Program(const Kernels& kernels, Pool& pool, bool share_prefix) : kernels_(kernels), pool_(pool), share_prefix_(share_prefix) {}
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  template <class Args>
  void record(void (*op)(const Args&, Pool&), const Args& args) {
    nodes_.push_back(Node<Args>{op, args});
  }

  // Full attention after other attention: the products in between ask for its keys and values.
  void record_attention(void (*op)(const AttentionArgs&, Pool&), AttentionArgs args);

  // The plan of a batch, one for all layers of a shape: its first use records the node that makes it anew in each step.
  AttentionPlan* plan_for(const AttentionBatch& batch, const AttentionShape& shape);

  void run();

  // Runs once; the seconds that each kind of op took in all.
  std::map<std::string, double> profile();

  const Kernels& kernels() const { return kernels_; }
  int num_threads() const { return pool_.num_threads(); }
  size_t size() const { return nodes_.size(); }
  bool share_prefix() const { return share_prefix_; }

  // Rows of attention, per KV head, that went through shared passes in the last run.
  int64_t num_shared_rows() const;

  // The blocks that the last run's plans listed for products to ask for.
  std::vector<int32_t> blocks_ahead() const;

 private:
  template <class Args>
  struct Node {
    void (*op)(const Args&, Pool&);
    Args args;
    void operator()(Pool& pool) const { op(args, pool); }
  };
  struct PlanNode {
    const AttentionBatch* batch;
    AttentionPlan* plan;
    void operator()(Pool&) const { cut_attention(*batch, *plan); }
  };
  using AnyNode = std::variant<Node<LayOutRowsArgs>, Node<LayOutSamplesArgs>, Node<EmbedArgs>, Node<LinearArgs>, Node<NormArgs>,
                               Node<RotaryArgs>, Node<GatedArgs>, Node<GatherArgs>, Node<WriteKVArgs>, Node<CopyBlocksArgs>, PlanNode,
                               Node<AttentionArgs>, Node<SampleArgs>>;

  static constexpr const char* kNames[] = {"lay_out_rows", "lay_out_samples",  "embed",       "linear",   "rms_norm",
                                           "rotary",       "gated_activation", "gather_rows", "write_kv", "copy_blocks",
                                           "plan_attention", "paged_attention", "sample"};  // of AnyNode
  static_assert(std::size(kNames) == std::variant_size_v<AnyNode>);

  const Kernels& kernels_;
  Pool& pool_;
  bool share_prefix_;
  std::vector<AnyNode> nodes_;
  std::vector<std::unique_ptr<KVAhead>> ahead_;
  std::map<std::pair<const AttentionBatch*, AttentionShape>, AttentionPlan*> plans_;
};

}  // namespace octavo
