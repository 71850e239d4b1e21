#include "autograd/lean_node.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/settings.h"

namespace patchconv {

using at::Tensor;
using torch::autograd::Node;

namespace {

// A value may take the writing of this many times its own elements. A batch norm, a ReLU and the max pool
// behind them take 9, residual sums some more each; past it the tensor is saved.
constexpr int64_t kMostWrites = 10;

const void* storage_of(const Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                              : nullptr;
}

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Which saved-tensor hooks are at work: an address to compare with.
const void* current_hooks() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return nullptr;
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/false);
  return hooks.has_value() ? hooks->first.ptr(&hooks->first.pyinterpreter()) : nullptr;
}

// The rebuilding operators must see what the forward ones saw below autocast.
c10::DispatchKeySet autocast_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
}

}  // namespace

std::optional<Link> Link::find(const Tensor& tensor, bool sure) {
  if (!recompute() || !tensor.requires_grad() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return std::nullopt;
  }
  Tensor made = tensor;
  Link link;
  if (tensor.is_view()) {
    const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
    if (meta == nullptr || !meta->has_bw_view()) return std::nullopt;
    made = meta->get_backward_view().base_;
    if (made.scalar_type() != tensor.scalar_type() || made.layout() != at::kStrided ||
        tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) {
      return std::nullopt;
    }
    link.view = true;
    link.sizes = tensor.sizes().vec();
    link.strides = tensor.strides().vec();
    link.offset = tensor.storage_offset() - made.storage_offset();
  }
  link.producer = dynamic_cast<LeanNode*>(made.grad_fn().get());
  if (link.producer == nullptr || !link.producer->made(made)) return std::nullopt;
  if (!link.producer->made_under(current_hooks())) {
    if (!link.producer->ready_for_others()) return std::nullopt;
  } else if (sure) {
    link.producer->provide(made);
  }
  return link;
}

Tensor Link::value(bool* fresh) const {
  const Tensor whole = producer->value(fresh);
  return view ? whole.as_strided(sizes, strides, whole.storage_offset() + offset) : whole;
}

void Source::keep(const Tensor& tensor) {
  if (!tensor.defined()) return;
  link_ = Link::find(tensor);
  if (!link_) save(tensor, /*output=*/false);
}

void Source::keep_output(const Tensor& output) { save(output, /*output=*/true); }

void Source::save(const Tensor& tensor, bool output) {
  hooks_ = current_hooks() != nullptr;
  variable_ = torch::autograd::SavedVariable(tensor, output);
  saved_ = true;
  output_ = output;
}

void Source::note(const Tensor& tensor) {
  if (!recompute() || !tensor.defined()) return;
  link_ = Link::find(tensor, /*sure=*/false);
  if (tensor.is_inference()) return;
  noted_.emplace(tensor.getIntrusivePtr());
  version_ = tensor._version();
}

bool Source::can_promote() const {
  if (available()) return true;
  if (!noted_) return false;
  const Tensor tensor(noted_->lock());
  return tensor.defined() && tensor._version() == version_;
}

void Source::promote() {
  if (!available()) keep(Tensor(noted_->lock()));
}

bool Source::secure() {
  return available() || (link_ && link_->producer->made_under(current_hooks()) && link_->producer->secure());
}

bool Source::available() const { return saved_ || (link_ && link_->producer->ready()); }

int64_t Source::cost() const { return link_ && !saved_ ? link_->producer->cost() : 0; }

int64_t Source::saved_bytes() const {
  if (available() || !noted_) return 0;
  const Tensor tensor(noted_->lock());
  return tensor.defined() ? bytes_of(tensor) : 0;
}

