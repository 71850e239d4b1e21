// The public operators, and calls of the internal ones.
#include "ops/conv.h"

#include <ATen/ops/relu.h>

#include "ops/handle.h"
#include "ops/patchconv/ops.h"

namespace patchconv {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Tensor;

namespace {

struct NoRoom;
using Forward = decltype(ConvSignatures<NoRoom>::forward);
using Backward = decltype(ConvSignatures<NoRoom>::backward);
using Fused = decltype(ConvSignatures<NoRoom>::fused);

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

}  // namespace

Tensor call_conv(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                 const OptionalTensor& bias) {
  static const auto op = handle<Forward>("_convolution");
  const ConvLists a(spec);
  return op.call(input, weight, bias, a.stride, a.padding, a.dilation, a.output_padding, a.splits,
                 spec.groups, spec.transposed, padding_mode_name(spec.mode));
}

ConvGrads call_conv_backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
  static const auto op = handle<Backward>("_convolution_backward");
  const ConvLists a(spec);
  return op.call(args.grad_output, args.input, args.weight, args.input_size, args.weight_size, a.stride,
                 a.padding, a.dilation, a.output_padding, a.splits, spec.groups, spec.transposed,
                 padding_mode_name(spec.mode), args.output_mask, if_defined(args.bits));
}

FusedResult call_conv_fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                            const OptionalTensor& bias, const FusedParts& parts) {
  static const auto op = handle<Fused>("_convolution_fused");
  const ConvLists a(spec);
  return op.call(input, weight, bias, parts.scale, parts.residual, parts.relu, parts.mask, a.stride,
                 a.padding, a.dilation, a.splits, spec.groups, padding_mode_name(spec.mode));
}

Tensor fused_from_parts(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const FusedParts& parts) {
  static const auto relu = handle<Tensor(const Tensor&)>("relu");
  const Tensor y =
      with_parts(call_conv(spec, input, weight, given(parts.scale) ? std::nullopt : bias), bias, parts);
  return parts.relu ? relu.call(y) : y;
}

Tensor stock_conv_fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const FusedParts& parts) {
  const auto sizes = check_sizes<c10::SymInt>(spec, input.sym_sizes(), weight.sym_sizes());
  check_forward_tensors(spec, input, weight, bias);
  // A transform may add dimensions to the residual that only it sees.
  check_fused({parts.scale, std::nullopt}, input, sizes);
  const Tensor y =
      with_parts(stock_conv(spec, input, weight, given(parts.scale) ? std::nullopt : bias), bias, parts);
  return parts.relu ? at::relu(y) : y;
}

// The public operators, which are functions for C++ programs too (ops/patchconv/ops.h).

#define PATCHCONV_CONV(D)                                                                                  \
  Tensor conv##D##d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,                 \
                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,         \
                    std::string_view padding_mode, OptionalIntArrayRef splits) {                           \
    return call_conv(conv_spec(D, stride, padding, dilation, groups, padding_mode, splits), input, weight, \
                     bias);                                                                                \
  }                                                                                                        \
  Tensor conv_transpose##D##d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,       \
                              IntArrayRef stride, IntArrayRef padding, IntArrayRef output_padding,         \
                              int64_t groups, IntArrayRef dilation, OptionalIntArrayRef splits) {          \
    return call_conv(transposed_spec(D, stride, padding, output_padding, groups, dilation, splits), input, \
                     weight, bias);                                                                        \
  }
PATCHCONV_CONV(1)
PATCHCONV_CONV(2)
PATCHCONV_CONV(3)
#undef PATCHCONV_CONV

namespace {

Tensor conv2d_fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride,
                    IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptionalTensor& scale,
                    const OptionalTensor& residual, bool relu, std::string_view padding_mode,
                    OptionalIntArrayRef splits) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits, "conv2d_fused");
  return std::get<0>(call_conv_fused(spec, input, weight, bias, {scale, residual, relu}));
}

void register_public(torch::Library& m) {
  m.impl("conv1d", &conv1d);
  m.impl("conv2d", &conv2d);
  m.impl("conv3d", &conv3d);
  m.impl("conv_transpose1d", &conv_transpose1d);
  m.impl("conv_transpose2d", &conv_transpose2d);
  m.impl("conv_transpose3d", &conv_transpose3d);
  m.impl("conv2d_fused", &conv2d_fused);
}

TORCH_LIBRARY_IMPL(patchconv, CompositeImplicitAutograd, m) { register_public(m); }

// torch.func's transforms would take a composite operator apart by themselves, one level at a time.
TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { register_public(m); }

}  // namespace

}  // namespace patchconv
