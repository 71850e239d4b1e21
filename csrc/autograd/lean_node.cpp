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

// Of all memory behind a tensor; -1 if there is none, or its size is not known.
int64_t storage_bytes(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().sym_nbytes().maybe_as_int().value_or(-1)
                                                  : -1;
}

// The saved-tensor hooks that are active now.
Hooks current_hooks() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return std::nullopt;
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/false);
  return hooks.has_value() ? Hooks(hooks->first) : std::nullopt;
}

const void* address(const Hooks& hooks) {
  return hooks.has_value() ? hooks->ptr(&hooks->pyinterpreter()) : nullptr;
}

// Excluded in a rebuild: its operators must see what they saw in forward, below autocast.
c10::DispatchKeySet autocast_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
}

// Whether the edges of `from` lead to `to`: then an edge to `from` keeps `to` alive.
bool leads_to(Node* from, const Node* to) {
  constexpr size_t kMost = 64;
  std::vector<Node*> seen{from};
  for (size_t i = 0; i < seen.size() && seen.size() < kMost; ++i) {
    if (seen[i] == to) return true;
    for (const auto& edge : seen[i]->next_edges()) {
      Node* next = edge.function.get();
      if (next != nullptr && std::find(seen.begin(), seen.end(), next) == seen.end()) seen.push_back(next);
    }
  }
  return std::find(seen.begin(), seen.end(), to) != seen.end();
}

// `made` with the history of the tensor that it replaces.
Tensor with_history(const Tensor& made, Node* grad_fn, uint32_t output) {
  Tensor result = made.variable_data();
  torch::autograd::impl::set_gradient_edge(result, {grad_fn->getptr(), output});
  return result;
}

}  // namespace

std::optional<Link> Link::find(const Tensor& tensor, bool provide) {
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
    link.overlaps = !tensor.is_non_overlapping_and_dense();
  }
  link.producer = dynamic_cast<LeanNode*>(made.grad_fn().get());
  if (link.producer == nullptr || !link.producer->made(made)) return std::nullopt;
  link.grad_fn = tensor.grad_fn().get();
  link.output = tensor.output_nr();
  if (link.grad_fn == nullptr || !leads_to(link.grad_fn, link.producer)) return std::nullopt;
  if (!link.producer->made_under(current_hooks())) return std::nullopt;
  if (provide) link.producer->provide(made);
  return link;
}

Tensor Link::value(bool* fresh) const {
  const Tensor whole = producer->value(fresh);
  if (!view) return whole;
  if (fresh != nullptr && overlaps) *fresh = false;
  const bool differentiable = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  const Tensor part = whole.as_strided(sizes, strides, whole.storage_offset() + offset);
  return differentiable ? with_history(part, grad_fn, output) : part;
}

void Source::keep(const Tensor& tensor) {
  if (!tensor.defined()) return;
  link_ = Link::find(tensor);
  if (!link_) save(tensor, /*output=*/false);
}

void Source::keep_output(const Tensor& output) { save(output, /*output=*/true); }

void Source::save(const Tensor& tensor, bool output) {
  hooks_ = current_hooks().has_value();
  variable_ = torch::autograd::SavedVariable(tensor, output);
  saved_ = true;
  output_ = output;
}

void Source::note(const Tensor& tensor) {
  if (!recompute() || !tensor.defined()) return;
  link_ = Link::find(tensor, /*provide=*/false);
  if (tensor.is_inference()) return;
  noted_.emplace(tensor.getIntrusivePtr());
  version_ = tensor._version();
}

Tensor Source::promotable() const {
  if (!noted_) return Tensor();
  Tensor tensor(noted_->lock());
  return tensor.defined() && tensor._version() == version_ ? tensor : Tensor();
}

void Source::promote() {
  if (!available()) keep(Tensor(noted_->lock()));
}

bool Source::available(int depth) const { return saved_ || (link_ && link_->producer->ready(depth)); }

int64_t Source::cost(int depth) const { return link_ && !saved_ ? link_->producer->cost(depth) : 0; }

Tensor Source::get(Node& owner, bool* fresh) {
  if (link_ && !saved_) return link_->value(fresh);
  if (fresh != nullptr) *fresh = false;
  if (unpacked_.defined()) return output_ ? with_history(unpacked_, &owner, 0) : unpacked_;
  Tensor tensor = variable_.unpack(output_ ? owner.getptr() : NodePtr());
  TORCH_CHECK(storage_bytes(tensor) != 0 || tensor.numel() == 0, owner.name(),
              ": expected what values are made again from to be there, got memory that "
              "was freed since the forward pass, as FSDP does with parameters: run it in "
              "patchconv_native.recompute(False)");
  if (tensor.defined() && hooks_ && torch::autograd::get_current_graph_task_id() != -1) {
    // Hooks may be slow, and those of checkpointing return a tensor only once per pass, so it is kept until
    // the pass ends. An output is kept without its history, which leads to this node.
    unpacked_ = output_ ? tensor.variable_data() : tensor;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this, alive = owner.getptr()] { forget(); });
  }
  return tensor;
}

void Source::release() {
  variable_.reset_data();
  unpacked_.reset();
  noted_.reset();
}

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
