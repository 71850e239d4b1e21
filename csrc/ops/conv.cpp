// Typed entry points: calls through the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "ops/conv_rooms.h"
#include "ops/patchconv/ops.h"

namespace patchconv {

using at::Tensor;

namespace {

struct NoRoom;
using Conv = decltype(ConvSignatures<NoRoom, 1>::conv);
using ConvTranspose = decltype(ConvSignatures<NoRoom, 1>::conv_transpose);
using ConvBackward = decltype(ConvSignatures<NoRoom, 1>::conv_backward);
using ConvTransposeBackward = decltype(ConvSignatures<NoRoom, 1>::conv_transpose_backward);

// Looked up once per process; `dims` picks the handle.
template <typename Signature>
const c10::TypedOperatorHandle<Signature>& handle(const std::string& stem, const std::string& suffix,
                                                  int dims) {
  auto find = [&](int d) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(("patchconv::" + stem + std::to_string(d) + "d" + suffix).c_str(), "")
        .typed<Signature>();
  };
  static const std::array<c10::TypedOperatorHandle<Signature>, 3> handles = {find(1), find(2), find(3)};
  return handles[dims - 1];
}

}  // namespace

Tensor call_conv(const ConvSpec& s, const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (s.transposed) {
    return handle<ConvTranspose>("conv_transpose", "", s.dims)
        .call(input, weight, bias, s.stride, s.padding, s.output_padding, s.groups, s.dilation, s.splits);
  }
  return handle<Conv>("conv", "", s.dims)
      .call(input, weight, bias, s.stride, s.padding, s.dilation, s.groups, s.padding_mode, s.splits);
}

ConvGrads call_conv_backward(const ConvSpec& s, const Tensor& grad_output, const OptionalTensor& input,
                             const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                             c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
  if (s.transposed) {
    return handle<ConvTransposeBackward>("conv_transpose", "_backward", s.dims)
        .call(grad_output, input, weight, input_size, weight_size, s.stride, s.padding, s.output_padding,
              s.groups, s.dilation, s.splits, output_mask);
  }
  return handle<ConvBackward>("conv", "_backward", s.dims)
      .call(grad_output, input, weight, input_size, weight_size, s.stride, s.padding, s.dilation, s.groups,
            s.padding_mode, s.splits, output_mask);
}

Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
              at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
              std::string_view padding_mode, at::OptionalIntArrayRef splits) {
  return call_conv(conv_spec(1, stride, padding, dilation, groups, padding_mode, splits), input, weight,
                   bias);
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
              at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
              std::string_view padding_mode, at::OptionalIntArrayRef splits) {
  return call_conv(conv_spec(2, stride, padding, dilation, groups, padding_mode, splits), input, weight,
                   bias);
}

Tensor conv3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
              at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
              std::string_view padding_mode, at::OptionalIntArrayRef splits) {
  return call_conv(conv_spec(3, stride, padding, dilation, groups, padding_mode, splits), input, weight,
                   bias);
}

Tensor conv_transpose1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                        int64_t groups, at::IntArrayRef dilation, at::OptionalIntArrayRef splits) {
  return call_conv(transposed_spec(1, stride, padding, output_padding, groups, dilation, splits), input,
                   weight, bias);
}

Tensor conv_transpose2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                        int64_t groups, at::IntArrayRef dilation, at::OptionalIntArrayRef splits) {
  return call_conv(transposed_spec(2, stride, padding, output_padding, groups, dilation, splits), input,
                   weight, bias);
}

Tensor conv_transpose3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef output_padding,
                        int64_t groups, at::IntArrayRef dilation, at::OptionalIntArrayRef splits) {
  return call_conv(transposed_spec(3, stride, padding, output_padding, groups, dilation, splits), input,
                   weight, bias);
}

}  // namespace patchconv