Tensor Source::get(Node& owner, bool* fresh) {
  if (link_ && !saved_) return link_->value(fresh);
  if (fresh != nullptr) *fresh = false;
  Tensor tensor = unpacked_;
  if (!tensor.defined()) {
    tensor = variable_.unpack(output_ ? owner.getptr() : NodePtr());
    if (hooks_ && torch::autograd::get_current_graph_task_id() != -1) {
      // Hooks may be costly, and those of checkpointing give a tensor out once a pass only.
      unpacked_ = tensor;
      torch::autograd::Engine::get_default_engine().queue_callback(
          [this, alive = owner.getptr()] { forget(); });
    }
  }
  return tensor;
}

void Source::release() {
  variable_.reset_data();
  unpacked_.reset();
  noted_.reset();
}

bool LeanNode::made(const Tensor& output) const {
  return known_ && output._version() == version_ && storage_of(output) == storage_ &&
         output.numel() == numel_;
}

bool LeanNode::ready() const {
  if (released_ || !known_) return false;
  if (output_saved_) return true;
  const auto needed = const_cast<LeanNode*>(this)->sources();
  return !needed.empty() && std::all_of(needed.begin(), needed.end(), [](const Source* source) {
    return source->available();
  }) && cost() <= kMostWrites * numel_;
}

int64_t LeanNode::cost() const {
  if (output_saved_) return 0;
  int64_t sum = numel_;
  for (const Source* source : const_cast<LeanNode*>(this)->sources()) sum += source->cost();
  return sum;
}

bool LeanNode::secure() {
  if (released_ || !known_) return false;
  if (ready()) return true;
  const auto needed = sources();
  for (Source* source : needed) source->secure();
  if (ready()) return true;
  if (!may_promote()) return false;
  int64_t bytes = 0, writes = numel_;
  for (const Source* source : needed) {
    if (!source->can_promote()) return false;
    bytes += source->saved_bytes();
    if (source->available()) writes += source->cost();
  }
  if (bytes > bytes_ || writes > kMostWrites * numel_) return false;
  for (Source* source : needed) source->promote();
  return true;
}

void LeanNode::provide(const Tensor& output) {
  if (secure()) return;
  output_.keep_output(output);
  output_saved_ = true;
  output_was_saved();
}

Tensor LeanNode::value(bool* fresh) {
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (fresh != nullptr) *fresh = false;
  if (output_saved_) return output_.get(*this);
  const bool differentiable = at::GradMode::is_enabled();
  if (!differentiable) {
    const std::lock_guard<std::mutex> lock(last_mutex_);
    if (last_) {
      if (Tensor last(last_->lock()); last.defined()) return last;
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_keys());
  Tensor result = rebuild();
  if (result.strides() != at::IntArrayRef(strides_)) {
    // Consumers that keep a view of the output rely on its layout.
    result = at::empty_strided(result.sizes(), strides_, result.options()).copy_(result);
  }
  if (differentiable) return result;
  if (fresh != nullptr) {
    *fresh = true;
  } else {
    const std::lock_guard<std::mutex> lock(last_mutex_);
    last_.emplace(result.getIntrusivePtr());
  }
  return result;
}

variable_list LeanNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!grads[0].defined()) return variable_list(num_outputs());
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  variable_list result = backward(grads[0]);
  output_.forget();
  held_.reset();
  for (Source* source : sources()) source->forget();
  for (Source* source : others()) source->forget();
  return result;
}

void LeanNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  released_ = true;
  held_.reset();
  output_.release();
  for (Source* source : sources()) source->release();
  for (Source* source : others()) source->release();
}

namespace {

// What is held on this thread, and for which node: an address to compare with.
struct Held {
  std::weak_ptr<std::vector<Tensor>> operands;
  const Node* node = nullptr;

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
  if (last_held.node != nullptr && last_held.node != node.get()) {
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
  if (output.is_view() || output.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  lean.known_ = true;
  lean.numel_ = output.numel();
  lean.bytes_ = bytes_of(output);
  lean.version_ = output._version();
  lean.storage_ = storage_of(output);
  lean.strides_ = output.strides().vec();
  lean.hooks_ = current_hooks();
  lean.born_ready_ = lean.ready();
}

}  // namespace patchconv
