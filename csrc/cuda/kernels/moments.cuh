// Means and variances, combined from parts.
#pragma once

#include "cuda/kernels/arch.cuh"

namespace patchconv::kernels {

// The mean of `count` numbers, and the sum of squared differences from it.
struct Moments {
  float count, mean, squares;
};

PATCHCONV_DEVICE Moments merged(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  if (count == 0) return a;
  const float delta = b.mean - a.mean, share = b.count / count;
  return {count, multiply_add(delta, share, a.mean),
          multiply_add(delta * a.count * share, delta, a.squares + b.squares)};
}

PATCHCONV_DEVICE Moments from_lane(const Moments& mine, int distance) {
  return {shuffle_xor(mine.count, distance), shuffle_xor(mine.mean, distance),
          shuffle_xor(mine.squares, distance)};
}

}  // namespace patchconv::kernels
