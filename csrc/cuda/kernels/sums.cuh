// The two sums that gradients of norms are made of, over threads and over parts.
#pragma once

#include "cuda/kernels/norm.cuh"

namespace patchconv::kernels {

// Over some elements: of the gradient of z, and of its product with x - mean.
struct Sums {
  float grad, product;
};

PATCHCONV_DEVICE Sums added(const Sums& a, const Sums& b) { return {a.grad + b.grad, a.product + b.product}; }

PATCHCONV_DEVICE Sums from_lane(const Sums& mine, int distance) {
  return {shuffle_xor(mine.grad, distance), shuffle_xor(mine.product, distance)};
}

// Puts the sums of a block of pixels together, and stores them as part [image][chunk][channel].
template <int kCount>
PATCHCONV_DEVICE void store_block_sums(const NormSizes& n, const Pixels& pixels, const PixelPart& part,
                                       const Sums (&all)[kCount], Sums* out) {
  const int down = kNormThreads / pixels.across;
  // [row][channel] of the block; each channel's are put together by one thread.
  const int width = pixels.across * kCount;
  Sums* sums = shared_memory<Sums>();
  const int row = thread_index() / pixels.across, across = thread_index() % pixels.across;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[row * width + across * kCount + i] = all[i];
  block_barrier();
  for (int k = thread_index(); k < width; k += kNormThreads) {
    const int64_t channel = static_cast<int64_t>(block_y()) * width + k;
    if (channel >= n.channels) break;
    Sums total = sums[k];
    for (int r = 1; r < down; ++r) total = added(total, sums[r * width + k]);
    out[(part.image * pixels.chunks + part.chunk) * n.channels + channel] = total;
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
