// The weight gradient of a pair of tiles as matrix products: for each kernel position, output rows times the
// input rows that they read. Needs no buffer besides the sum; accumulates in the tiles' dtype within the BLAS
// library.
#pragma once

#include <ATen/core/Tensor.h>

#include "tiled/engine.h"

namespace patchconv {

// How a tile's weight gradient is computed. oneDNN is slow on NCHW tensors, which it reorders first. Its
// AVX-512 kernels are fast on float32 images in channels_last, without a copy; without AVX-512 oneDNN is
// several times slower there.
enum class WeightGradient {
  kStock,         // as stock does, tiles in NCHW: for groups, or few channels
  kChannelsLast,  // as stock does, tiles in channels_last
  kProducts,      // add_weight_gradient
};
// A bug of oneDNN's AVX-512 kernels, seen in torch 2.14.1, which stock PyTorch has too
// (tests/conv/test_onednn.py): in channels_last, with three or more threads, they write weight gradients of
// 1x1 kernels with a stride past the end if channels do not fill blocks.
bool writes_past_end(const ConvProblem& problem);

WeightGradient weight_gradient_way(const ConvProblem& problem, at::ScalarType dtype);

// big (N, C, ...) including its padding and small (N, K, ...), both dense in channels_last; sum (K, C, ...),
// with the matrix of each kernel position dense.
void add_weight_gradient(const at::Tensor& big, const at::Tensor& small, const ConvProblem& problem,
                         const at::Tensor& sum);

}  // namespace patchconv
