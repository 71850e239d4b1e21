// The two sums that the gradients of norms need, over threads and over parts.
#pragma once

#include "cuda/kernels/norm.cuh"

namespace patchconv::kernels {

// Sums over some elements: of the gradient of z, and of its product with x - mean.
struct Sums {
  float grad, product;
};

PATCHCONV_DEVICE Sums added(const Sums& a, const Sums& b) { return {a.grad + b.grad, a.product + b.product}; }

PATCHCONV_DEVICE Sums from_lane(const Sums& mine, int distance) {
  return {shuffle_xor(mine.grad, distance), shuffle_xor(mine.product, distance)};
}

// Adds up the sums of a block of pixels by halves, and stores them as part [image][chunk][channel].
template <int kCount>
PATCHCONV_DEVICE void store_block_sums(const NormSizes& n, const Pixels& pixels, const PixelPart& part,
                                       Sums (&all)[kCount], Sums* out) {
  const int width = pixels.across * kCount;
  Sums* sums = shared_memory<Sums>();
  const int row = thread_index() / pixels.across, across = thread_index() % pixels.across;
  for (int half = kNormThreads / pixels.across / 2; half > 0; half /= 2) {
    if (row >= half && row < 2 * half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[row * width + across * kCount + i] = all[i];
    }
    block_barrier();
    if (row < half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        all[i] = added(all[i], sums[(row + half) * width + across * kCount + i]);
      }
    }
  }
  if (row != 0) return;
  Sums* to = out + (part.image * pixels.chunks + part.chunk) * n.channels + part.channel;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < part.left) to[i] = all[i];
  }
}

constexpr int kFinishThreads = 256;

// Sums of `terms(i)` over i = 0 .. count - 1 by one warp, in float64, in a fixed order.
struct Total {
  double grad = 0, product = 0;
};
template <typename Terms>
PATCHCONV_DEVICE Total warp_total(int64_t count, Terms terms) {
  Total all;
  for (int64_t i = lane_index(); i < count; i += kWarp) {
    const Total term = terms(i);
    all.grad += term.grad;
    all.product += term.product;
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    all.grad += shuffle_xor(all.grad, distance);
    all.product += shuffle_xor(all.product, distance);
  }
  return all;
}

PATCHCONV_DEVICE int64_t warp_number() {
  return block_x() * (kFinishThreads / kWarp) + thread_index() / kWarp;
}

}  // namespace patchconv::kernels
