// Gradients of conv2d_fused.
//
// A convolution with ReLU saves what a convolution saves, and one bit per element; or its output instead of
// the bits, if that is saved anyway. Its backward operator unpacks the bits as it reads the gradient. Without
// ReLU, or with a scale, the operator is composed of its parts, which save what they need.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/library.h>

#include <string>

#include "autograd/activation.h"
#include "ops/conv_fused.h"

namespace patchconv {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Tensor;

namespace {

class ConvReluBackward final : public LeanNode {
 public:
  ConvReluBackward() : LeanNode("patchconv::ConvReluBackward") {}

  Source input, weight, bits;
  OwnedSpec spec;
  std::vector<c10::SymInt> input_size, weight_size, strides;

 protected:
  variable_list backward(const Tensor& grad) override {
    const std::array<bool, 3> want = {task_should_compute_output(0), task_should_compute_output(1),
                                      task_should_compute_output(2)};
    const auto x = if_defined(want[1] ? input.get(*this) : Tensor());
    const auto w = if_defined(want[0] ? weight.get(*this) : Tensor());
    const bool recorded = at::GradMode::is_enabled();
    variable_list grads(4);
    if (!recorded && !has_output() && !task_should_compute_output(3)) {
      std::tie(grads[0], grads[1], grads[2]) = call_conv_masked_backward(
          spec.get(), in_layout(grad, strides), bits.get(*this), x, w, input_size, weight_size, want);
      return grads;
    }
    Tensor inside = has_output() ? at::threshold_backward(grad, value(), 0)
                                 : mask_backward(in_layout(grad, strides), bits.get(*this), 1, 0);
    if (recorded) inside = with_flat_slope(inside);
    if (want[0] || want[1] || want[2]) {
      std::tie(grads[0], grads[1], grads[2]) =
          call_conv_backward(spec.get(), inside, x, w, input_size, weight_size, want);
    }
    if (task_should_compute_output(3)) grads[3] = inside;
    return grads;
  }
  // Too expensive to rebuild: consumers that need the output have it saved.
  std::vector<Source*> others() override { return {&input, &weight, &bits}; }
  void output_was_saved() override { bits.release(); }
};

Tensor conv2d_fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
                    IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptionalTensor& scale,
                    const OptionalTensor& residual, bool relu, std::string_view padding_mode,
                    OptionalIntArrayRef splits) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  const FusedParts parts{scale, residual, relu};
  const Tensor b = or_none(bias), factor = or_none(scale), more = or_none(residual);
  const bool tangent =
      has_tangent(input) || has_tangent(weight) || has_tangent(b) || has_tangent(factor) || has_tangent(more);
  if (!tangent && !needs_node(input, weight, b, factor, more)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return std::get<0>(call_conv_fused(spec, input, weight, bias, parts, /*mask=*/false));
  }
  if (tangent || !relu || factor.defined() || !served(input) || !served(weight)) {
    const ConvParams params = check_params(spec, "conv2d_fused");
    check_fused(parts, input, check_sizes<c10::SymInt>(params, input.sym_sizes(), weight.sym_sizes()));
    check_forward_tensors(params, input, weight, bias);
    return fused_from_parts(spec, input, weight, bias, parts);
  }
  const auto node = make_node<ConvReluBackward>(input, weight, b, more);
  Tensor y, bits;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(y, bits) = call_conv_fused(spec, input, weight, bias, parts, /*mask=*/true);
  }
  if (weight.requires_grad()) node->input.keep(input);
  if (input.requires_grad()) node->weight.keep(weight);
  node->bits.keep(bits);
  node->spec = OwnedSpec(spec);
  node->input_size = input.sym_sizes().vec();
  node->weight_size = weight.sym_sizes().vec();
  node->strides = y.sym_strides().vec();
  LeanNode::attach(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) { m.impl("conv2d_fused", &conv2d_fused); }

}  // namespace

}  // namespace patchconv
