// The weight gradient of a pair of tiles as matrix products: for each kernel position, output rows times the
// input rows they met. Needs no buffer besides the sum; accumulates in the tiles' dtype within the BLAS
// library.
#pragma once

#include <ATen/core/Tensor.h>

#include "tiled/conv.h"

namespace patchconv {

// How a tile's weight gradient is computed. oneDNN takes NCHW tensors, in which it is slow, through reordered
// copies. Float32 images in channels_last its AVX-512 kernels take fast and as they are; without those it is
// several times slower there.
enum class WeightGradient {
  kStock,         // as stock does, tiles in NCHW: grouped, or few channels
  kChannelsLast,  // as stock does, tiles in channels_last
  kProducts,      // add_weight_gradient
};
// A fault of oneDNN's AVX-512 kernels, seen in torch 2.14.1, which stock PyTorch shares
// (tests/conv/test_onednn.py): in channels_last, with three threads and more, weight gradients of 1x1 kernels
// under a stride are written past their end where channels do not fill blocks.
bool writes_past_end(const ConvProblem& problem);

WeightGradient weight_gradient_way(const ConvProblem& problem, at::ScalarType dtype);

// big (N, C, ...) with its padding in it and small (N, K, ...), both dense in channels_last; sum (K, C, ...)
// with the matrices of one kernel position dense.
void add_weight_gradient(const at::Tensor& big, const at::Tensor& small, const ConvProblem& problem,
                         const at::Tensor& sum);

}  // namespace patchconv
