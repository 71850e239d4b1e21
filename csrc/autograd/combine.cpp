// Cheap operators that save nothing, or what stock saves, and whose output can be rebuilt from their
// operands: concatenation, sums, products, gated halves, and the casts of autocast.
//
// Operands are not kept alive for that. An operand comes from its own producer, or is saved when a consumer
// asks for the output and the operand still exists. A densely connected network then keeps each feature map
// once, not once per layer that reads it.
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/glu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>

#include "autograd/activation.h"
#include "core/settings.h"
#include "ops/combine.h"
#include "ops/handle.h"
#include "ops/optional.h"

namespace patchconv {

using at::Scalar;
using at::Tensor;

namespace {

class CatBackward final : public LeanNode {
 public:
  CatBackward() : LeanNode("patchconv::CatBackward") {}
  std::vector<Source> parts;
  std::vector<c10::SymInt> lengths;
  int64_t dim = 0;

 protected:
  variable_list backward(const Tensor& grad) override {
    variable_list grads;
    c10::SymInt start = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (task_should_compute_output(i)) {
        grads.push_back(grad.narrow_symint(dim, start, lengths[i]));
      } else {
        grads.emplace_back();
      }
      start += lengths[i];
    }
    return grads;
  }
  Tensor rebuild() override {
    std::vector<Tensor> values;
    for (Source& part : parts) values.push_back(part.get(*this));
    return at::cat(values, dim);
  }
  std::vector<Source*> sources() override {
    std::vector<Source*> all;
    for (Source& part : parts) all.push_back(&part);
    return all;
  }
  bool may_promote() const override { return true; }
};

Tensor cat(at::TensorList tensors, int64_t dim) {
  const auto plain = [&](const Tensor& tensor) {
    return served(tensor) && !has_tangent(tensor) && tensor.scalar_type() == tensors[0].scalar_type() &&
           tensor.dim() == tensors[0].dim() && tensor.dim() > 0;
  };
  if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), plain) || !needs_node(tensors)) {
    return at::cat(tensors, dim);
  }
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::cat(tensors, dim);
  }
  const auto node = make_node<CatBackward>(tensors);
  node->dim = at::maybe_wrap_dim(dim, tensors[0].dim());
  node->parts.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    node->parts[i].note(tensors[i]);
    node->lengths.push_back(tensors[i].sym_size(node->dim));
  }
  if (recompute()) node->hold(tensors);
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

// Sums and products of two tensors of the same dtype and device, broadcast to each other.
bool use_combine_node(const Tensor& a, const Tensor& b) {
  return needs_node(a, b) && served(a) && served(b) && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && !has_tangent(a) && !has_tangent(b);
}

class AddBackward final : public LeanNode {
 public:
  AddBackward() : LeanNode("patchconv::AddBackward") {}
  Source a, b;
  std::vector<c10::SymInt> a_sizes, b_sizes;
  Scalar alpha = 1;

 protected:
  variable_list backward(const Tensor& grad) override {
    variable_list grads(2);
    if (task_should_compute_output(0)) grads[0] = at::sum_to(grad, a_sizes);
    if (task_should_compute_output(1)) {
      const Tensor scaled = alpha.equal(1) ? grad : grad.mul(alpha);
      grads[1] = at::sum_to(scaled, b_sizes);
    }
    return grads;
  }
  Tensor rebuild() override {
    bool fresh = false;
    Tensor x = a.get(*this, &fresh);
    const Tensor y = b.get(*this);
    return fresh && a_sizes == sizes ? x.add_(y, alpha) : x.add(y, alpha);
  }
  std::vector<Source*> sources() override { return {&a, &b}; }
  bool may_promote() const override { return true; }

 public:
  std::vector<c10::SymInt> sizes;
};

auto add_node(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  auto node = make_node<AddBackward>(a, b);
  node->a.note(a);
  node->b.note(b);
  node->a_sizes = a.sym_sizes().vec();
  node->b_sizes = b.sym_sizes().vec();
  node->alpha = alpha;
  return node;
}

