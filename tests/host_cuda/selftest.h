// Kernels that exercise the executor, and faults that it must find.
#pragma once

#include <cstdint>

#include "cuda/kernels/stream.h"

namespace host_cuda {

// y[b]: the sum of the whole numbers x[96 * b] to x[96 * b + 95].
void launch_sum(const float* x, float* y, int64_t blocks);

// y[t], for thread t of a warp: the ballot of whether its x is positive.
void launch_votes(const float* x, float* y);

// c (16 x 8) = a (16 x k) b (k x 8), row-major, by one warp: through shared memory, with asynchronous copies
// in two stages, ldmatrix and mma. k is a multiple of 8 in half precision; float is computed in tf32.
void launch_product(patchconv::kernels::Type type, const void* a, const void* b, float* c, int k);

enum class Fault {
  kBarrierInBranch,
  kShuffleInBranch,
  kBesideShared,
  kBesideGlobal,
  kUnwrittenShared,
  kNoWait,
  kOperations
};
void launch_fault(Fault fault, float* y);  // y: 96 numbers

}  // namespace host_cuda
