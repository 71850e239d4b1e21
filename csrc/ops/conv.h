// The operators of the convolutions.
//
// The six public ones, and conv2d_fused, check and pack their arguments and call one of three internal ones,
// for any number of dimensions: _convolution, _convolution_fused and _convolution_backward. Only these have
// implementations by dispatch key, in the folders beside this one. An implementation is a type with static
// functions in terms of ConvSpec:
//     Tensor forward(const ConvSpec&, input, weight, bias)
//     ConvGrads backward(const ConvSpec&, const ConvBackwardArgs&)
//     std::tuple<Tensor, Tensor> fused(const ConvSpec&, input, weight, bias, const FusedParts&)
// register_conv joins it to the operators' signatures (csrc/library.cpp). call_conv, call_conv_backward and
// call_conv_fused go the other way: from a spec through the dispatcher, for the keys that are not excluded on
// this thread.
#pragma once

#include <torch/library.h>

#include <tuple>

#include "ops/conv_checks.h"

namespace patchconv {

using ConvGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of input, weight and bias
using FusedResult = std::tuple<at::Tensor, at::Tensor>;

template <typename Room>
struct ConvSignatures {
  static at::Tensor forward(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                            at::IntArrayRef output_padding, at::IntArrayRef splits, int64_t groups,
                            bool transposed, std::string_view padding_mode) {
    const ConvSpec spec =
        spec_of_lists(stride, padding, dilation, output_padding, splits, groups, transposed, padding_mode);
    return Room::forward(spec, input, weight, bias);
  }
  static ConvGrads backward(const at::Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, at::IntArrayRef output_padding, at::IntArrayRef splits,
                            int64_t groups, bool transposed, std::string_view padding_mode,
                            std::array<bool, 3> output_mask, const OptionalTensor& bits) {
    const ConvSpec spec =
        spec_of_lists(stride, padding, dilation, output_padding, splits, groups, transposed, padding_mode);
    return Room::backward(spec,
                          {grad_output, input, weight, input_size, weight_size, output_mask, or_none(bits)});
  }
  static FusedResult fused(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& residual, bool relu, bool mask,
                           at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                           at::IntArrayRef splits, int64_t groups, std::string_view padding_mode) {
    TORCH_CHECK_VALUE(stride.size() == 2, "conv2d_fused: expected stride to have 2 entries, got ",
                      stride.size());
    ConvSpec spec = spec_of_lists(stride, padding, dilation, {}, splits, groups, false, padding_mode);
    spec.op = "conv2d_fused";
    return Room::fused(spec, input, weight, bias, {scale, residual, relu, mask});
  }
};

template <typename Room>
void register_conv(torch::Library& m) {
  m.impl("_convolution", &ConvSignatures<Room>::forward);
  m.impl("_convolution_fused", &ConvSignatures<Room>::fused);
  if constexpr (requires { &Room::backward; }) {  // autocast has none
    m.impl("_convolution_backward", &ConvSignatures<Room>::backward);
  }
}

at::Tensor call_conv(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                     const OptionalTensor& bias);
ConvGrads call_conv_backward(const ConvSpec& spec, const ConvBackwardArgs& args);
FusedResult call_conv_fused(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const FusedParts& parts);

// As call_conv() where the caller has computed the result already, in pieces: `output` is returned, and only
// the node is made. For calls that autograd records.
at::Tensor conv_given(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                      const OptionalTensor& bias, const at::Tensor& output);

// What stands in place of bits that were not asked for.
inline at::Tensor no_bits(const at::Tensor& like) { return like.new_empty({0}, at::kByte); }

// conv2d_fused composed of differentiable operators of this library.
at::Tensor fused_from_parts(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const FusedParts& parts);

// The tensors of a call as autocast would cast them, if it is on for their device: for implementations that
// run before autocast. `wrapped`: they may be a transform's, whose device its cache does not see.
std::tuple<at::Tensor, at::Tensor, OptionalTensor> autocast_as_enabled(const at::Tensor& input,
                                                                       const at::Tensor& weight,
                                                                       const OptionalTensor& bias,
                                                                       bool wrapped = true);

// The same results from stock operators alone, where a C++ node cannot serve (torch.func, forward-mode AD).
at::Tensor stock_conv(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                      const OptionalTensor& bias);
at::Tensor stock_conv_fused(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias, const FusedParts& parts);
ConvGrads stock_conv_backward(const ConvSpec& spec, const ConvBackwardArgs& args);

}  // namespace patchconv
