// 1-bit masks: what the bit of an element means, and where it is stored.
//
// Bit i % 8 (the least significant first) of byte i / 8 belongs to element i in the memory order of a dense
// tensor, whatever its layout. It is 1 where the gradient passes unchanged ("inside"). Spare bits of the last
// byte are 0.
#pragma once

#include <cstdint>

namespace patchconv {

// The piecewise linear activations, their parameters a and b, and where their bit is 1. NaN passes wherever
// stock PyTorch's backward lets it pass.
enum class Mask : int64_t {
  kRelu = 0,         // max(x, 0)                        !(x <= 0)
  kLeakyRelu = 1,    // x > 0 ? x : a * x                x > 0
  kHardtanh = 2,     // min(max(x, a), b)                !(x <= a) && !(x >= b)
  kThreshold = 3,    // x <= a ? b : x                   !(x <= a)
  kHardsigmoid = 4,  // min(max(x + 3, 0), 6) / 6        x > -3 && x < 3
};

// Whether kernels make values and bits of this one in one pass. Others are composed of stock operators.
inline bool has_mask_kernel(int64_t mask) {
  return mask >= 0 && mask <= static_cast<int64_t>(Mask::kHardsigmoid);
}

inline int64_t mask_bytes(int64_t elements) { return (elements + 7) / 8; }

}  // namespace patchconv
