// patchconv::conv2d_fused: relu(conv * scale + bias + residual), each part optional. Where this project's
// kernels run, the result is written once; elsewhere the parts follow in place.
#pragma once

#include "ops/conv_rooms.h"

namespace patchconv {

// The arguments that a plain convolution does not have. Non-owning, like ConvSpec.
struct FusedParts {
  const OptionalTensor& scale;     // (K)
  const OptionalTensor& residual;  // of the result's shape and dtype
  bool relu = false;
};

// Raises where a part does not fit the result's sizes.
void check_fused(const FusedParts& parts, const at::Tensor& input, c10::SymIntArrayRef sizes);

// Composed of differentiable operators.
at::Tensor fused_from_parts(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const FusedParts& parts);

// patchconv::_conv2d_fused: the result and, with `mask`, its bits (core/mask.h; without, an empty tensor).
std::tuple<at::Tensor, at::Tensor> call_conv_fused(const ConvSpec& spec, const at::Tensor& input,
                                                   const at::Tensor& weight, const OptionalTensor& bias,
                                                   const FusedParts& parts, bool mask);

// patchconv::_conv2d_masked_backward: gradients of a convolution, where elements of grad_output whose bit is
// 0 count as zero. `grad_output` is dense, and the bits are in its memory order.
ConvGrads call_conv_masked_backward(const ConvSpec& spec, const at::Tensor& grad_output,
                                    const at::Tensor& bits, const OptionalTensor& input,
                                    const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                                    c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask);

}  // namespace patchconv
