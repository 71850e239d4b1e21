// Batch and group norm on CUDA: checks, memory and the launches. Stock operators are used unless the backend
// asks for this project's kernels and they serve the dtype.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "core/mask.h"
#include "cuda/kernel_call.h"
#include "cuda/kernels/norm.h"
#include "ops/norm.h"

namespace patchconv {

using at::Tensor;

namespace {

using Mask3 = std::array<bool, 3>;

// The tensor in a layout that the kernels read: contiguous, or channels_last if `like` is.
Tensor dense(const Tensor& tensor, const Tensor& like) {
  return tensor.contiguous(like.is_contiguous() ? at::MemoryFormat::Contiguous
                                                : like.suggest_memory_format());
}

// `x` comes from dense(). Single pixels fit both layouts and count as channels_last, which has fewer parts.
NormShape shape_of(const Tensor& x, int64_t groups) {
  const int64_t image = x.size(0) * x.size(1), pixels = image == 0 ? 0 : x.numel() / image;
  return {x.size(0), x.size(1), pixels, groups, pixels == 1 || !x.is_contiguous()};
}

bool served_by_kernels(const Tensor& input) {
  return native_kernel_for(input) && kernels::serves(kernel_type(input), shape_of(input, 0));
}

// A parameter in float32 memory, which lives as long as this object.
class Floats {
 public:
  Floats(const OptionalTensor& tensor, at::Device device) {
    if (!tensor.has_value() || !tensor->defined()) return;
    TORCH_CHECK(tensor->device() == device, "norm: expected parameters and statistics on ", device, ", got ",
                tensor->device());
    tensor_ = tensor->to(at::kFloat).contiguous();
  }
  const float* data() const { return tensor_.defined() ? tensor_.const_data_ptr<float>() : nullptr; }

