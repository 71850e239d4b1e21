// Shapes, dtypes and strides of the convolutions' results, for symbolic sizes: no concrete size is ever asked
// for.
#include <ATen/ops/empty.h>

#include "ops/conv.h"

namespace patchconv {

using at::Tensor;

namespace {

at::MemoryFormat format_of(const ConvSpec& spec, const Tensor& tensor, const OptionalTensor& weight) {
  // The batched view decides the layout, as in the implementations; in one dimension there is only one.
  if (spec.dims.size() == 1) return at::MemoryFormat::Contiguous;
  return output_format(
      tensor.dim() == static_cast<int64_t>(spec.dims.size()) + 2 ? tensor : tensor.unsqueeze(0),
      weight.has_value() ? *weight : Tensor());
}

Tensor result(const ConvSpec& spec, c10::SymIntArrayRef sizes, const Tensor& like, at::MemoryFormat format) {
  if (sizes.size() == spec.dims.size() + 2) {
    return at::empty_symint(sizes, like.options().memory_format(format));
  }
  std::vector<c10::SymInt> batched{1};
  batched.insert(batched.end(), sizes.begin(), sizes.end());
  return at::empty_symint(batched, like.options().memory_format(format)).squeeze(0);
}

struct MetaRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const auto sizes = check_sizes<c10::SymInt>(spec, input.sym_sizes(), weight.sym_sizes());
    check_forward_tensors(spec, input, weight, bias);
    return result(spec, sizes, input, format_of(spec, input, weight));
  }

  static ConvGrads backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
    check_backward(spec, args);
    const Tensor& grad = args.grad_output;
    Tensor grad_input, grad_weight, grad_bias;
    if (args.output_mask[0])
      grad_input = result(spec, args.input_size, grad, format_of(spec, grad, args.weight));
    if (args.output_mask[1]) {
      grad_weight =
          at::empty_symint(args.weight_size, grad.options().memory_format(weight_format(args.weight)));
    }
    if (args.output_mask[2]) {
      const c10::SymInt channels = grad.sym_size(grad.dim() - 1 - static_cast<int64_t>(spec.dims.size()));
      grad_bias = at::empty_symint({channels}, grad.options());
    }
    return {grad_input, grad_weight, grad_bias};
  }

  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    const Tensor y = forward(spec, input, weight, bias);
    check_fused(parts, input, y.sym_sizes());
    const c10::SymInt bytes = parts.mask && parts.relu ? (y.sym_numel() + 7) / 8 : c10::SymInt(0);
    return {y, at::empty_symint({bytes}, input.options().dtype(at::kByte))};
  }
};

Tensor conv3d_onednn(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                     int64_t groups) {
  const ConvSpec spec = conv_spec(3, stride, padding, dilation, groups, "zeros", at::OptionalIntArrayRef());
  return MetaRoom::forward(spec, input, weight, bias);
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_conv3d_onednn", &conv3d_onednn);
  register_conv<MetaRoom>(m);
}

}  // namespace

}  // namespace patchconv
