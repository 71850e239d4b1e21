// Kernels that exercise the executor, and faults that it must find.
#include "selftest.h"

#include "cuda/kernels/arch.cuh"
#include "cuda/kernels/launch.cuh"

namespace host_cuda {

using namespace patchconv::kernels;

namespace {

constexpr int kThreads = 96;

// Sums of the block's numbers: by shuffles in a warp, then through shared memory.
__global__ void sum_kernel(const float* x, float* y) {
  auto* sums = patchconv::kernels::shared_memory<uint32_t>();
  uint32_t sum = static_cast<uint32_t>(x[block_x() * kThreads + thread_index()]);
  for (int distance = 1; distance < kWarp; distance *= 2) sum += shuffle_xor(sum, distance);
  if (lane_index() == 0) sums[thread_index() / kWarp] = sum;
  patchconv::kernels::block_barrier();
  if (thread_index() == 0) y[block_x()] = static_cast<float>(sums[0] + sums[1] + sums[2]);
}

__global__ void votes_kernel(const float* x, float* y) {
  y[thread_index()] = static_cast<float>(ballot_of(x[thread_index()] > 0));
}

constexpr int kChunk = 32;  // of k, per stage

// Rows of a and b that a stage holds.
template <typename T>
struct Stage {
  T a[16][kChunk];
  T b[kChunk][8];
};

template <typename T>
PATCHCONV_DEVICE void fetch(Stage<T>& to, const T* a, const T* b, int k, int begin) {
  const int lane = lane_index();
  for (int piece = lane; piece < 16 * (kChunk / 8); piece += kWarp) {
    const int row = piece / (kChunk / 8), column = piece % (kChunk / 8) * 8;
    const bool there = begin + column < k;
    copy_async(&to.a[row][column], there ? a + row * k + begin + column : a, there ? 16 : 0);
  }
  const bool there = begin + lane < k;
  copy_async(&to.b[lane][0], there ? b + (begin + lane) * 8 : b, there ? 16 : 0);
  commit_copies();
}

PATCHCONV_DEVICE void store_product(float* c, const float (&sums)[4]) {
  for (int i = 0; i < 4; ++i) {
    c[(lane_index() / 4 + i / 2 * 8) * 8 + lane_index() % 4 * 2 + i % 2] = sums[i];
  }
}

template <typename T>
__global__ void product_kernel(const T* a, const T* b, float* c, int k) {
  auto* stages = patchconv::kernels::shared_memory<Stage<T>>();
  float sums[4] = {};
  fetch(stages[0], a, b, k, 0);
  for (int begin = 0, number = 0; begin < k; begin += kChunk, ++number) {
    fetch(stages[(number + 1) % 2], a, b, k, begin + kChunk);
    wait_for_copies<1>();
    patchconv::kernels::block_barrier();
    const Stage<T>& stage = stages[number % 2];
    const int matrix = lane_index() / 8, row = lane_index() % 8 + matrix % 2 * 8, column = matrix / 2 * 8;
    uint32_t right[4];
    load_matrices<true>(right, &stage.b[lane_index()][0]);
    for (int step = 0; step < 2; ++step) {
      uint32_t left[4];
      load_matrices<false>(left, &stage.a[row][column + 16 * step]);
      const uint32_t half[2] = {right[2 * step], right[2 * step + 1]};
      multiply_matrices(T(), sums, left, half);
    }
    patchconv::kernels::block_barrier();
  }
  wait_for_copies<0>();
  store_product(c, sums);
}

__global__ void product_tf32_kernel(const float* a, const float* b, float* c, int k) {
  const int row = lane_index() / 4, place = lane_index() % 4;
  float sums[4] = {};
  for (int begin = 0; begin < k; begin += 8) {
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; ++i) left[i] = to_tf32(a[(row + i % 2 * 8) * k + begin + place + i / 2 * 4]);
    for (int i = 0; i < 2; ++i) right[i] = to_tf32(b[(begin + place + i * 4) * 8 + row]);
    multiply_matrices(float(), sums, left, right);
  }
  store_product(c, sums);
}

__global__ void fault_kernel(Fault fault, float* y) {
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
    case Fault::kNoWait:
      if (thread_index() < 24) copy_async(shared + 4 * thread_index(), y + 4 * thread_index());
      commit_copies();
      patchconv::kernels::block_barrier();
      y[thread_index()] = shared[thread_index()];
      patchconv::kernels::block_barrier();
      wait_for_copies<0>();
      break;
    case Fault::kOperations:
      if (lane_index() < 8) {
        y[0] = static_cast<float>(shuffle_xor(1u, 1));
      } else {
        y[0] = static_cast<float>(ballot_of(true));
      }
      break;
  }
}

}  // namespace

void launch_sum(const float* x, float* y, int64_t blocks) {
  launch(sum_kernel, {blocks}, kThreads, 3 * sizeof(uint32_t), nullptr, x, y);
}

void launch_votes(const float* x, float* y) { launch(votes_kernel, {1}, kWarp, 0, nullptr, x, y); }

void launch_product(Type type, const void* a, const void* b, float* c, int k) {
  const auto start = [&](auto kernel, auto t) {
    using T = decltype(t);
    launch(kernel, {1}, kWarp, 2 * sizeof(Stage<T>), nullptr, static_cast<const T*>(a),
           static_cast<const T*>(b), c, k);
  };
  if (type == Type::kHalf) return start(product_kernel<Half>, Half());
  if (type == Type::kBFloat16) return start(product_kernel<BFloat16>, BFloat16());
  launch(product_tf32_kernel, {1}, kWarp, 0, nullptr, static_cast<const float*>(a),
         static_cast<const float*>(b), c, k);
}

void launch_fault(Fault fault, float* y) {
  launch(fault_kernel, {1}, kThreads, kThreads * sizeof(float), nullptr, fault, y);
}

}  // namespace host_cuda
