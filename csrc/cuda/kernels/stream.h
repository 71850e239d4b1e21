// What launch functions have in common, without a CUDA header: the stream as a plain pointer, and errors.
#pragma once

#include <stdexcept>

namespace patchconv::kernels {

using Stream = void*;  // a cudaStream_t

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(int error);  // a cudaError_t; throws LaunchError with CUDA's text

enum class Type { kFloat, kHalf, kBFloat16 };

}  // namespace patchconv::kernels
