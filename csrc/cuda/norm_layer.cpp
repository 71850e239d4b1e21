// Layer norm on CUDA: checks, memory and the launches. Stock operators are used unless the backend asks for
// this project's kernels and they serve the dtype and the layout.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/kernel_call.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/norm_layer.h"
#include "ops/norm.h"

namespace patchconv {

using at::Tensor;

namespace {

using Parts = std::tuple<Tensor, Tensor, Tensor>;

// In float32 and contiguous; undefined if the tensor is not given.
Tensor floats(const OptionalTensor& tensor, at::Device device) {
  if (!given(tensor)) return Tensor();
  TORCH_CHECK(tensor->device() == device, "layer_norm: expected parameters and statistics on ", device,
              ", got ", tensor->device());
  return tensor->to(at::kFloat).contiguous();
}

const float* data_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

// Elements per row; nothing if the call is left to stock's operator, which also checks the arguments.
std::optional<int64_t> columns_of(const Tensor& x, at::IntArrayRef shape, const OptionalTensor& weight,
                                  const OptionalTensor& bias) {
  const auto fits = [&](const OptionalTensor& parameter) {
    return !given(parameter) || parameter->sizes() == shape;
  };
  const auto dims = static_cast<int64_t>(shape.size());
  if (!native_kernel_for(x) || x.numel() == 0 || dims < 1 || x.dim() < dims || !fits(weight) || !fits(bias) ||
      x.sizes().slice(x.dim() - dims) != shape) {
    return std::nullopt;
  }
  const int64_t columns = c10::multiply_integers(shape);
  const NormShape as_pixels{x.numel() / columns, columns, 1, 0, /*channels_last=*/true};
  return kernels::serves(kernel_type(x), as_pixels) ? std::optional(columns) : std::nullopt;
}

Parts layer_norm_cuda(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps) {
  const auto columns = columns_of(input, shape, weight, bias);
  if (!columns) return at::native_layer_norm(input, shape, weight, bias, eps);
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = input.contiguous(), w = floats(weight, input.device()), b = floats(bias, input.device());
  std::vector<int64_t> sizes = x.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.size()), sizes.end(), 1);
  const auto options = x.options().dtype(at::kFloat);
  Tensor y = at::empty_like(x), mean = at::empty(sizes, options), rstd = at::empty(sizes, options);
  const kernels::LayerNorm norm{x.numel() / *columns, *columns, data_of(w), data_of(b),
                                static_cast<float>(eps)};
  kernels::launch_layer_norm(kernel_type(x), norm, x.const_data_ptr(), y.mutable_data_ptr(),
                             mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                             current_stream(x));
  return {std::move(y), std::move(mean), std::move(rstd)};
}

Gradients layer_norm_backward_cuda(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                   const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                                   const OptionalTensor& bias, std::array<bool, 3> mask) {
  const auto columns = columns_of(input, shape, weight, bias);
  if (!columns || grad.scalar_type() != input.scalar_type()) {
    return at::native_layer_norm_backward(grad, input, shape, mean, rstd, weight, bias, mask);
  }
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = input.contiguous(), g = grad.contiguous(), w = floats(weight, input.device());
  const Tensor m = floats(mean, input.device()), r = floats(rstd, input.device());
  const auto type = kernel_type(x);
  const kernels::LayerNorm norm{x.numel() / *columns, *columns, data_of(w), nullptr, 0};
  const auto options = x.options().dtype(at::kFloat);
  const bool parameters = mask[1] || mask[2];
  Tensor grad_input = mask[0] ? at::empty_like(x) : Tensor();
  Tensor grad_weight = mask[1] ? at::empty(shape, options) : Tensor();
  Tensor grad_bias = mask[2] ? at::empty(shape, options) : Tensor();
  const Tensor workspace = at::empty({parameters ? kernels::layer_norm_workspace(type, norm) : 0}, options);
  kernels::LayerNormBackward call;
  call.grad = g.const_data_ptr();
  call.x = x.const_data_ptr();
  call.mean = m.const_data_ptr<float>();
  call.rstd = r.const_data_ptr<float>();
  call.workspace = workspace.mutable_data_ptr<float>();
  call.grad_input = mask[0] ? grad_input.mutable_data_ptr() : nullptr;
  call.grad_weight = mask[1] ? grad_weight.mutable_data_ptr<float>() : nullptr;
  call.grad_bias = mask[2] ? grad_bias.mutable_data_ptr<float>() : nullptr;
  kernels::launch_layer_norm_backward(type, norm, call, current_stream(x));
  const auto like = [](Tensor& gradient, const OptionalTensor& parameter) {
    return gradient.defined() && given(parameter) ? gradient.to(parameter->scalar_type()) : gradient;
  };
  return {std::move(grad_input), like(grad_weight, weight), like(grad_bias, bias)};
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_layer_norm", &layer_norm_cuda);
  m.impl("_layer_norm_backward", &layer_norm_backward_cuda);
}

}  // namespace

}  // namespace patchconv
