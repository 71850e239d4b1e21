// Packed 1-bit masks of the piecewise linear activations (core/mask.h), on the device.
#pragma once

#include <cstdint>

#include "core/mask.h"
#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// y = activation(x), or of x + other, and one bit per element. `count` elements, dense and in one order.
struct MaskForward {
  const void* x = nullptr;
  const void* other = nullptr;  // null: no sum; only for ReLU
  void* y = nullptr;            // null: only the bits; may be x
  uint8_t* bits = nullptr;      // mask_bytes(count), aligned to 4 bytes
  int64_t count = 0;
  float a = 0, b = 0;
};
void launch_mask_forward(Type type, Mask mask, const MaskForward& call, Stream stream);

// out = bit ? grad * inside : grad * outside. A factor of 0 gives 0 whatever the gradient, one of 1 the
// gradient as it is. `out` may be `grad`.
struct MaskBackward {
  const void* grad = nullptr;
  const uint8_t* bits = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  float inside = 1, outside = 0;
};
void launch_mask_backward(Type type, const MaskBackward& call, Stream stream);

}  // namespace patchconv::kernels
