// csrc/cuda/kernels/arch.cuh for a CPU: the same names, by plain C++ and the executor.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/kernels/stream.h"
#include "executor.h"

#define __global__
#define __device__
#define __launch_bounds__(...)

namespace patchconv::kernels {

#define PATCHCONV_DEVICE inline

constexpr int kWarp = 32;

PATCHCONV_DEVICE int thread_index() { return host_cuda::here().thread; }
PATCHCONV_DEVICE int lane_index() { return host_cuda::here().thread % kWarp; }
PATCHCONV_DEVICE int64_t block_x() { return host_cuda::here().block_x; }
PATCHCONV_DEVICE int block_y() { return host_cuda::here().block_y; }

template <typename T>
PATCHCONV_DEVICE T* shared_memory() {
  return static_cast<T*>(host_cuda::shared_memory());
}

PATCHCONV_DEVICE void block_barrier() { host_cuda::block_barrier(); }
template <typename T>
PATCHCONV_DEVICE T shuffle_xor(T value, int lanes) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  return std::bit_cast<T>(static_cast<Bits>(host_cuda::shuffle_xor(std::bit_cast<Bits>(value), lanes)));
}

PATCHCONV_DEVICE float to_float(float x) { return x; }
PATCHCONV_DEVICE float to_float(Half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
PATCHCONV_DEVICE float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

constexpr float kInfinity = __builtin_huge_valf();

template <typename T>
PATCHCONV_DEVICE T from_float(float x);
template <>
PATCHCONV_DEVICE float from_float<float>(float x) {
  return x;
}
// A NaN becomes the one that the device makes.
template <>
PATCHCONV_DEVICE Half from_float<Half>(float x) {
  return {x != x ? uint16_t{0x7fff} : std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}
template <>
PATCHCONV_DEVICE BFloat16 from_float<BFloat16>(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return {x != x ? uint16_t{0x7fff} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Compiled with -ffp-contract=off.
PATCHCONV_DEVICE float multiply(float a, float b) { return a * b; }
PATCHCONV_DEVICE float add(float a, float b) { return a + b; }

PATCHCONV_DEVICE float multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
PATCHCONV_DEVICE float square_root(float x) { return std::sqrt(x); }
PATCHCONV_DEVICE float exponential(float x) { return std::exp(x); }

PATCHCONV_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

}  // namespace patchconv::kernels
