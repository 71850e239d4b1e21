// What a node keeps of a tensor: the tensor, or a link to the LeanNode that can make it again (lean_node.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace patchconv {

// A shared_ptr before torch 2.13, an intrusive_ptr since.
using NodePtr = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

class LeanNode;

// The saved-tensor hooks that were active at some time, identified by the first of the pair, which is kept
// alive for that.
using Hooks = std::optional<c10::SafePyObject>;
Hooks current_hooks();

// A link to a tensor that a LeanNode can rebuild: the node's output, or a view of it. It does not keep the
// node alive: the consumer's edge does, since the tensor has a gradient.
struct Link {
  // A link whose value() is `tensor`, or nothing if no LeanNode produced it. With `provide`, the producer
  // provides the value from now on (LeanNode::provide).
  static std::optional<Link> find(const at::Tensor& tensor, bool provide = true);
  // Rebuilds the tensor. `fresh`, if given, is set to whether only the caller holds it and may write to it.
  at::Tensor value(bool* fresh = nullptr) const;

  LeanNode* producer = nullptr;
  torch::autograd::Node* grad_fn = nullptr;  // of the tensor
  uint32_t output = 0;                       // the tensor's number among the outputs of grad_fn
  bool view = false;
  bool overlaps = false;  // a view whose elements share memory
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
};

// A tensor that a node may need again in backward.
class Source {
 public:
  // get() will return `tensor`, through its producer or because it is saved.
  void keep(const at::Tensor& tensor);
  // Saves a node's own output. The node must be the grad_fn of `output`.
  void keep_output(const at::Tensor& output);
  // Saves nothing. get() will return the tensor if its producer can rebuild it, or after a promote() while it
  // still existed.
  void note(const at::Tensor& tensor);
  void promote();
  at::Tensor promotable() const;  // what promote() would save; undefined if it is gone or was modified
  LeanNode* linked() const { return link_ && !saved_ ? link_->producer : nullptr; }
  LeanNode* linked_whole() const { return linked() != nullptr && !link_->view ? link_->producer : nullptr; }

  bool available(int depth = 0) const;
  int64_t cost(int depth = 0) const;  // elements written by get()
  at::Tensor get(torch::autograd::Node& owner, bool* fresh = nullptr);
  void forget() { unpacked_.reset(); }  // drops what a saved-tensor hook returned
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

// Bytes of all memory behind a tensor; -1 if there is none, or its size is not known.
int64_t storage_bytes(const at::Tensor& tensor);
// `made` with the history of the tensor that it replaces.
at::Tensor with_history(const at::Tensor& made, torch::autograd::Node* grad_fn, uint32_t output);

}  // namespace patchconv
