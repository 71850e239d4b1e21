// Gradients of the piecewise linear activations (ops/activation_masked.h) and of PReLU.
//
// They save one bit per element, or their output instead of the bits if it is saved anyway and shows the
// same. The slope of a PReLU is a parameter: its gradient needs the input.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_prelu_kernel.h>
#include <ATen/ops/_prelu_kernel_backward.h>
#include <ATen/ops/prelu.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "autograd/activation.h"
#include "ops/activation_masked.h"

namespace patchconv {

using at::Scalar;
using at::Tensor;

namespace {

struct MaskSelect : torch::autograd::Function<MaskSelect> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& grad, const Tensor& bits,
                        double inside, double outside) {
    ctx->save_for_backward({bits});
    ctx->saved_data["factors"] = std::vector<double>{inside, outside};
    ctx->saved_data["strides"] = grad.sym_strides();
    const at::AutoDispatchBelowADInplaceOrView guard;
    return mask_backward(grad, bits, inside, outside);
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const auto factors = ctx->saved_data["factors"].toDoubleVector();
    const Tensor grad = in_layout(grads[0], ctx->saved_data["strides"].toSymIntVector());
    return {mask_backward(grad, ctx->get_saved_variables()[0], factors[0], factors[1]), {}, {}, {}};
  }
};

Tensor mask_backward_autograd(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  if (needs_node(grad)) return MaskSelect::apply(grad, bits, inside, outside);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return mask_backward(grad, bits, inside, outside);
}

template <typename Row>
class MaskedBackward final : public ActivationNode {
 public:
  MaskedBackward() : ActivationNode(Row::kNode) {}

  double a = 0, b = 0;
  Source bits;
  std::vector<c10::SymInt> strides;

 protected:
  variable_list backward(const Tensor& grad) override {
    if (has_output() && Row::output_tells(a, b)) return {Row::from_output(grad, value(), a, b)};
    return {with_flat_slope(mask_backward(in_layout(grad, strides), bits.get(*this), Row::slope_inside(),
                                          Row::slope_outside(a)))};
  }
  void output_was_saved() override {
    if (Row::output_tells(a, b)) bits.release();
  }
  std::vector<Source*> others() override { return {&bits}; }

  Tensor rebuild() override {
    if (LeanNode* producer = input.linked_whole(); producer != nullptr && Row::kMask == Mask::kRelu) {
      if (Tensor y = producer->value_with_relu(); y.defined()) return y;
    }
    return ActivationNode::rebuild();
  }
  Tensor apply_to(const Tensor& x) override { return Row::value(x, a, b); }
  void apply_to_(Tensor& x) override { masked::write_over<Row>(x, a, b); }
};

template <typename Row>
auto masked_node(const Tensor& x, const Scalar& a, const Scalar& b) {
  auto node = make_node<MaskedBackward<Row>>(x);
  node->a = a.toDouble();
  node->b = b.toDouble();
  node->input.note(x);
  return node;
}

template <typename Row>
Tensor masked_activation(const Tensor& x, const Scalar& a, const Scalar& b) {
  if (!use_lean_node(x)) return Row::value(x, a, b);
  const auto node = masked_node<Row>(x, a, b);
  Tensor y, bits;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (x.is_non_overlapping_and_dense()) {
      std::tie(y, bits) = mask_forward(x, Row::kMask, node->a, node->b);
    } else {
      y = Row::value(x, a, b);
      bits = mask_pack(in_layout(x, y.sym_strides()), Row::kMask, node->a, node->b);
    }
  }
  node->bits.keep(bits);
  node->strides = y.sym_strides().vec();
  LeanNode::attach(y, node);
  return y;
}

template <typename Row>
Tensor& masked_activation_(Tensor& x, const Scalar& a, const Scalar& b) {
  if (!use_lean_node(x) || x.is_view() || !x.is_non_overlapping_and_dense()) return Row::value_(x, a, b);
  torch::autograd::check_inplace(x, /*requires_grad=*/true);
  const auto node = masked_node<Row>(x, a, b);
  node->strides = x.sym_strides().vec();
  Tensor bits;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    bits = mask_forward_(x, Row::kMask, node->a, node->b);
  }
  node->bits.keep(bits);
  LeanNode::attach(x, node, /*in_place=*/true);
  return x;
}

// ---------------------------------------------------------------------------------------------------------
// PReLU: the slope is a parameter, so its gradient needs the input; a frozen slope needs only the mask

class PReluBackward final : public LeanNode {
 public:
  PReluBackward() : LeanNode("patchconv::PReluBackward") {}
  Source input, bits, weight;
  std::vector<c10::SymInt> strides;

 protected:
  variable_list backward(const Tensor& grad) override {
    const Tensor w = weight.get(*this);
    if (input.available() && !bits.available()) {
      auto [grad_input, grad_weight] = at::_prelu_kernel_backward(grad, input.get(*this), w);
      return {grad_input, grad_weight};
    }
    const Tensor g = in_layout(grad, strides);
    const Tensor mask = bits.get(*this);
    return {mask_backward(g, mask, 1, 0).add(mask_backward(g.mul(w), mask, 0, 1)), Tensor()};
  }
  Tensor rebuild() override { return at::_prelu_kernel(input.get(*this), weight.get(*this)); }
  std::vector<Source*> sources() override { return {&input, &weight}; }
  std::vector<Source*> others() override { return {&bits}; }
};

// The weight is given a shape that broadcasts against x, as in stock's prelu.
Tensor prelu(const Tensor& x, const Tensor& parameter) {
  const auto fits = [&] {
    const int64_t channels = x.dim() >= 2 ? x.size(1) : 1;
    return parameter.dim() <= 1 && (parameter.numel() == 1 || parameter.numel() == channels);
  };
  if (!needs_node(x, parameter) || !served(x) || !served(parameter) ||
      x.scalar_type() != parameter.scalar_type() || !fits() || has_tangent(x) || has_tangent(parameter)) {
    return at::prelu(x, parameter);
  }
  std::vector<int64_t> shape(std::max<int64_t>(x.dim(), 1), 1);
  if (x.dim() >= 2) shape[1] = parameter.numel();
  const Tensor weight = x.dim() == 0 ? parameter.squeeze() : parameter.reshape(shape);
  const auto node = make_node<PReluBackward>(x, weight);
  node->weight.keep(weight);
  Tensor y, mask;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::_prelu_kernel(x, weight);
    if (!weight.requires_grad()) mask = mask_pack(in_layout(x, y.sym_strides()), Mask::kLeakyRelu, 0, 0);
  }
  node->strides = y.sym_strides().vec();
  if (weight.requires_grad()) {
    node->input.keep(x);
  } else {
    node->input.note(x);
    node->bits.keep(mask);
  }
  LeanNode::attach(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("_mask_backward", &mask_backward_autograd);
  masked::for_each_row([&]<typename Row>(Row) {
    masked::register_row<Row, masked_activation<Row>>(m);
    if constexpr (masked::has_in_place<Row>) masked::register_row_in_place<Row, masked_activation_<Row>>(m);
  });
  m.impl("prelu", &prelu);
}

}  // namespace

}  // namespace patchconv