Tensor add(const Tensor& a, const Tensor& b, const Scalar& alpha) {
  if (!use_combine_node(a, b)) return at::add(a, b, alpha);
  const auto node = add_node(a, b, alpha);
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::add(a, b, alpha);
  }
  node->sizes = y.sym_sizes().vec();
  LeanNode::attach(y, node);
  return y;
}

Tensor& add_(Tensor& a, const Tensor& b, const Scalar& alpha) {
  if (!use_combine_node(a, b) || a.is_view()) return a.add_(b, alpha);
  torch::autograd::check_inplace(a, /*requires_grad=*/true);
  const auto node = add_node(a, b, alpha);
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    a.add_(b, alpha);
  }
  node->sizes = a.sym_sizes().vec();
  LeanNode::attach(a, node, /*in_place=*/true);
  return a;
}

// relu(a + b), for tensors of one shape. Saves one bit per element; the sum is not kept.
class AddReluBackward final : public LeanNode {
 public:
  AddReluBackward() : LeanNode("patchconv::AddReluBackward") {}
  Source a, b, bits;
  std::vector<c10::SymInt> strides;

 protected:
  variable_list backward(const Tensor& grad) override {
    const Tensor g = with_flat_slope(mask_backward(in_layout(grad, strides), bits.get(*this), 1, 0));
    return {g, g};
  }
  Tensor rebuild() override {
    bool fresh = false;
    Tensor x = a.get(*this, &fresh);
    const Tensor y = b.get(*this);
    return (fresh ? x.add_(y) : x.add(y)).relu_();
  }
  std::vector<Source*> sources() override { return {&a, &b}; }
  std::vector<Source*> others() override { return {&bits}; }
  bool may_promote() const override { return true; }
};

Tensor add_relu(const Tensor& a, const Tensor& b) {
  if (!use_combine_node(a, b) || a.sym_sizes() != b.sym_sizes()) {
    static const auto sum = handle<Tensor(const Tensor&, const Tensor&, const Scalar&)>("add");
    static const auto relu = handle<Tensor(const Tensor&)>("relu");
    return relu.call(sum.call(a, b, 1));
  }
  const auto node = make_node<AddReluBackward>(a, b);
  node->a.note(a);
  node->b.note(b);
  Tensor y, bits;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op =
        handle<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&)>("_add_mask_forward");
    std::tie(y, bits) = op.call(a, b);
  }
  node->bits.keep(bits);
  node->strides = y.sym_strides().vec();
  LeanNode::attach(y, node);
  return y;
}

class MulBackward final : public LeanNode {
 public:
  MulBackward() : LeanNode("patchconv::MulBackward") {}
  Source a, b;
  std::vector<c10::SymInt> a_sizes, b_sizes;

 protected:
  variable_list backward(const Tensor& grad) override {
    variable_list grads(2);
    if (task_should_compute_output(0)) grads[0] = at::sum_to(grad.mul(b.get(*this)), a_sizes);
    if (task_should_compute_output(1)) grads[1] = at::sum_to(grad.mul(a.get(*this)), b_sizes);
    return grads;
  }
  Tensor rebuild() override { return a.get(*this).mul(b.get(*this)); }
  std::vector<Source*> sources() override { return {&a, &b}; }
  bool may_promote() const override { return true; }
};

Tensor mul(const Tensor& a, const Tensor& b) {
  if (!use_combine_node(a, b)) return at::mul(a, b);
  const auto node = make_node<MulBackward>(a, b);
  auto take = [](Source& source, const Tensor& tensor, bool needed) {
    if (needed) {
      source.keep(tensor);
    } else {
      source.note(tensor);
    }
  };
  take(node->a, a, b.requires_grad());
  take(node->b, b, a.requires_grad());
  node->a_sizes = a.sym_sizes().vec();
  node->b_sizes = b.sym_sizes().vec();
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::mul(a, b);
  }
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

// Below autograd, so that a kernel of this library computes it where there is one; with grad mode on, with
// history.
Tensor call_glu(const Tensor& x, int64_t dim) {
  static const auto op = handle<Tensor(const Tensor&, int64_t)>("glu");
  if (needs_node(x)) return op.call(x, dim);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, dim);
}

