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

}  // namespace patchconv