 private:
  Tensor tensor_;
};

struct Affine {
  explicit Affine(const NormMap& map)
      : mean(map.mean, map.mean.device()),
        var(map.var, map.mean.device()),
        weight(map.weight, map.mean.device()),
        bias(map.bias, map.mean.device()),
        eps(static_cast<float>(map.eps)),
        inverse(map.groups > 0) {}
  kernels::NormAffine call() const {
    return {mean.data(), var.data(), weight.data(), bias.data(), eps, inverse};
  }
  Floats mean, var, weight, bias;
  float eps;
  bool inverse;
};

Tensor floats(const Tensor& x, at::IntArrayRef sizes) {
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// Whether a running statistic can be updated in place.
bool movable(const OptionalTensor& running) {
  return !running.has_value() || !running->defined() ||
         (running->scalar_type() == at::kFloat && running->is_contiguous());
}

float* data_of(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->mutable_data_ptr<float>() : nullptr;
}

// In the form that a NormMap has them.
TwoTensors statistics(const Tensor& x, int64_t groups, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var, double momentum, double eps) {
  const NormShape shape = shape_of(x, groups);
  const auto type = kernel_type(x);
  const std::vector<int64_t> sizes =
      groups == 0 ? std::vector<int64_t>{x.size(1)} : std::vector<int64_t>{x.size(0), groups};
  Tensor mean = floats(x, sizes), var = floats(x, sizes);
  const Tensor workspace = floats(x, {kernels::norm_statistics_workspace(type, shape)});
  kernels::NormStatistics call;
  call.x = x.const_data_ptr();
  call.workspace = workspace.mutable_data_ptr<float>();
  call.mean = mean.mutable_data_ptr<float>();
  call.var = var.mutable_data_ptr<float>();
  call.running_mean = data_of(running_mean);
  call.running_var = data_of(running_var);
  call.momentum = static_cast<float>(momentum);
  call.eps = static_cast<float>(eps);
  call.inverse = groups > 0;
  kernels::launch_norm_statistics(type, shape, call, current_stream(x));
  return {std::move(mean), std::move(var)};
}

Tensor mapped(const Tensor& x, const NormMap& map) {
  Tensor y = at::empty_like(x);
  const Affine affine(map);
  kernels::launch_norm_map(kernel_type(x), shape_of(x, map.groups), affine.call(), map.activation,
                           x.const_data_ptr(), y.mutable_data_ptr(), current_stream(x));
  return y;
}

struct CudaNorm : NormWithAten {
  static Tensor normalize(const Tensor& input, const NormMap& map) {
    if (!served_by_kernels(input)) return NormWithAten::normalize(input, map);
    const c10::cuda::CUDAGuard guard(input.device());
    return mapped(dense(input, input), map);
  }

  static TwoTensors normalize_masked(const Tensor& input, const NormMap& map) {
    if (!served_by_kernels(input)) return NormWithAten::normalize_masked(input, map);
    const c10::cuda::CUDAGuard guard(input.device());
    const Tensor x = dense(input, input);
    const Affine affine(map);
    Tensor y = at::empty_like(x), bits = at::empty({mask_bytes(x.numel())}, x.options().dtype(at::kByte));
    const Tensor workspace = floats(x, {x.size(1)});
    kernels::launch_norm_mask(kernel_type(x), shape_of(x, 0), affine.call(),
                              workspace.mutable_data_ptr<float>(), x.const_data_ptr(), y.mutable_data_ptr(),
                              bits.mutable_data_ptr<uint8_t>(), current_stream(x));
    return {std::move(y), std::move(bits)};
  }

  static Gradients backward(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                            Mask3 mask) {
    if (!served_by_kernels(input) || grad.scalar_type() != input.scalar_type())
      return NormWithAten::backward(grad, input, map, training, mask);
    const c10::cuda::CUDAGuard guard(input.device());
    const Tensor x = dense(input, input), g = dense(grad, x);
    const NormShape shape = shape_of(x, map.groups);
    const auto type = kernel_type(x);
    const Affine affine(map);
    const Tensor workspace = floats(x, {kernels::norm_backward_workspace(type, shape)});
    Tensor grad_input = mask[0] ? at::empty_like(x) : Tensor();
    Tensor grad_weight = mask[1] ? floats(x, {x.size(1)}) : Tensor();
    Tensor grad_bias = mask[2] ? floats(x, {x.size(1)}) : Tensor();
    kernels::NormBackward call;
    call.grad = g.const_data_ptr();
    call.x = x.const_data_ptr();
    call.training = training;
    call.workspace = workspace.mutable_data_ptr<float>();
    call.grad_input = mask[0] ? grad_input.mutable_data_ptr() : nullptr;
    call.grad_weight = mask[1] ? grad_weight.mutable_data_ptr<float>() : nullptr;
    call.grad_bias = mask[2] ? grad_bias.mutable_data_ptr<float>() : nullptr;
    kernels::launch_norm_backward(type, shape, affine.call(), map.activation, call, current_stream(x));
    if (map.groups > 0) {  // parameters by channel come in the dtype of the statistics
      if (mask[1] && given(map.weight)) grad_weight = grad_weight.to(map.weight->scalar_type());
      if (mask[2] && given(map.bias)) grad_bias = grad_bias.to(map.bias->scalar_type());
    }
    return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
  }

  static TwoTensors batch_statistics(const Tensor& input, const OptionalTensor& running_mean,
                                     const OptionalTensor& running_var, double momentum) {
    if (!served_by_kernels(input) || !movable(running_mean) || !movable(running_var))
      return NormWithAten::batch_statistics(input, running_mean, running_var, momentum);
    const c10::cuda::CUDAGuard guard(input.device());
    return statistics(dense(input, input), 0, running_mean, running_var, momentum, 0);
  }

  static ThreeTensors group_norm(const Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& bias, int64_t groups, double eps, int64_t activation,
                                 std::optional<at::ScalarType> statistics_dtype) {
    if (!served_by_kernels(input))
      return NormWithAten::group_norm(input, weight, bias, groups, eps, activation, statistics_dtype);
    const c10::cuda::CUDAGuard guard(input.device());
    const Tensor x = dense(input, input);
    auto [mean, rstd] = statistics(x, groups, {}, {}, 0, eps);
    Tensor y = mapped(x, {weight, bias, mean, rstd, groups, eps, checked_activation(activation)});
    return {std::move(y), std::move(mean), std::move(rstd)};
  }
};

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_batch_statistics", &CudaNorm::batch_statistics);
  m.impl("_normalize", &NormSignatures<CudaNorm>::normalize);
  m.impl("_normalize_masked", &NormSignatures<CudaNorm>::normalize_masked);
  m.impl("_norm_backward", &NormSignatures<CudaNorm>::backward);
  m.impl("_group_norm", &CudaNorm::group_norm);
}

}  // namespace

}  // namespace patchconv
