// csrc/cuda/kernels/arch.cuh for a CPU: the same names, in plain C++ on top of the executor.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "copies.h"
#include "cuda/kernels/stream.h"
#include "executor.h"
#include "races.h"

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

PATCHCONV_DEVICE void store_words(void* p, const uint32_t (&words)[4]) {
  struct alignas(16) Words {
    uint32_t at[4];
  };
  *static_cast<Words*>(p) = {words[0], words[1], words[2], words[3]};
}
PATCHCONV_DEVICE void load_words(uint32_t (&words)[4], const void* p) {
  struct alignas(16) Words {
    uint32_t at[4];
  };
  const Words all = *static_cast<const Words*>(p);
  std::memcpy(words, all.at, sizeof(words));
}

PATCHCONV_DEVICE void block_barrier() { host_cuda::block_barrier(); }
PATCHCONV_DEVICE void warp_barrier() {
  const char nothing = 0;
  host_cuda::warp_exchange("a warp's barrier", &nothing, 1, nullptr, /*orders_memory=*/true);
}
// The value that lane `from` passed to an exchange.
template <typename T>
PATCHCONV_DEVICE T lane_value(const unsigned char* all, int from) {
  T value;
  std::memcpy(&value, all + sizeof(T) * static_cast<size_t>(from), sizeof(T));
  return value;
}

template <typename T>
PATCHCONV_DEVICE T shuffle_xor(T value, int lanes) {
  return lane_value<T>(host_cuda::warp_exchange("a shuffle", &value, sizeof(T)), lane_index() ^ lanes);
}
template <typename T>
PATCHCONV_DEVICE T shuffle_from(T value, int lane) {
  return lane_value<T>(host_cuda::warp_exchange("a shuffle", &value, sizeof(T)), lane);
}
PATCHCONV_DEVICE uint32_t ballot_of(bool vote) {
  const unsigned char* all = host_cuda::warp_exchange("a ballot", &vote, 1);
  uint32_t result = 0;
  for (int lane = 0; lane < kWarp; ++lane) result |= static_cast<uint32_t>(all[lane] == 1) << lane;
  return result;
}

// ---------------------------------------------------------------------------------------------------------
// Asynchronous copies, and products of small matrices: what PTX's manual says of cp.async, ldmatrix and mma

PATCHCONV_DEVICE void copy_async(void* shared, const void* global, int filled = 16) {
  // An address must be aligned also if nothing is read from it.
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    throw LaunchError("an asynchronous copy that is not aligned to 16 bytes");
  }
  host_cuda::copies().start(shared, global, 16, static_cast<size_t>(filled));
}
PATCHCONV_DEVICE void copy_async_where(void* shared, const void* global, bool there) {
  copy_async(shared, global, there ? 16 : 0);
}
PATCHCONV_DEVICE void copy_word_async_where(void* shared, const void* global, bool there) {
  if (reinterpret_cast<uintptr_t>(shared) % 4 != 0 || reinterpret_cast<uintptr_t>(global) % 4 != 0) {
    throw LaunchError("an asynchronous copy that is not aligned to 4 bytes");
  }
  host_cuda::copies().start(shared, global, 4, there ? 4 : 0);
}
PATCHCONV_DEVICE void commit_copies() { host_cuda::copies().end_group(); }
template <int kPending>
PATCHCONV_DEVICE void wait_for_copies() {
  host_cuda::copies().finish(kPending);
}

template <bool kTransposed>
PATCHCONV_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    throw LaunchError("a matrix row that is not aligned to 16 bytes");
  host_cuda::races::read(row, 16);
  struct Mine {
    const void* row;
    uint32_t to[4];
  } mine{row, {}};
  const unsigned char* all =
      host_cuda::warp_exchange("ldmatrix", &mine, sizeof(mine), [](unsigned char* all) {
        uint16_t rows[kWarp][8];
        auto* lanes = reinterpret_cast<Mine*>(all);
        for (int lane = 0; lane < kWarp; ++lane) std::memcpy(rows[lane], lanes[lane].row, 16);
        for (int lane = 0; lane < kWarp; ++lane) {
          const int line = lane / 4, pair = lane % 4 * 2;
          for (int m = 0; m < 4; ++m) {
            const uint16_t low = kTransposed ? rows[8 * m + pair][line] : rows[8 * m + line][pair];
            const uint16_t high = kTransposed ? rows[8 * m + pair + 1][line] : rows[8 * m + line][pair + 1];
            lanes[lane].to[m] = low | static_cast<uint32_t>(high) << 16;
          }
        }
      });
  std::memcpy(to, lane_value<Mine>(all, lane_index()).to, sizeof(to));
}

