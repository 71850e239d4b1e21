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

#include "ops/conv_rooms.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

// Arguments in the form stock operators take, with the padding they cannot express made explicit.
struct StockArguments {
  explicit StockArguments(const ConvParams& params)
      : dims(params.dims),
        stride(params.stride.begin(), params.stride.begin() + dims),
        padding(params.pad_before.begin(), params.pad_before.begin() + dims),
        dilation(params.dilation.begin(), params.dilation.begin() + dims),
        output_padding(params.output_padding.begin(), params.output_padding.begin() + dims),
        explicit_padding(params.mode != PaddingMode::kZeros || params.pad_before != params.pad_after) {
    if (explicit_padding) padding.assign(dims, 0);
  }

  int64_t dims;
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool explicit_padding;
};

Tensor padded(const ConvParams& params, const Tensor& input) {
  std::vector<c10::SymInt> pad;  // last dimension first
  for (int d = params.dims; d-- > 0;) {
    pad.emplace_back(params.pad_before[d]);
    pad.emplace_back(params.pad_after[d]);
  }
  return at::pad_symint(input, pad,
                        params.mode == PaddingMode::kZeros ? "constant" : padding_mode_name(params.mode));
}

// The transpose of padded(): from the gradient of the padded input to that of the input.
Tensor unpadded(const ConvParams& params, Tensor grad, at::IntArrayRef size) {
  for (const auto d : irange(params.dims)) {
    const int64_t length = size[size.size() - params.dims + d];
    const int64_t dim = 2 + d;
    const Range range{-params.pad_before[d], length + params.pad_after[d]};
    if (params.mode == PaddingMode::kZeros) {
      grad = grad.narrow(dim, params.pad_before[d], length);
    } else {
      auto sizes = grad.sizes().vec();
      sizes[dim] = length;
      const auto index = at::tensor(source_indices(params.mode, range, length), at::kLong).to(grad.device());
      grad = at::index_add(at::zeros(sizes, grad.options()), dim, index, grad);
    }
  }
  return grad;
}

}  // namespace

Tensor stock_conv(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                  const OptionalTensor& bias) {
  const ConvParams params = check_params(spec, spec.name());
  check_sizes<c10::SymInt>(params, input.sym_sizes(), weight.sym_sizes());
  check_forward_tensors(params, input, weight, bias);
  const StockArguments args(params);
  const bool batched = input.dim() == spec.dims + 2;
  Tensor x = batched ? input : input.unsqueeze(0);
  // Autocast, where it is on, pads in float32.
  if (args.explicit_padding) x = padded(params, x).to(input.scalar_type());
  Tensor y = at::convolution(x, weight, bias, args.stride, args.padding, args.dilation, spec.transposed,
                             args.output_padding, spec.groups);
  return batched ? y : y.squeeze(0);
}

ConvGrads stock_conv_backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                              const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                              c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
  const ConvParams params = check_params(spec, spec.backward_name());
  check_backward_tensors(params, grad_output, input, weight, input_size, weight_size, output_mask);
  const StockArguments args(params);
  const auto size = C10_AS_INTARRAYREF_SLOW(input_size);
  const bool batched = grad_output.dim() == spec.dims + 2;
  const Tensor grad = batched ? grad_output : grad_output.unsqueeze(0);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    std::vector<int64_t> rest(args.dims, 0);  // coordinates at the far end that no kernel reaches
    for (const auto d : irange(args.dims)) {
      if (spec.transposed) continue;
      const int64_t length =
          size[size.size() - args.dims + d] +
          (args.explicit_padding ? params.pad_before[d] + params.pad_after[d] : 2 * args.padding[d]);
      const int64_t reach = (C10_AS_INTARRAYREF_SLOW(weight_size)[2 + d] - 1) * args.dilation[d] + 1;
      rest[d] = (length - reach) % args.stride[d];
    }
    grad_input = at::convolution(grad, *weight, std::nullopt, args.stride, args.padding, args.dilation,
                                 !spec.transposed, rest, spec.groups);
    if (spec.transposed) {
      for (const auto d : irange(args.dims)) {
        grad_input = grad_input.narrow(2 + d, 0, size[size.size() - args.dims + d]);
      }
    } else if (args.explicit_padding) {
      grad_input = unpadded(params, grad_input, size);
    }
    if (!batched) grad_input = grad_input.squeeze(0);
  }
  if (output_mask[1]) {
    Tensor x = batched ? *input : input->unsqueeze(0);
    if (args.explicit_padding) x = padded(params, x);
    // Only its size is read.
    const Tensor stand_in = at::empty({1}, x.options()).expand(C10_AS_INTARRAYREF_SLOW(weight_size));
    grad_weight = std::get<1>(
        at::convolution_backward(grad, x, stand_in, std::nullopt, args.stride, args.padding, args.dilation,
                                 spec.transposed, args.output_padding, spec.groups, {false, true, false}));
  }
  if (output_mask[2]) {
    std::vector<int64_t> over{0};
    for (const auto d : irange<int64_t>(2, grad.dim())) over.push_back(d);
    grad_bias = at::sum(grad, over);
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace patchconv
