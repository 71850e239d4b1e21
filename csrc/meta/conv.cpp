// Shapes, dtypes and strides of the convolutions' results, for symbolic sizes: no concrete size is ever asked
// for.
#include <ATen/ops/empty.h>

#include "ops/conv_fused.h"

namespace patchconv {

using at::Tensor;

namespace {

at::MemoryFormat format_of(const ConvSpec& spec, const Tensor& tensor, const OptionalTensor& weight) {
  // The batched view decides the layout, as in the implementations; in one dimension there is only one.
  if (spec.dims == 1) return at::MemoryFormat::Contiguous;
  return output_format(tensor.dim() == spec.dims + 2 ? tensor : tensor.unsqueeze(0),
                       weight.has_value() ? *weight : Tensor());
}

Tensor result(const ConvSpec& spec, c10::SymIntArrayRef sizes, const Tensor& like, at::MemoryFormat format) {
  if (sizes.size() == static_cast<size_t>(spec.dims + 2)) {
    return at::empty_symint(sizes, like.options().memory_format(format));
  }
  std::vector<c10::SymInt> batched{1};
  batched.insert(batched.end(), sizes.begin(), sizes.end());
  return at::empty_symint(batched, like.options().memory_format(format)).squeeze(0);
}

struct MetaRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const ConvParams params = check_params(spec, spec.name());
    const auto sizes = check_sizes<c10::SymInt>(params, input.sym_sizes(), weight.sym_sizes());
    check_forward_tensors(params, input, weight, bias);
    return result(spec, sizes, input, format_of(spec, input, weight));
  }

  static ConvGrads backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
    const ConvParams params = check_params(spec, spec.backward_name());
    check_backward_tensors(params, grad_output, input, weight, input_size, weight_size, output_mask);
    Tensor grad_input, grad_weight, grad_bias;
    if (output_mask[0])
      grad_input = result(spec, input_size, grad_output, format_of(spec, grad_output, weight));
    if (output_mask[1]) {
      grad_weight = at::empty_symint(weight_size, grad_output.options().memory_format(weight_format(weight)));
    }
    if (output_mask[2]) {
      const c10::SymInt channels = grad_output.sym_size(grad_output.dim() - 1 - spec.dims);
      grad_bias = at::empty_symint({channels}, grad_output.options());
    }
    return {grad_input, grad_weight, grad_bias};
  }
};

std::tuple<Tensor, Tensor> fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                 int64_t groups, const OptionalTensor& scale, const OptionalTensor& residual,
                                 bool relu, std::string_view padding_mode, at::OptionalIntArrayRef splits,
                                 bool mask) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  const ConvParams params = check_params(spec, "conv2d_fused");
  const auto sizes = check_sizes<c10::SymInt>(params, input.sym_sizes(), weight.sym_sizes());
  check_forward_tensors(params, input, weight, bias);
  check_fused({scale, residual, relu}, input, sizes);
  const Tensor y = result(spec, sizes, input, format_of(spec, input, weight));
  const c10::SymInt bytes = mask && relu ? (y.sym_numel() + 7) / 8 : c10::SymInt(0);
  return {y, at::empty_symint({bytes}, input.options().dtype(at::kByte))};
}

ConvGrads masked_backward(const Tensor& grad_output, const Tensor&, const OptionalTensor& input,
                          const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                          c10::SymIntArrayRef weight_size, at::IntArrayRef stride, at::IntArrayRef padding,
                          at::IntArrayRef dilation, int64_t groups, std::string_view padding_mode,
                          at::OptionalIntArrayRef splits, std::array<bool, 3> output_mask) {
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  return MetaRoom::backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
}

Tensor conv3d_onednn(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                     int64_t groups) {
  const ConvSpec spec = conv_spec(3, stride, padding, dilation, groups, "zeros", at::OptionalIntArrayRef());
  return MetaRoom::forward(spec, input, weight, bias);
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_conv3d_onednn", &conv3d_onednn);
  m.impl("_conv2d_fused", &fused);
  m.impl("_conv2d_masked_backward", &masked_backward);
  register_conv_forward<MetaRoom>(m);
  register_conv_backward<MetaRoom>(m);
}

}  // namespace

}  // namespace patchconv
