// Recompute by provenance: the base of this library's nodes, and what they keep of their inputs.
//
// A LeanNode can make its output again from what it keeps anyway. A node that needs its input in backward
// first looks for the input's producer (Link::find): if that is a LeanNode, the consumer keeps no tensor but
// the way there, and in backward asks for the value, uses it and drops it. Chains compose: of batch norm ->
// ReLU -> dropout -> convolution the batch norm's input alone is kept.
//
// The rules. A value made again equals the original bit for bit: the same operators run on the same tensors.
// An output that was written to since, or that is used without gradients, is saved as usual. What is saved
// goes through SavedVariable, where hooks and the version check see it; a node whose tensors are freed gives
// PyTorch's own error. With grad mode on (create_graph) a value made again has the history of the original.
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

#include "core/settings.h"

namespace patchconv {

using torch::autograd::variable_list;
// A shared_ptr before torch 2.13, an intrusive_ptr since.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

// The saved-tensor hooks of a moment, known by their first one, which must stay alive for that.
using Hooks = std::optional<c10::SafePyObject>;

class LeanNode;

// The way to a tensor that a LeanNode can make again: its output, or a view of it. It does not keep the node
// alive: the edge of the consumer does, since the tensor has a gradient.
struct Link {
  // A link whose value() will be `tensor`, if it has a producer; `sure`: which sees to it now.
  static std::optional<Link> find(const at::Tensor& tensor, bool sure = true);
  // The tensor, made again. `fresh`, if given, is told whether the caller alone has it and may write to it.
  at::Tensor value(bool* fresh = nullptr) const;

  LeanNode* producer = nullptr;
  torch::autograd::Node* grad_fn = nullptr;  // the tensor's; with its place among grad_fn's outputs
  uint32_t output = 0;
  bool view = false;
  bool overlaps = false;  // a view whose elements share memory
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
};

// A tensor that a node may need again in backward.
class Source {
 public:
  // get() will give `tensor`: through its producer, or because it is saved.
  void keep(const at::Tensor& tensor);
  // As a node keeps its own output. `output` must have that node for its grad_fn.
  void keep_output(const at::Tensor& output);
  // get() will give it if its producer can, or if promote() comes while somebody else still holds it.
  void note(const at::Tensor& tensor);
  void promote();
  at::Tensor promotable() const;  // what promote() would save, if somebody holds it as it was
  LeanNode* linked() const { return link_ && !saved_ ? link_->producer : nullptr; }
  LeanNode* linked_whole() const { return linked() != nullptr && !link_->view ? link_->producer : nullptr; }

  bool available(int depth = 0) const;
  int64_t cost(int depth = 0) const;  // elements written by get()
  at::Tensor get(torch::autograd::Node& owner, bool* fresh = nullptr);
  void forget() { unpacked_.reset(); }  // what a saved-tensor hook has given back
  void release();

 private:
  void save(const at::Tensor& tensor, bool output);

  std::optional<Link> link_;
  std::optional<WeakTensor> noted_;
  uint32_t version_ = 0;
  bool saved_ = false, output_ = false, hooks_ = false;
  torch::autograd::SavedVariable variable_;
  at::Tensor unpacked_;
};

class LeanNode : public torch::autograd::Node {
 public:
  // Whether value() can give the output from now on, by keeping no more, or operands that are no larger.
  bool secure();
  // Called in forward by consumers with this node's output: value() gives it from then on, if need be by
  // keeping it.
  void provide(const at::Tensor& output);
  // Whether it can without keeping more; and the elements that value() writes. `depth`: of the chain so far.
  bool ready(int depth = 0) const;
  int64_t cost(int depth = 0) const;
  bool made(const at::Tensor& output) const;  // whether `output` is this node's, as it was made
  // Whether these saved-tensor hooks were at work when the node was made. Only then may a consumer link to
  // it: what a checkpoint runs again must save what it saved first, and sees other tensors from outside then.
  bool made_under(const Hooks& hooks) const;
  at::Tensor value(bool* fresh = nullptr);
  // relu(value()) in one pass, in memory of its own. Undefined where that is not to be had.
  at::Tensor value_with_relu();

  std::string name() const override { return name_; }
  variable_list apply(variable_list&& grads) final;
  void release_variables() final;
  // Sets this node as the output's grad_fn, or (`in_place`) puts it at the end of what the output was.
  static void attach(const at::Tensor& output, const NodePtr& node, bool in_place = false);
  // Keeps operands alive that are only noted, until the next node of this thread that does not come from this
  // one: a concatenation's parts often have no other owner by the time its consumer asks for them.
  void hold(at::TensorList operands);

 protected:
  explicit LeanNode(const char* name) : name_(name) {}

  // `grad` is defined. One gradient an edge; where an edge does not need one (task_should_compute_output),
  // none.
  virtual variable_list backward(const at::Tensor& grad) = 0;
  // The output again, in memory of its own.
  virtual at::Tensor rebuild() = 0;
  // relu of the output, by an operator that applies it in the same pass.
  virtual at::Tensor rebuild_with_relu() { return {}; }
  // What rebuild() reads, and what backward() reads besides.
  virtual std::vector<Source*> sources() = 0;
  virtual std::vector<Source*> others() { return {}; }
  // Whether operands that are only noted may be saved in the output's place.
  virtual bool may_promote() const { return false; }
  // The output was saved: what backward() can do without now may be released.
  virtual void output_was_saved() {}
  bool has_output() const { return output_saved_; }
  // A gradient of an operator whose slope does not change where it has one: with grad mode on it depends on
  // all that the node has edges to, as stock's does, with derivatives of zero.
  at::Tensor with_flat_slope(const at::Tensor& gradient) const;

 private:
  // What secure() would save. Filled without side effects by plan(), which says whether it suffices.
  struct Plan;
  bool plan(Plan& plan, int depth);

  const char* name_;
  const Backend made_with_ = backend();  // so is the value made again, and the gradient
  bool released_ = false;
  bool known_ = false;  // whether anything may link to the output, which was:
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
  std::optional<WeakTensor> last_;  // the value made last: shared while somebody uses it
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

// Whether a gradient that came to a node is the node's alone, which then may write over it.
inline bool nobody_else_has(const at::Tensor& grad) {
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