// Saves its input, as stock does; its output, half as large, is made again from it.
class GluBackward final : public LeanNode {
 public:
  GluBackward() : LeanNode("patchconv::GluBackward") {}
  Source input;
  int64_t dim = -1;

 protected:
  variable_list backward(const Tensor& grad) override {
    return {at::glu_backward(grad, input.get(*this), dim)};
  }
  Tensor rebuild() override { return call_glu(input.get(*this), dim); }
  std::vector<Source*> sources() override { return {&input}; }
};

Tensor glu(const Tensor& x, int64_t dim) {
  if (!use_lean_node(x)) return needs_node(x) || has_tangent(x) ? at::glu(x, dim) : call_glu(x, dim);
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = handle<Tensor(const Tensor&, int64_t)>("glu");
    y = op.call(x, dim);
  }
  const auto node = make_node<GluBackward>(x);
  node->input.keep(x);
  node->dim = dim;
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

class CastBackward final : public LeanNode {
 public:
  CastBackward() : LeanNode("patchconv::CastBackward") {}
  Source input;
  at::ScalarType from = at::kFloat, to = at::kFloat;

 protected:
  variable_list backward(const Tensor& grad) override { return {grad.to(from)}; }
  Tensor rebuild() override { return input.get(*this).to(to); }
  std::vector<Source*> sources() override { return {&input}; }
  bool may_promote() const override { return true; }
};

Tensor cast_autograd(const Tensor& x, at::ScalarType dtype) {
  const bool real =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  if (x.scalar_type() == dtype || !needs_node(x) || !served(x) || !real || has_tangent(x)) return x.to(dtype);
  const auto node = make_node<CastBackward>(x);
  node->input.note(x);
  node->from = x.scalar_type();
  node->to = dtype;
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = x.to(dtype);
  }
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

// Saves what stock's linear saves, but its input may come from a producer.
class LinearBackward final : public LeanNode {
 public:
  LinearBackward() : LeanNode("patchconv::LinearBackward") {}
  Source input, weight;
  std::vector<c10::SymInt> input_size;
  bool has_bias = false;

 protected:
  variable_list backward(const Tensor& grad) override {
    variable_list grads(has_bias ? 3 : 2);
    if (task_should_compute_output(0)) grads[0] = grad.matmul(weight.get(*this));
    const Tensor rows = grad.reshape_symint({-1, grad.sym_size(-1)});
    if (task_should_compute_output(1)) {
      grads[1] = rows.t().mm(input.get(*this).reshape_symint({-1, input_size.back()}));
    }
    if (has_bias && task_should_compute_output(2)) grads[2] = rows.sum(0);
    return grads;
  }
  Tensor rebuild() override { TORCH_INTERNAL_ASSERT(false, "not cheap: its output is saved"); }
  std::vector<Source*> sources() override { return {}; }
  std::vector<Source*> others() override { return {&input, &weight}; }
};

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const bool has_bias = given(bias);
  auto fits = [&](const Tensor& tensor) { return served(tensor) && tensor.scalar_type() == x.scalar_type(); };
  if (!needs_node(x, weight, bias) || !served(x) || !fits(weight) || (has_bias && !fits(*bias)) ||
      x.dim() < 2 || weight.dim() != 2 || x.size(-1) != weight.size(1) || x.numel() == 0 ||
      weight.numel() == 0 || has_tangent(x) || has_tangent(weight) || has_tangent(bias)) {
    return at::linear(x, weight, bias);
  }
  std::vector<Tensor> edges{x, weight};
  if (has_bias) edges.push_back(*bias);
  const auto node = make_node<LinearBackward>(edges);
  if (weight.requires_grad()) node->input.keep(x);
  if (x.requires_grad()) node->weight.keep(weight);
  node->input_size = x.sym_sizes().vec();
  node->has_bias = has_bias;
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::linear(x, weight, bias);
  }
  LeanNode::attach(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("cat", &cat);
  m.impl("add", &add);
  m.impl("add_", &add_);
  m.impl("add_relu", &add_relu);
  m.impl("mul", &mul);
  m.impl("glu", &glu);
  m.impl("cast", &cast_autograd);
  m.impl("linear", &linear);
}

}  // namespace

}  // namespace patchconv
