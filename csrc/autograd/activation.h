// What the nodes of activations, pools and paddings share.
#pragma once

#include "autograd/lean_node.h"
#include "ops/activation.h"
#include "ops/pool.h"

namespace patchconv {

// Whether this library records the call. The rest goes to stock PyTorch: calls without gradients, other
// dtypes and layouts, forward-mode AD.
inline bool use_lean_node(const at::Tensor& x) { return needs_node(x) && served(x) && !has_tangent(x); }

// The base of activations: one input, and the function that is applied to it.
class ActivationNode : public LeanNode {
 public:
  using LeanNode::LeanNode;
  Source input;

 protected:
  virtual at::Tensor apply_to(const at::Tensor& x) = 0;
  virtual void apply_to_(at::Tensor& x) { x.copy_(apply_to(x)); }

  at::Tensor rebuild() override {
    bool fresh = false;
    at::Tensor x = input.get(*this, &fresh);
    if (!fresh) return apply_to(x);
    apply_to_(x);
    return x;
  }
  std::vector<Source*> sources() override { return {&input}; }
};

// Stands for an input of which a stock backward operator reads only sizes and layout.
struct StandIn {
  StandIn() = default;
  explicit StandIn(const at::Tensor& input)
      : sizes(input.sizes().vec()), format(input.suggest_memory_format()) {}
  at::Tensor tensor(const at::Tensor& grad) const { return stand_in(grad, sizes, format); }

  std::vector<int64_t> sizes;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

}  // namespace patchconv
