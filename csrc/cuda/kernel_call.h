// From tensors to launch functions: what a kernel may be given, its type and its stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/settings.h"
#include "cuda/kernels/stream.h"

namespace patchconv {

// Whether the project's own kernel is to be taken, and there is one for this dtype.
inline bool native_kernel_for(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return backend() == Backend::kNative &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

kernels::Type kernel_type(const at::Tensor& tensor);
kernels::Stream current_stream(const at::Tensor& tensor);  // of the tensor's device

// What the current device offers; where there is none, what every device that is served does.
struct DeviceLimits {
  int shared_bytes = 99 * 1024;  // of a block
  int multiprocessors = 80;
  int arch = 0;  // 90: compute capability 9.0
};
DeviceLimits device_limits();

}  // namespace patchconv
