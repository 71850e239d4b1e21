#include "autograd/lean_node.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/settings.h"

namespace patchconv {

using at::Tensor;
using torch::autograd::Node;

namespace {

// A rebuild may write at most this many times the elements of its result. A batch norm, a ReLU and a max pool
// after them take 9, each residual sum some more; past that the tensor is saved.
constexpr int64_t kMostWrites = 10;
// The longest chain of producers, however small the tensors.
constexpr int kDeepest = 16;

const void* storage_of(const Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                              : nullptr;
}

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

const void* address(const Hooks& hooks) {
  return hooks.has_value() ? hooks->ptr(&hooks->pyinterpreter()) : nullptr;
}

// Excluded in a rebuild: its operators must see what they saw in forward, below autocast.
c10::DispatchKeySet autocast_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
}

}  // namespace

Tensor LeanNode::rebuild() { TORCH_INTERNAL_ASSERT(false, name(), ": cannot rebuild its output"); }

bool LeanNode::made(const Tensor& output) const {
  return known_ && !released_ && output._version() == version_ && storage_of(output) == storage_ &&
         output.numel() == numel_;
}

bool LeanNode::ready(int depth) const {
  if (released_ || !known_ || depth > kDeepest) return false;
  if (output_saved_) return true;
  const auto needed = const_cast<LeanNode*>(this)->sources();
  return !needed.empty() && std::all_of(needed.begin(), needed.end(), [&](const Source* source) {
    return source->available(depth + 1);
  }) && cost(depth) <= kMostWrites * numel_;
}

int64_t LeanNode::cost(int depth) const {
  if (output_saved_) return 0;
  int64_t sum = numel_;
  if (depth > kDeepest) return sum;
  for (const Source* source : const_cast<LeanNode*>(this)->sources()) sum += source->cost(depth + 1);
  return sum;
}

struct LeanNode::ToSave {
  std::unordered_map<const LeanNode*, int64_t> writes;  // per node visited; -1: cannot be rebuilt
  std::vector<const LeanNode*> served;                  // the nodes that can be rebuilt
  std::vector<std::pair<LeanNode*, Source*>> promoted;  // operands to be saved, with their nodes
};

bool LeanNode::collect(ToSave& found, int depth) {
  if (released_ || !known_ || depth > kDeepest) return false;
  const auto [entry, is_new] = found.writes.try_emplace(this, -1);
  if (!is_new) return entry->second >= 0;
  if (ready(depth)) {
    found.writes[this] = cost(depth);
    return true;
  }
  const auto needed = sources();
  const size_t promoted = found.promoted.size(), count = found.served.size();
  int64_t writes = numel_;
  const bool served = !needed.empty() && std::all_of(needed.begin(), needed.end(), [&](Source* source) {
    if (source->available(depth + 1)) {
      writes += source->cost(depth + 1);
      return true;
    }
    LeanNode* producer = source->linked();
    if (producer != nullptr && producer->made_under(current_hooks()) && producer->collect(found, depth + 1)) {
      writes += found.writes[producer];
      return true;
    }
    if (!may_promote() || !source->promotable().defined()) return false;
    found.promoted.emplace_back(this, source);
    return true;
  });
  if (!served || writes > kMostWrites * numel_) {
    // The operands collected for this node will not be saved, so nodes that rely on them cannot be rebuilt
    // either.
    found.promoted.resize(promoted);
    for (size_t i = count; i < found.served.size(); ++i) found.writes[found.served[i]] = -1;
    found.served.resize(count);
    return false;
  }
  found.writes[this] = writes;
  found.served.push_back(this);
  return true;
}

bool LeanNode::secure() {
  if (ready()) return true;
  ToSave all;
  if (!collect(all, 0)) return false;
  int64_t bytes = 0;
  std::unordered_set<const void*> counted;
  for (const auto& [node, source] : all.promoted) {
    const Tensor tensor = source->promotable();
    // A slice keeps all that it is a part of.
    const int64_t held = storage_bytes(tensor);
    if (held > bytes_ && held > 2 * bytes_of(tensor)) return false;
    if (counted.insert(storage_of(tensor)).second) bytes += bytes_of(tensor);
  }
  if (bytes > bytes_) return false;
  for (const auto& [node, source] : all.promoted) source->promote();
  for (const auto& [node, source] : all.promoted) node->held_.reset();
  return ready();
}

void LeanNode::provide(const Tensor& output) {
  if (secure()) return;
  output_.keep_output(output);
  output_saved_ = true;
  held_.reset();
  output_was_saved();
}

