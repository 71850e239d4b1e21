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
PATCHCONV_DEVICE void warp_barrier() {
  const char nothing = 0;
  host_cuda::warp_exchange("a warp's barrier", &nothing, 1);
}
// What lane `from` brought to an exchange.
template <typename T>
PATCHCONV_DEVICE T brought(const unsigned char* all, int from) {
  T value;
  std::memcpy(&value, all + sizeof(T) * static_cast<size_t>(from), sizeof(T));
  return value;
}

template <typename T>
PATCHCONV_DEVICE T shuffle_xor(T value, int lanes) {
  return brought<T>(host_cuda::warp_exchange("a shuffle", &value, sizeof(T)), lane_index() ^ lanes);
}
template <typename T>
PATCHCONV_DEVICE T shuffle_from(T value, int lane) {
  return brought<T>(host_cuda::warp_exchange("a shuffle", &value, sizeof(T)), lane % kWarp);
}
PATCHCONV_DEVICE uint32_t ballot_of(bool vote) {
  const unsigned char* all = host_cuda::warp_exchange("a ballot", &vote, 1);
  uint32_t result = 0;
  for (int lane = 0; lane < kWarp; ++lane) result |= static_cast<uint32_t>(all[lane] == 1) << lane;
  return result;
}
PATCHCONV_DEVICE uint32_t match_any(uint32_t value) {
  const unsigned char* all = host_cuda::warp_exchange("a match", &value, sizeof(value));
  uint32_t result = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    result |= static_cast<uint32_t>(brought<uint32_t>(all, lane) == value) << lane;
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------
// Asynchronous copies, and products of small matrices: what PTX's manual says of cp.async, ldmatrix and mma

PATCHCONV_DEVICE void copy_async(void* shared, const void* global, int filled = 16) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    throw LaunchError("an asynchronous copy that is not aligned to 16 bytes");
  }
  host_cuda::start_copy(shared, global, 16, static_cast<size_t>(filled));
}
PATCHCONV_DEVICE void commit_copies() { host_cuda::end_copy_group(); }
template <int kPending>
PATCHCONV_DEVICE void wait_for_copies() {
  host_cuda::finish_copies(kPending);
}

template <bool kTransposed>
PATCHCONV_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    throw LaunchError("a matrix row that is not aligned to 16 bytes");
  const unsigned char* all = host_cuda::warp_exchange("ldmatrix", &row, sizeof(row));
  const int line = lane_index() / 4, pair = lane_index() % 4 * 2;
  for (int m = 0; m < 4; ++m) {
    uint32_t both = 0;
    for (int i = 0; i < 2; ++i) {
      const int r = kTransposed ? pair + i : line, c = kTransposed ? line : pair + i;
      const auto* from = static_cast<const uint16_t*>(brought<const void*>(all, 8 * m + r));
      both |= static_cast<uint32_t>(from[c]) << (16 * i);
    }
    to[m] = both;
  }
}

// a (16 x k) times b (k x 8) is added to c (16 x 8): each sum exact in float64, rounded once.
template <int kDepth, typename Element>
PATCHCONV_DEVICE void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         Element element) {
  struct Mine {
    uint32_t a[4], b[2];
  } mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const unsigned char* all = host_cuda::warp_exchange("mma", &mine, sizeof(mine));
  constexpr int kEach = kDepth / 8;  // numbers a register
  const int row = lane_index() / 4, column = lane_index() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int m = row + i / 2 * 8, n = column + i % 2;
    double sum = c[i];
    for (int k = 0; k < kDepth; ++k) {
      const int lane = k / kEach % 4, part = k % kEach, half = k / (4 * kEach);
      const Mine left = brought<Mine>(all, m % 8 * 4 + lane), right = brought<Mine>(all, n * 4 + lane);
      sum += element(left.a[m / 8 + 2 * half], part) * element(right.b[half], part);
    }
    c[i] = static_cast<float>(sum);
  }
}

PATCHCONV_DEVICE float to_float(float x) { return x; }
PATCHCONV_DEVICE uint32_t float_bits(float x) { return std::bit_cast<uint32_t>(x); }
PATCHCONV_DEVICE float bits_float(uint32_t x) { return std::bit_cast<float>(x); }
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

PATCHCONV_DEVICE double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }
PATCHCONV_DEVICE float multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
PATCHCONV_DEVICE float square_root(float x) { return std::sqrt(x); }
PATCHCONV_DEVICE float exponential(float x) { return std::exp(x); }

PATCHCONV_DEVICE void multiply_matrices(Half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_fragments<16>(c, a, b, [](uint32_t both, int part) {
    return static_cast<double>(to_float(Half{static_cast<uint16_t>(both >> (16 * part))}));
  });
}
PATCHCONV_DEVICE void multiply_matrices(BFloat16, float (&c)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  multiply_fragments<16>(c, a, b, [](uint32_t both, int part) {
    return static_cast<double>(to_float(BFloat16{static_cast<uint16_t>(both >> (16 * part))}));
  });
}
// The unit reads the upper 19 bits.
PATCHCONV_DEVICE void multiply_matrices(float, float (&c)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  multiply_fragments<8>(c, a, b, [](uint32_t bits, int) {
    return static_cast<double>(std::bit_cast<float>(bits & 0xffffe000u));
  });
}
PATCHCONV_DEVICE uint32_t to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x || x - x != 0) return bits;  // not a number, infinite
  return (bits + 0x1000u) & 0xffffe000u;
}

PATCHCONV_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

}  // namespace patchconv::kernels
