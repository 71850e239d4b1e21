// Copies of tiles between the order of a tensor in memory and the other one, for row strips of cuDNN.
#pragma once

#include <ATen/core/Tensor.h>

namespace patchconv {

// Fills `to` (N, C, ...) with the box of `from` that begins at `first`, a coordinate for each spatial
// dimension, which may be negative; outside of `from` it is zero. False, with nothing done, unless channels
// are contiguous in one of them and columns in the other, and the kernel serves them: one dtype of 2 or 4
// bytes and at least 16 channels.
bool copy_turned(const at::Tensor& from, at::IntArrayRef first, const at::Tensor& to);

}  // namespace patchconv
