// What the convolution kernels share: elements of strided tensors in the type of the sums, and the epilogue
// of a finished sum.
#pragma once

#include "cuda/kernels/conv.h"
#include "cuda/kernels/elements.cuh"

namespace patchconv::kernels {

template <typename T>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<double> {
  using Type = double;
};
template <typename T>
using Sum = typename SumOf<T>::Type;

PATCHCONV_DEVICE double to_sum(double x) { return x; }
template <typename T>
PATCHCONV_DEVICE float to_sum(T x) {
  return to_float(x);
}
template <typename T>
PATCHCONV_DEVICE T from_sum(Sum<T> x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return from_float<T>(x);
  }
}

// Calls use(T()) for a type's T, float64 among them.
template <typename Use>
void with_any_type(Type type, Use use) {
  if (type == Type::kDouble) return use(double());
  with_type(type, use);
}

PATCHCONV_DEVICE bool bit_at(const uint8_t* bits, int64_t offset) {
  return bits[offset / 8] >> (offset % 8) & 1;
}

// The element at an offset; zero if its bit is 0.
template <typename T>
PATCHCONV_DEVICE Sum<T> value_at(const ConvTensor& tensor, int64_t offset) {
  if (tensor.bits != nullptr && !bit_at(tensor.bits, offset)) return 0;
  return to_sum(static_cast<const T*>(tensor.data)[offset]);
}

// Whether ReLU passes a value: NaN passes.
template <typename S>
PATCHCONV_DEVICE bool passes(S value) {
  return !(value <= 0);
}

// The result at `offset` for a sum; `channel` counts over all groups.
template <typename T>
PATCHCONV_DEVICE Sum<T> finished(const ConvEpilogue& epilogue, Sum<T> sum, int channel, int64_t offset) {
  if (epilogue.scale != nullptr) sum *= static_cast<const Sum<T>*>(epilogue.scale)[channel];
  if (epilogue.bias != nullptr) sum += to_sum(static_cast<const T*>(epilogue.bias)[channel]);
  if (epilogue.residual != nullptr) sum += to_sum(static_cast<const T*>(epilogue.residual)[offset]);
  return epilogue.relu && !passes(sum) ? 0 : sum;
}

// A float as a sum of two tf32 numbers, each rounded to nearest, ties away from zero. Bits below those of
// tf32 mean nothing in the lower one. What would round to infinity is cut, and infinities and NaN stay in the
// upper one (of any NaN, that of the device: its own bits may all lie below those of tf32).
PATCHCONV_DEVICE void split_tf32(uint32_t x, uint32_t& high, uint32_t& low) {
  constexpr uint32_t kMask = 0xffffe000, kHalf = 0x1000;
  const float value = bits_float(x);
  const bool rounds = __builtin_fabsf(value) < bits_float(0x7f7ff000);
  high = (rounds ? x + kHalf : value != value ? 0x7fffffff : x) & kMask;
  const float upper = bits_float(high);
  low = float_bits(value == upper ? 0 : value - upper) + kHalf;
}

}  // namespace patchconv::kernels
