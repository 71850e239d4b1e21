// The convolutions and their gradients composed of stock operators, for callers that a C++ autograd node
// cannot serve. Everything here is differentiable and has batching rules, and may allocate padded copies of
// its inputs.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <string>

#include "ops/activation.h"
#include "ops/conv.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

// Arguments in the form stock operators take, with the padding they cannot express made explicit.
struct StockArguments {
  explicit StockArguments(const ConvSpec& spec)
      : dims(static_cast<int64_t>(spec.dims.size())),
        output_padding(dims, 0),
        explicit_padding(spec.mode != PaddingMode::kZeros) {
    for (const ConvDim& dim : spec.dims) {
      stride.push_back(dim.stride);
      dilation.push_back(dim.dilation);
      padding.push_back(dim.pad_before);
      explicit_padding = explicit_padding || dim.pad_before != dim.pad_after;
    }
    if (explicit_padding) padding.assign(dims, 0);
    if (spec.transposed) output_padding.assign(spec.output_padding.begin(), spec.output_padding.end());
  }

  int64_t dims;
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool explicit_padding;
};

Tensor padded(const ConvSpec& spec, const Tensor& input) {
  std::vector<c10::SymInt> pad;  // last dimension first
  for (size_t d = spec.dims.size(); d-- > 0;) {
    pad.emplace_back(spec.dims[d].pad_before);
    pad.emplace_back(spec.dims[d].pad_after);
  }
  return at::pad_symint(input, pad,
                        spec.mode == PaddingMode::kZeros ? "constant" : padding_mode_name(spec.mode));
}

// The transpose of padded(): from the gradient of the padded input to that of the input.
Tensor unpadded(const ConvSpec& spec, Tensor grad, at::IntArrayRef size) {
  for (const auto d : irange(spec.dims.size())) {
    const int64_t length = size[size.size() - spec.dims.size() + d];
    const auto dim = static_cast<int64_t>(2 + d);
    const Range range{-spec.dims[d].pad_before, length + spec.dims[d].pad_after};
    if (spec.mode == PaddingMode::kZeros) {
      grad = grad.narrow(dim, spec.dims[d].pad_before, length);
    } else {
      auto sizes = grad.sizes().vec();
      sizes[dim] = length;
      const auto index = at::tensor(source_indices(spec.mode, range, length), at::kLong).to(grad.device());
      grad = at::index_add(at::zeros(sizes, grad.options()), dim, index, grad);
    }
  }
  return grad;
}

}  // namespace

Tensor stock_conv(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                  const OptionalTensor& bias) {
  check_sizes<c10::SymInt>(spec, input.sym_sizes(), weight.sym_sizes());
  check_forward_tensors(spec, input, weight, bias);
  const StockArguments args(spec);
  const bool batched = input.dim() == args.dims + 2;
  Tensor x = batched ? input : input.unsqueeze(0);
  // Autocast, where it is on, pads in float32.
  if (args.explicit_padding) x = padded(spec, x).to(input.scalar_type());
  Tensor y = at::convolution(x, weight, bias, args.stride, args.padding, args.dilation, spec.transposed,
                             args.output_padding, spec.groups);
  return batched ? y : y.squeeze(0);
}

ConvGrads stock_conv_backward(const ConvSpec& spec, const ConvBackwardArgs& a) {
  check_backward(spec, a);
  if (a.bits.defined())
    return stock_conv_backward(spec, without_bits(a, mask_backward_with_aten(a.grad_output, a.bits, 1, 0)));
  const StockArguments args(spec);
  const auto size = C10_AS_INTARRAYREF_SLOW(a.input_size);
  const auto weight_size = C10_AS_INTARRAYREF_SLOW(a.weight_size);
  const bool batched = a.grad_output.dim() == args.dims + 2;
  const Tensor grad = batched ? a.grad_output : a.grad_output.unsqueeze(0);
  Tensor grad_input, grad_weight, grad_bias;
  if (a.output_mask[0]) {
    std::vector<int64_t> rest(args.dims, 0);  // coordinates at the far end that no kernel reaches
    for (const auto d : irange(args.dims)) {
      if (spec.transposed) continue;
      const int64_t length =
          size[size.size() - args.dims + d] +
          (args.explicit_padding ? spec.dims[d].pad_before + spec.dims[d].pad_after : 2 * args.padding[d]);
      const int64_t reach = (weight_size[2 + d] - 1) * args.dilation[d] + 1;
      rest[d] = (length - reach) % args.stride[d];
    }
    grad_input = at::convolution(grad, *a.weight, std::nullopt, args.stride, args.padding, args.dilation,
                                 !spec.transposed, rest, spec.groups);
    if (spec.transposed) {
      for (const auto d : irange(args.dims)) {
        grad_input = grad_input.narrow(2 + d, 0, size[size.size() - args.dims + d]);
      }
    } else if (args.explicit_padding) {
      grad_input = unpadded(spec, grad_input, size);
    }
    if (!batched) grad_input = grad_input.squeeze(0);
  }
  if (a.output_mask[1]) {
    Tensor x = batched ? *a.input : a.input->unsqueeze(0);
    if (args.explicit_padding) x = padded(spec, x);
    // Only its size is read.
    const Tensor stand_in = at::empty({1}, x.options()).expand(weight_size);
    grad_weight = std::get<1>(
        at::convolution_backward(grad, x, stand_in, std::nullopt, args.stride, args.padding, args.dilation,
                                 spec.transposed, args.output_padding, spec.groups, {false, true, false}));
  }
  if (a.output_mask[2]) {
    std::vector<int64_t> over{0};
    for (const auto d : irange<int64_t>(2, grad.dim())) over.push_back(d);
    grad_bias = at::sum(grad, over);
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace patchconv
