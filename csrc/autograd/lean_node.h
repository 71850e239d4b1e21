// Recompute by provenance: the base of this library's nodes, and what they keep of their inputs.
//
// A LeanNode can rebuild its output from what it saves anyway. A node that needs its input in backward first
// looks for the input's producer (Link::find). If that is a LeanNode, the consumer saves no tensor. It keeps
// a link to the producer, and in backward asks for the value, uses it and drops it. Chains compose: of batch
// norm -> ReLU -> dropout -> convolution, only the batch norm's input is saved.
//
// The rules. A rebuilt value equals the original bit for bit: the same operators run on the same tensors. An
// output that was modified in place since, or that is used without gradients, is saved as usual. Saved
// tensors go through SavedVariable, where hooks and the version check see them; a node whose tensors are
// freed raises PyTorch's own error. With grad mode on (create_graph) a rebuilt value has the history of the
// original.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "autograd/lean_source.h"
#include "core/settings.h"

namespace patchconv {

using torch::autograd::variable_list;

// The settings of a call, which its backward pass and its rebuilds have again: the backend, and the workspace
// limit that its thread had set for itself, unless the thread that runs them has set one too.
class CallSettings {
 public:
  CallSettings() : call_{.workspace_limit = own_settings().workspace_limit, .backend = backend()} {}
  OwnSettings again() const {
    return own_settings().workspace_limit ? OwnSettings{.backend = call_.backend} : call_;
  }

 private:
  OwnSettings call_;
};

class LeanNode : public torch::autograd::Node {
 public:
  // Makes value() available from now on without saving the output: at most, operands are saved that are no
  // larger than it. Returns whether that was possible.
  bool secure();
  // Called in forward by consumers, with this node's output: makes value() available from now on, if
  // necessary by saving the output.
  void provide(const at::Tensor& output);
  // Whether value() is available with what is saved now, and how many elements it writes. `depth`: length of
  // the chain so far.
  bool ready(int depth = 0) const;
  int64_t cost(int depth = 0) const;
  bool made(const at::Tensor& output) const;  // whether `output` is this node's, not modified since
  // Whether these saved-tensor hooks were active when the node was made. Only then may a consumer link to it:
  // a checkpointed function that runs again must save the same tensors as the first time, and then its inputs
  // come from elsewhere.
  bool made_under(const Hooks& hooks) const;
  at::Tensor value(bool* fresh = nullptr);
  // relu(value()) in one pass, in new memory. Undefined where that is not possible.
  at::Tensor value_with_relu();

  std::string name() const override { return name_; }
  variable_list apply(variable_list&& grads) final;
  void release_variables() final;
  // Makes the node the output's grad_fn. `in_place`: the history that the output has goes below the node.
  static void attach(const at::Tensor& output, const NodePtr& node, bool in_place = false);
  // Keeps noted operands alive until a node is made on this thread that does not follow from this one: the
  // parts of a concatenation often have no other owner by the time its consumer asks for them.
  void hold(at::TensorList operands);

 protected:
  explicit LeanNode(const char* name) : name_(name) {}

  // `grad` is defined. Returns one gradient per edge, undefined where an edge does not need one
  // (task_should_compute_output).
  virtual variable_list backward(const at::Tensor& grad) = 0;
  // Computes the output again, in new memory.
  virtual at::Tensor rebuild();
  // relu of the output, if an operator can apply it in the same pass.
  virtual at::Tensor rebuild_with_relu() { return {}; }
  // What rebuild() reads, and what only backward() reads. Without sources a node cannot rebuild its output.
  virtual std::vector<Source*> sources() { return {}; }
  virtual std::vector<Source*> others() { return {}; }
  // Whether consumers may have the node save its output where it cannot rebuild it: it is then held until the
  // node's own backward is done. A node that may not has no part in chains: it leaves held operands alone.
  virtual bool may_save_output() const { return true; }
  // Whether noted operands may be saved instead of the output.
  virtual bool may_promote() const { return false; }
  // Called when the output was saved: what backward() no longer needs may be released.
  virtual void output_was_saved() {}
  bool has_output() const { return output_saved_; }
  bool released() const { return released_; }
  // For a gradient of an operator that is linear, at least piecewise. With grad mode on it depends on all
  // inputs of the node, as stock's does, with derivatives of zero.
  at::Tensor with_flat_slope(const at::Tensor& gradient) const;

 private:
  // What secure() would save. collect() fills it without side effects and returns whether that is enough.
  struct ToSave;
  bool collect(ToSave& found, int depth);

  const char* name_;
  const CallSettings made_with_;
  bool released_ = false;
  bool known_ = false;  // whether consumers may link to the output; the next fields describe it
  int64_t numel_ = 0;
  int64_t bytes_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  uint32_t version_ = 0;
  const void* storage_ = nullptr;
  std::vector<int64_t> strides_;
  Hooks hooks_;
  bool output_saved_ = false;
  std::shared_ptr<std::vector<at::Tensor>> held_;
  Source output_;
  std::mutex last_mutex_;
  std::optional<WeakTensor> last_;  // the last rebuilt value, shared while it is in use
};

// A node with an edge to each of the tensors, in their order.
template <typename T, typename... Tensors>
auto make_node(const Tensors&... tensors) {
  auto make = [] {
    if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
      return std::shared_ptr<T>(new T(), [](auto* node) { deleteNode(node); });
    } else {
      return c10::make_intrusive<T>();
    }
  };
  auto node = make();
  node->set_next_edges(torch::autograd::collect_next_edges(tensors...));
  return node;
}

// Whether nothing else holds an incoming gradient, so that the node may write over it.
inline bool solely_owned(const at::Tensor& grad) {
  return grad.use_count() == 1 && grad.has_storage() && grad.storage().use_count() == 1 &&
         grad.is_non_overlapping_and_dense();
}

// Whether a call must be recorded: by this library's node, or, under forward-mode AD, by stock PyTorch's.
template <typename... Tensors>
bool needs_node(const Tensors&... tensors) {
  return torch::autograd::compute_requires_grad(tensors...);
}
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
inline bool has_tangent(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && has_tangent(*tensor);
}

}  // namespace patchconv
