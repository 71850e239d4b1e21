// What a launch needs to know of a tensor: whether a kernel serves it, its type and its stream. And the
// device's limits.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/settings.h"
#include "cuda/kernels/stream.h"

namespace patchconv {

// Whether the backend asks for this project's kernels and they serve this dtype.
inline bool native_kernel_for(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return backend() == Backend::kNative &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

kernels::Type kernel_type(const at::Tensor& tensor);
kernels::Stream current_stream(const at::Tensor& tensor);  // of the tensor's device

// Limits of the current device. If there is none: limits that every served device has.
struct DeviceLimits {
  int shared_bytes = 99 * 1024;  // per block
  int multiprocessors = 80;
  int arch = 0;  // 90: compute capability 9.0
};
DeviceLimits device_limits();

}  // namespace patchconv
