// Dropout from a seed on CUDA: checks, memory and the launch. The seed stays on the device, so that each
// replay of a captured graph draws a new one.
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "core/philox.h"
#include "cuda/kernel_call.h"
#include "cuda/kernels/dropout.h"

namespace patchconv {

using at::Tensor;

namespace {

Tensor dropout_cuda(const Tensor& input, const Tensor& seed, double p, double scale, double shift,
                    double fill) {
  TORCH_CHECK(p >= 0 && p <= 1, "patchconv::_dropout: expected p to be between 0 and 1, got ", p);
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.device() == input.device(),
              "patchconv::_dropout: expected seed to be one int64 on input's device, got ", seed.sizes(),
              " of ", seed.scalar_type(), " on ", seed.device());
  TORCH_CHECK(input.is_non_overlapping_and_dense(),
              "patchconv::_dropout: expected input to be dense, got strides ", input.strides());
  TORCH_CHECK(input.scalar_type() != at::kDouble,
              "patchconv::_dropout: expected input to be float32, float16 or bfloat16 on CUDA, got float64");
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor output = at::empty_like(input);
  kernels::Dropout call;
  call.x = input.const_data_ptr();
  call.y = output.mutable_data_ptr();
  call.seed = seed.const_data_ptr<int64_t>();
  call.count = input.numel();
  call.threshold = philox_threshold(p);
  call.scale = static_cast<float>(scale);
  call.shift = static_cast<float>(shift);
  call.fill = static_cast<float>(fill);
  kernels::launch_dropout(kernel_type(input), call, current_stream(input));
  return output;
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) { m.impl("_dropout", &dropout_cuda); }

}  // namespace

}  // namespace patchconv
