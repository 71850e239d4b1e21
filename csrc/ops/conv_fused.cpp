#include "ops/conv_fused.h"

#include <ATen/ops/relu.h>

#include "ops/handle.h"

namespace patchconv {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Tensor;

namespace {

// (K) against (N, K, H, W) or (K, H, W).
Tensor by_channel(const Tensor& vector) { return vector.view_symint({vector.sym_size(0), 1, 1}); }

Tensor with_parts(Tensor y, const OptionalTensor& bias, const FusedParts& parts) {
  const auto dtype = y.scalar_type();
  if (given(parts.scale)) {
    y = y.mul(by_channel(*parts.scale));
    if (given(bias)) y = y.add(by_channel(*bias));
    y = y.to(dtype);
  }
  if (given(parts.residual)) y = y.add(*parts.residual);
  return y;
}

// The operator below autograd, and then the one for torch.func's transforms.
Tensor fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
             IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptionalTensor& scale,
             const OptionalTensor& residual, bool relu, std::string_view padding_mode,
             OptionalIntArrayRef splits) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  return std::get<0>(call_conv_fused(spec, input, weight, bias, {scale, residual, relu}, /*mask=*/false));
}

Tensor transformed(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptionalTensor& scale,
                   const OptionalTensor& residual, bool relu, std::string_view padding_mode,
                   OptionalIntArrayRef splits) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  const auto [x, w, b] = autocast_as_enabled(input, weight, bias);
  const ConvParams params = check_params(spec, "conv2d_fused");
  const auto sizes = check_sizes<c10::SymInt>(params, x.sym_sizes(), w.sym_sizes());
  check_forward_tensors(params, x, w, b);
  check_fused({scale, std::nullopt, relu}, x, sizes);
  Tensor y = stock_conv(spec, x, w, given(scale) ? std::nullopt : b);
  y = with_parts(y, b, {scale, residual, relu});
  return relu ? at::relu(y) : y;
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) { m.impl("conv2d_fused", &fused); }

TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { m.impl("conv2d_fused", &transformed); }

}  // namespace

void check_fused(const FusedParts& parts, const Tensor& input, c10::SymIntArrayRef sizes) {
  if (given(parts.scale)) {
    const Tensor& scale = *parts.scale;
    const c10::SymInt& channels = sizes[sizes.size() - 3];
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.sym_size(0) == channels,
                      "conv2d_fused: expected scale to have K = ", channels, " elements, got shape ",
                      scale.sym_sizes());
    TORCH_CHECK_TYPE(scale.is_floating_point(),
                     "conv2d_fused: expected scale to be of a floating-point dtype, got ",
                     scale.scalar_type());
    TORCH_CHECK_VALUE(scale.device() == input.device(), "conv2d_fused: expected scale on ", input.device(),
                      ", got ", scale.device());
  }
  if (given(parts.residual)) {
    const Tensor& residual = *parts.residual;
    TORCH_CHECK_VALUE(residual.sym_sizes() == sizes,
                      "conv2d_fused: expected residual to have the result's shape ", sizes, ", got ",
                      residual.sym_sizes());
    TORCH_CHECK_TYPE(residual.scalar_type() == input.scalar_type(),
                     "conv2d_fused: expected residual to be of input's dtype ", input.scalar_type(), ", got ",
                     residual.scalar_type());
    TORCH_CHECK_VALUE(residual.device() == input.device(), "conv2d_fused: expected residual on ",
                      input.device(), ", got ", residual.device());
  }
}

Tensor fused_from_parts(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const FusedParts& parts) {
  static const auto relu = handle<Tensor(const Tensor&)>("relu");
  const Tensor y =
      with_parts(call_conv(spec, input, weight, given(parts.scale) ? std::nullopt : bias), bias, parts);
  return parts.relu ? relu.call(y) : y;
}

std::tuple<Tensor, Tensor> call_conv_fused(const ConvSpec& s, const Tensor& input, const Tensor& weight,
                                           const OptionalTensor& bias, const FusedParts& parts, bool mask) {
  static const auto op = handle<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const OptionalTensor&, IntArrayRef, IntArrayRef, IntArrayRef, int64_t,
      const OptionalTensor&, const OptionalTensor&, bool, std::string_view, OptionalIntArrayRef, bool)>(
      "_conv2d_fused");
  return op.call(input, weight, bias, s.stride, s.padding, s.dilation, s.groups, parts.scale, parts.residual,
                 parts.relu, s.padding_mode, s.splits, mask);
}

ConvGrads call_conv_masked_backward(const ConvSpec& s, const Tensor& grad_output, const Tensor& bits,
                                    const OptionalTensor& input, const OptionalTensor& weight,
                                    c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                                    std::array<bool, 3> output_mask) {
  static const auto op =
      handle<ConvGrads(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       c10::SymIntArrayRef, c10::SymIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                       int64_t, std::string_view, OptionalIntArrayRef, std::array<bool, 3>)>(
          "_conv2d_masked_backward");
  return op.call(grad_output, bits, input, weight, input_size, weight_size, s.stride, s.padding, s.dilation,
                 s.groups, s.padding_mode, s.splits, output_mask);
}

}  // namespace patchconv