// c (16 x 8) += a (16 x k) b (k x 8): each sum is exact in float64 and rounded once. Element turns a register
// and the number of its part into a value.
template <int kDepth, typename Element>
PATCHCONV_DEVICE void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Mine {
    uint32_t a[4], b[2];
    float c[4];
  } mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
  const unsigned char* all = host_cuda::warp_exchange("mma", &mine, sizeof(mine), [](unsigned char* all) {
    constexpr int kEach = kDepth / 8;  // numbers per register
    auto* lanes = reinterpret_cast<Mine*>(all);
    float left[16][kDepth], right[8][kDepth];
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int part = 0; part < kEach; ++part) {
        for (int half = 0; half < 2; ++half) {
          const int k = half * 4 * kEach + lane % 4 * kEach + part;
          left[lane / 4][k] = Element()(lanes[lane].a[2 * half], part);
          left[lane / 4 + 8][k] = Element()(lanes[lane].a[1 + 2 * half], part);
          right[lane / 4][k] = Element()(lanes[lane].b[half], part);
        }
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const float* row = left[lane / 4 + i / 2 * 8];
        const float* column = right[lane % 4 * 2 + i % 2];
        double sum = lanes[lane].c[i];
        for (int k = 0; k < kDepth; ++k) sum += static_cast<double>(row[k]) * column[k];
        lanes[lane].c[i] = static_cast<float>(sum);
      }
    }
  });
  std::memcpy(c, lane_value<Mine>(all, lane_index()).c, sizeof(c));
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
// Every NaN becomes the one that the device gives.
template <>
PATCHCONV_DEVICE Half from_float<Half>(float x) {
  return {x != x ? uint16_t{0x7fff} : std::bit_cast<uint16_t>(static_cast<_Float16>(x))};
}
template <>
PATCHCONV_DEVICE BFloat16 from_float<BFloat16>(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return {x != x ? uint16_t{0x7fff} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <typename T>
PATCHCONV_DEVICE uint32_t pair_of(T, float x, float y) {
  return from_float<T>(x).bits | static_cast<uint32_t>(from_float<T>(y).bits) << 16;
}
PATCHCONV_DEVICE float larger(float x, float y) { return x != x || x > y ? x : y; }

// Compiled with -ffp-contract=off.
PATCHCONV_DEVICE float multiply(float a, float b) { return a * b; }
PATCHCONV_DEVICE float add(float a, float b) { return a + b; }

PATCHCONV_DEVICE double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }
PATCHCONV_DEVICE float multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
PATCHCONV_DEVICE float square_root(float x) { return std::sqrt(x); }
PATCHCONV_DEVICE float exponential(float x) { return std::exp(x); }

template <typename T>
struct PartOf {
  float operator()(uint32_t both, int part) const {
    return to_float(T{static_cast<uint16_t>(both >> (16 * part))});
  }
};
// Tensor cores read the upper 19 bits.
struct UpperBits {
  float operator()(uint32_t bits, int) const { return std::bit_cast<float>(bits & 0xffffe000u); }
};
#define PATCHCONV_MMA(TYPE, DEPTH, ELEMENT)                                            \
  PATCHCONV_DEVICE void multiply_matrices(TYPE, float (&c)[4], const uint32_t (&a)[4], \
                                          const uint32_t (&b)[2]) {                    \
    multiply_fragments<DEPTH, ELEMENT>(c, a, b);                                       \
  }
PATCHCONV_MMA(Half, 16, PartOf<Half>)
PATCHCONV_MMA(BFloat16, 16, PartOf<BFloat16>)
PATCHCONV_MMA(float, 8, UpperBits)
#undef PATCHCONV_MMA
PATCHCONV_DEVICE uint32_t to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x || x - x != 0) return bits;  // not a number, infinite
  return (bits + 0x1000u) & 0xffffe000u;
}

PATCHCONV_DEVICE int kept(int x) { return x; }

PATCHCONV_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

}  // namespace patchconv::kernels
