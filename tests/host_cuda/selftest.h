// Kernels that show the executor at work, and faults that it must find.
#pragma once

#include <cstdint>

namespace host_cuda {

// y[b]: the sum of the whole numbers x[96 * b] to x[96 * b + 95].
void launch_sum(const float* x, float* y, int64_t blocks);

enum class Fault { kBarrierInBranch, kShuffleInBranch, kBesideShared, kBesideGlobal, kUnwrittenShared };
void launch_fault(Fault fault, float* y);  // y: 96 numbers

}  // namespace host_cuda
