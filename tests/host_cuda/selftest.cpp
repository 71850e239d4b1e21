// Kernels that show the executor at work, and faults that it must find.
#include "selftest.h"

#include "cuda/kernels/arch.cuh"
#include "cuda/kernels/launch.cuh"

namespace host_cuda {

using namespace patchconv::kernels;

namespace {

constexpr int kThreads = 96;

// Sums of the block's numbers: by shuffles in a warp, then through shared memory.
void sum_kernel(const float* x, float* y) {
  auto* sums = patchconv::kernels::shared_memory<uint32_t>();
  uint32_t sum = static_cast<uint32_t>(x[block_x() * kThreads + thread_index()]);
  for (int distance = 1; distance < kWarp; distance *= 2) sum += shuffle_xor(sum, distance);
  if (lane_index() == 0) sums[thread_index() / kWarp] = sum;
  patchconv::kernels::block_barrier();
  if (thread_index() == 0) y[block_x()] = static_cast<float>(sums[0] + sums[1] + sums[2]);
}

void fault_kernel(Fault fault, float* y) {
  auto* shared = patchconv::kernels::shared_memory<float>();
  switch (fault) {
    case Fault::kBarrierInBranch:
      if (thread_index() < 40) patchconv::kernels::block_barrier();
      break;
    case Fault::kShuffleInBranch:
      if (lane_index() < 8) y[0] = static_cast<float>(shuffle_xor(1u, 1));
      break;
    case Fault::kBesideShared:
      shared[kThreads] = 1;
      break;
    case Fault::kBesideGlobal:
      y[kThreads] = 1;
      break;
    case Fault::kUnwrittenShared:
      y[thread_index()] = shared[thread_index()];
      break;
  }
}

}  // namespace

void launch_sum(const float* x, float* y, int64_t blocks) {
  launch(sum_kernel, {blocks}, kThreads, 3 * sizeof(uint32_t), nullptr, x, y);
}

void launch_fault(Fault fault, float* y) {
  launch(fault_kernel, {1}, kThreads, kThreads * sizeof(float), nullptr, fault, y);
}

}  // namespace host_cuda
