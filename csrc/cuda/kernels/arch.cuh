// The building blocks of device code: thread indices, barriers and exchanges of a warp and a block, number
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
// Indices of threads and blocks

PATCHCONV_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PATCHCONV_DEVICE int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
PATCHCONV_DEVICE int64_t block_x() { return blockIdx.x; }
PATCHCONV_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }

// The block's shared memory. The launch sets its size.
template <typename T>
PATCHCONV_DEVICE T* shared_memory() {
  extern __shared__ __align__(128) unsigned char raw_shared_memory[];
  return reinterpret_cast<T*>(raw_shared_memory);
}

// Accesses to 16 bytes of global memory, aligned to them. The compiler splits some stores of larger types.
PATCHCONV_DEVICE void store_words(void* p, const uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}
PATCHCONV_DEVICE void load_words(uint32_t (&words)[4], const void* p) {
  const uint4 all = *static_cast<const uint4*>(p);
  words[0] = all.x;
  words[1] = all.y;
  words[2] = all.z;
  words[3] = all.w;
}

// ---------------------------------------------------------------------------------------------------------
// Barriers and exchanges: all threads of the warp or of the block must take part

PATCHCONV_DEVICE void block_barrier() { __syncthreads(); }
PATCHCONV_DEVICE void warp_barrier() { __syncwarp(); }
template <typename T>
PATCHCONV_DEVICE T shuffle_xor(T value, int lanes) {
  return __shfl_xor_sync(0xffffffffu, value, lanes);
}
// What lane `lane` passes.
template <typename T>
PATCHCONV_DEVICE T shuffle_from(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
// One bit per lane: the lanes that vote true.
PATCHCONV_DEVICE uint32_t ballot_of(bool vote) { return __ballot_sync(0xffffffffu, vote); }

// ---------------------------------------------------------------------------------------------------------
// Asynchronous copies of 16 bytes to shared memory. Bytes beyond `filled` become zeros. A copy is complete
// when its thread has waited for its group; other threads see it behind a barrier after that.

PATCHCONV_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

PATCHCONV_DEVICE void copy_async(void* shared, const void* global, int filled = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(filled)
               : "memory");
}
// Zeros in place of the bytes if `there` is 0: then nothing is read.
PATCHCONV_DEVICE void copy_async_where(void* shared, const void* global, uint32_t there) {
  asm volatile(
      "{\n"
      ".reg .pred absent;\n"
      "setp.eq.u32 absent, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, absent;\n"
      "}" ::"r"(shared_address(shared)),
      "l"(global), "r"(there)
      : "memory");
}
// Four bytes of them.
PATCHCONV_DEVICE void copy_word_async_where(void* shared, const void* global, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(there ? 4 : 0)
               : "memory");
}
PATCHCONV_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending groups are incomplete.
template <int kPending>
PATCHCONV_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---------------------------------------------------------------------------------------------------------
// Products of small matrices by a warp: c (16 x 8) += a (16 x k) b (k x 8). Lane l holds
//   of a: rows l / 4 and l / 4 + 8;
//   of b: column l / 4;
//   of c: the rows of a, columns l % 4 * 2 and the next;
// and of k, in each half, the pair (half precision, k = 16) or the number (tf32, k = 8) with index l % 4.

// Loads four matrices of 8 x 8 halves: lane 8 m + r gives the address of row r of matrix m. Lane l gets, of
// each matrix, two neighbours of row l / 4 or, transposed, of column l / 4.
template <bool kTransposed>
PATCHCONV_DEVICE void load_matrices(uint32_t (&to)[4], const void* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// c += a b. The type of the first argument is that of the numbers in the registers; float stands for tf32.
#define PATCHCONV_MMA(TYPE, INSTRUCTION)                                                                   \
  PATCHCONV_DEVICE void multiply_matrices(TYPE, float (&c)[4], const uint32_t (&a)[4],                     \
                                          const uint32_t (&b)[2]) {                                        \
    asm("mma.sync.aligned." INSTRUCTION " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
  }
PATCHCONV_MMA(Half, "m16n8k16.row.col.f32.f16.f16.f32")
PATCHCONV_MMA(BFloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
PATCHCONV_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef PATCHCONV_MMA

// Rounded to nearest, ties away from zero.
PATCHCONV_DEVICE uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// ---------------------------------------------------------------------------------------------------------
// Number formats. Half precision is stored as bits; arithmetic is in float.

PATCHCONV_DEVICE float to_float(float x) { return x; }
PATCHCONV_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
PATCHCONV_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
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

// Two of them, the first in the lower half.
PATCHCONV_DEVICE uint32_t pair_of(Half, float x, float y) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
}
PATCHCONV_DEVICE uint32_t pair_of(BFloat16, float x, float y) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
  return both;
}

// The larger number; NaN if one is.
PATCHCONV_DEVICE float larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// A product and a sum that are never fused into a multiply-add, which rounds once where stock rounds twice.
PATCHCONV_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
PATCHCONV_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }

// Rounded once.
PATCHCONV_DEVICE double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
PATCHCONV_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
PATCHCONV_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
PATCHCONV_DEVICE float exponential(float x) { return expf(x); }

// The same number, which the compiler keeps instead of computing it again where it is used.
PATCHCONV_DEVICE int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The high half of a product.
PATCHCONV_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

}  // namespace patchconv::kernels
