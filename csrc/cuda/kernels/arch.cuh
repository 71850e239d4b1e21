// What device code is made of: where a thread is, how the threads of a warp and of a block meet, the number
// formats, and every line of inline PTX. Kernels use these names and no intrinsics of their own, so that the
// same sources run on a CPU (tests/host_cuda has another file of this name, first on the include path).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

#define PATCHCONV_DEVICE __device__ __forceinline__

constexpr int kWarp = 32;

// ---------------------------------------------------------------------------------------------------------
// Where a thread is

PATCHCONV_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PATCHCONV_DEVICE int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
PATCHCONV_DEVICE int64_t block_x() { return blockIdx.x; }
PATCHCONV_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }

// The block's shared memory, of the size that the launch asked for.
template <typename T>
PATCHCONV_DEVICE T* shared_memory() {
  extern __shared__ __align__(128) unsigned char raw_shared_memory[];
  return reinterpret_cast<T*>(raw_shared_memory);
}

// ---------------------------------------------------------------------------------------------------------
// How threads meet: all of a warp or of a block, none left out

PATCHCONV_DEVICE void block_barrier() { __syncthreads(); }
template <typename T>
PATCHCONV_DEVICE T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}

// ---------------------------------------------------------------------------------------------------------
// Number formats. Half precision is bits; arithmetic is in float.

PATCHCONV_DEVICE float to_float(float x) { return x; }
PATCHCONV_DEVICE float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
PATCHCONV_DEVICE float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

constexpr float kInfinity = __builtin_huge_valf();

// Rounded to nearest even.
template <typename T>
PATCHCONV_DEVICE T from_float(float x);
template <>
PATCHCONV_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
PATCHCONV_DEVICE Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
PATCHCONV_DEVICE BFloat16 from_float<BFloat16>(float x) {
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Products and sums as they are written: no fused multiply-add, whose one rounding is not stock's two.
PATCHCONV_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
PATCHCONV_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }

// Rounded once.
PATCHCONV_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
PATCHCONV_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
PATCHCONV_DEVICE float exponential(float x) { return expf(x); }

// The high half of a product.
PATCHCONV_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

}  // namespace patchconv::kernels
