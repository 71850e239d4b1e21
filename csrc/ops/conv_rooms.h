// Joins the operators' signatures (csrc/library.cpp) to their implementations.
//
// An implementation (a Room) is a type with static functions in terms of ConvSpec:
//     Tensor forward(const ConvSpec&, input, weight, bias)
//     ConvGrads backward(const ConvSpec&, grad_output, input, weight, input_size, weight_size, output_mask)
// register_conv_forward and register_conv_backward register them for all six operators under one dispatch
// key. call_conv and call_conv_backward go the other way: from a spec through the dispatcher.
#pragma once

#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>

#include "ops/conv_spec.h"
#include "ops/optional.h"

namespace patchconv {

// Specs from the arguments of a convolution and of a transposed one.
inline ConvSpec conv_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                          int64_t groups, std::string_view padding_mode, at::OptionalIntArrayRef splits) {
  return {dims, /*transposed=*/false, stride, padding, {}, dilation, groups, padding_mode, splits};
}
inline ConvSpec transposed_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef dilation,
                                at::OptionalIntArrayRef splits) {
  return {dims, /*transposed=*/true, stride, padding, output_padding, dilation, groups, "zeros", splits};
}

template <typename Room, int kDims>
struct ConvSignatures {
  static at::Tensor conv(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                         at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                         int64_t groups, std::string_view padding_mode, at::OptionalIntArrayRef splits) {
    return Room::forward(conv_spec(kDims, stride, padding, dilation, groups, padding_mode, splits), input,
                         weight, bias);
  }
  static at::Tensor conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                   const OptionalTensor& bias, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef output_padding, int64_t groups,
                                   at::IntArrayRef dilation, at::OptionalIntArrayRef splits) {
    return Room::forward(transposed_spec(kDims, stride, padding, output_padding, groups, dilation, splits),
                         input, weight, bias);
  }
  static ConvGrads conv_backward(const at::Tensor& grad_output, const OptionalTensor& input,
                                 const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                                 c10::SymIntArrayRef weight_size, at::IntArrayRef stride,
                                 at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                 std::string_view padding_mode, at::OptionalIntArrayRef splits,
                                 std::array<bool, 3> output_mask) {
    return Room::backward(conv_spec(kDims, stride, padding, dilation, groups, padding_mode, splits),
                          grad_output, input, weight, input_size, weight_size, output_mask);
  }
  static ConvGrads conv_transpose_backward(const at::Tensor& grad_output, const OptionalTensor& input,
                                           const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                                           c10::SymIntArrayRef weight_size, at::IntArrayRef stride,
                                           at::IntArrayRef padding, at::IntArrayRef output_padding,
                                           int64_t groups, at::IntArrayRef dilation,
                                           at::OptionalIntArrayRef splits, std::array<bool, 3> output_mask) {
    return Room::backward(transposed_spec(kDims, stride, padding, output_padding, groups, dilation, splits),
                          grad_output, input, weight, input_size, weight_size, output_mask);
  }
};

template <typename Room>
void register_conv_forward(torch::Library& m) {
  m.impl("conv1d", &ConvSignatures<Room, 1>::conv);
  m.impl("conv2d", &ConvSignatures<Room, 2>::conv);
  m.impl("conv3d", &ConvSignatures<Room, 3>::conv);
  m.impl("conv_transpose1d", &ConvSignatures<Room, 1>::conv_transpose);
  m.impl("conv_transpose2d", &ConvSignatures<Room, 2>::conv_transpose);
  m.impl("conv_transpose3d", &ConvSignatures<Room, 3>::conv_transpose);
}

template <typename Room>
void register_conv_backward(torch::Library& m) {
  m.impl("conv1d_backward", &ConvSignatures<Room, 1>::conv_backward);
  m.impl("conv2d_backward", &ConvSignatures<Room, 2>::conv_backward);
  m.impl("conv3d_backward", &ConvSignatures<Room, 3>::conv_backward);
  m.impl("conv_transpose1d_backward", &ConvSignatures<Room, 1>::conv_transpose_backward);
  m.impl("conv_transpose2d_backward", &ConvSignatures<Room, 2>::conv_transpose_backward);
  m.impl("conv_transpose3d_backward", &ConvSignatures<Room, 3>::conv_transpose_backward);
}

// Calls the operator through the dispatcher, for the keys that are not excluded on this thread.
at::Tensor call_conv(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                     const OptionalTensor& bias);
// The same where the caller has computed the result already, in pieces: `output` is returned, and only the
// node is made. For calls that autograd records.
at::Tensor conv_given(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                      const OptionalTensor& bias, const at::Tensor& output);
ConvGrads call_conv_backward(const ConvSpec& spec, const at::Tensor& grad_output, const OptionalTensor& input,
                             const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                             c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask);

// The tensors of a call as autocast would cast them, if it is on for their device: for implementations that
// run before autocast. `wrapped`: they may be a transform's, whose device its cache does not see.
std::tuple<at::Tensor, at::Tensor, OptionalTensor> autocast_as_enabled(const at::Tensor& input,
                                                                       const at::Tensor& weight,
                                                                       const OptionalTensor& bias,
                                                                       bool wrapped = true);

// The same result from stock operators alone, where a C++ node cannot serve (torch.func, forward-mode AD).
at::Tensor stock_conv(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                      const OptionalTensor& bias);
ConvGrads stock_conv_backward(const ConvSpec& spec, const at::Tensor& grad_output,
                              const OptionalTensor& input, const OptionalTensor& weight,
                              c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                              std::array<bool, 3> output_mask);

}  // namespace patchconv