Tensor LeanNode::value(bool* fresh) {
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (fresh != nullptr) *fresh = false;
  if (output_saved_) return output_.get(*this);
  const bool differentiable = at::GradMode::is_enabled();
  if (differentiable) {
    const at::NoGradGuard no_grad;
    return with_history(value(), this, 0);
  }
  {
    const std::lock_guard<std::mutex> lock(last_mutex_);
    if (last_) {
      if (Tensor last(last_->lock()); last.defined()) return last;
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_keys());
  const SettingsGuard as_before(made_with_.again());
  Tensor result = rebuild();
  TORCH_INTERNAL_ASSERT(result.scalar_type() == dtype_, name(), ": rebuilt in ", result.scalar_type());
  if (result.strides() != at::IntArrayRef(strides_)) {
    // Consumers that keep a view of the output rely on its layout.
    result = at::empty_strided(result.sizes(), strides_, result.options()).copy_(result);
  }
  if (fresh != nullptr) {
    *fresh = true;
  } else {
    const std::lock_guard<std::mutex> lock(last_mutex_);
    last_.emplace(result.getIntrusivePtr());
  }
  return result;
}

Tensor LeanNode::value_with_relu() {
  if (released_ || output_saved_ || at::GradMode::is_enabled()) return {};
  {
    const std::lock_guard<std::mutex> lock(last_mutex_);
    if (last_ && Tensor(last_->lock()).defined()) return {};  // the value exists already
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_keys());
  const SettingsGuard as_before(made_with_.again());
  Tensor result = rebuild_with_relu();
  return result.defined() && result.strides() == at::IntArrayRef(strides_) ? result : Tensor();
}

namespace {

// Zeros for every edge.
struct ZeroBackward final : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override {
    variable_list zeros(num_outputs());
    for (size_t i = 0; i < zeros.size(); ++i) {
      const auto& edge = next_edge(i);
      if (grads[0].defined() && edge.is_valid()) {
        zeros[i] = edge.function->input_metadata(edge.input_nr).zeros_like();
      }
    }
    return zeros;
  }
};

}  // namespace

Tensor LeanNode::with_flat_slope(const Tensor& gradient) const {
  if (!at::GradMode::is_enabled() || gradient.requires_grad()) return gradient;
  const auto node = make_node<ZeroBackward>();
  node->set_next_edges(torch::autograd::edge_list(next_edges()));
  Tensor result = gradient.variable_data();
  torch::autograd::set_history(result, node);
  return result;
}

variable_list LeanNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!grads[0].defined()) return variable_list(num_outputs());
  const SettingsGuard as_before(made_with_.again());
  variable_list result = backward(grads[0]);
  output_.forget();
  held_.reset();
  for (Source* source : sources()) source->forget();
  for (Source* source : others()) source->forget();
  return result;
}

bool LeanNode::made_under(const Hooks& hooks) const { return address(hooks_) == address(hooks); }

void LeanNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  released_ = true;
  hooks_.reset();
  held_.reset();
  output_.release();
  for (Source* source : sources()) source->release();
  for (Source* source : others()) source->release();
}

namespace {

// The operands that are held on this thread, and the node that holds them (an address for comparison only).
struct Held {
  std::weak_ptr<std::vector<Tensor>> operands;
  const Node* node = nullptr;

  ~Held() { drop(); }
  void drop() {
    if (const auto held = operands.lock()) held->clear();
    operands.reset();
    node = nullptr;
  }
};
thread_local Held last_held;

}  // namespace

void LeanNode::hold(at::TensorList operands) {
  last_held.drop();
  held_ = std::make_shared<std::vector<Tensor>>(operands.begin(), operands.end());
  last_held.operands = held_;
  last_held.node = this;
}

void LeanNode::attach(const Tensor& output, const NodePtr& node, bool in_place) {
  auto& lean = static_cast<LeanNode&>(*node);
  if (lean.may_save_output() && last_held.node != nullptr && last_held.node != node.get()) {
    const auto& edges = node->next_edges();
    const bool goes_on = std::any_of(edges.begin(), edges.end(),
                                     [](const auto& edge) { return edge.function.get() == last_held.node; });
    if (goes_on) {
      last_held.node = node.get();
    } else {
      last_held.drop();
    }
  }
  if (in_place) {
    torch::autograd::impl::bump_version(output);
    torch::autograd::impl::rebase_history(output, {node, node->add_input_metadata(output)});
  } else {
    torch::autograd::set_history(output, node);
  }
  if (!lean.may_save_output() || output.is_view() ||
      output.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return;
  }
  lean.known_ = true;
  lean.numel_ = output.numel();
  lean.bytes_ = bytes_of(output);
  lean.dtype_ = output.scalar_type();
  lean.version_ = output._version();
  lean.storage_ = storage_of(output);
  lean.strides_ = output.strides().vec();
  lean.hooks_ = current_hooks();
}

}  // namespace patchconv
