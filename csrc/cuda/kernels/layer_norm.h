// Layer norm over the last dimension, on the device: rows of `columns` elements that follow each other, each
// with a mean and a deviation of its own. So are pixels in channels_last. Statistics and parameters are
// float32.
#pragma once

#include <cstdint>

#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

struct LayerNorm {
  int64_t rows = 0, columns = 0;
  const float* weight = nullptr;  // columns; nothing: 1
  const float* bias = nullptr;    // columns; nothing: 0
  float eps = 0;
};

// y, and of each row the mean and 1 / sqrt(var + eps).
void launch_layer_norm(Type type, const LayerNorm& norm, const void* x, void* y, float* mean, float* rstd,
                       Stream stream);

// Gradients. What is null is not computed.
struct LayerNormBackward {
  const void* grad = nullptr;
  const void* x = nullptr;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  float* workspace = nullptr;  // layer_norm_workspace() floats, for the parameters' gradients
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
};
int64_t layer_norm_workspace(Type type, const LayerNorm& norm);
void launch_layer_norm_backward(Type type, const LayerNorm& norm, const LayerNormBackward& call,
                                Stream stream);

}  // namespace patchconv::kernels
