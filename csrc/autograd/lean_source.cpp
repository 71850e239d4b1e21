#include "autograd/lean_source.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "autograd/lean_node.h"
#include "core/settings.h"

namespace patchconv {

using at::Tensor;
using torch::autograd::Node;

namespace {

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

}  // namespace

int64_t storage_bytes(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().sym_nbytes().maybe_as_int().value_or(-1)
                                                  : -1;
}

Hooks current_hooks() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return std::nullopt;
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/false);
  return hooks.has_value() ? Hooks(hooks->first) : std::nullopt;
}

Tensor with_history(const Tensor& made, Node* grad_fn, uint32_t output) {
  Tensor result = made.variable_data();
  torch::autograd::impl::set_gradient_edge(result, {grad_fn->getptr(), output});
  return result;
}

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

}  // namespace patchconv
