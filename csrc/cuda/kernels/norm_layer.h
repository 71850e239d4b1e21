// Layer norm over the last dimension, on the device: contiguous rows of `columns` elements, each with a mean
// and a deviation of its own. The pixels of a channels_last tensor are such rows. Statistics and parameters
// are float32.
#pragma once

#include <cstdint>

#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

struct LayerNorm {
  int64_t rows = 0, columns = 0;
  const float* weight = nullptr;  // `columns` of them; null: 1
  const float* bias = nullptr;    // `columns` of them; null: 0
  float eps = 0;
};

// y, and of each row the mean and 1 / sqrt(var + eps).
void launch_layer_norm(Type type, const LayerNorm& norm, const void* x, void* y, float* mean, float* rstd,
                       Stream stream);

// Gradients. Those that are null are not computed.
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
