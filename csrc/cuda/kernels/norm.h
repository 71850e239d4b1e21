// Batch, instance and group norm on the device, with an activation in the same pass (core/norm.h). Statistics
// and parameters are float32. Sums are float32 within a part and float64 over parts, in an order that depends
// on the shape alone.
#pragma once

#include <cstdint>

#include "core/norm.h"
#include "cuda/kernels/stream.h"

namespace patchconv::kernels {

// z = (x - mean) / sqrt(var + eps) * weight + bias.
struct NormAffine {
  const float* mean = nullptr;
  const float* var = nullptr;
  const float* weight = nullptr;  // null: 1
  const float* bias = nullptr;    // null: 0
  float eps = 0;
  bool inverse = false;  // `var` holds 1 / sqrt(var + eps)
};

// The mean and the biased variance of the elements that share them. For batch norm the running statistics are
// updated with `momentum` if they are given, the variance with the unbiased one.
struct NormStatistics {
  const void* x = nullptr;
  float* workspace = nullptr;  // norm_statistics_workspace() floats
  float* mean = nullptr;
  float* var = nullptr;
  float* running_mean = nullptr;
  float* running_var = nullptr;
  float momentum = 0;
  float eps = 0;
  bool inverse = false;  // `var` gets 1 / sqrt(var + eps)
};
// Whether there are few enough channels: about 8 million in channels_last.
bool serves(Type type, const NormShape& shape);
int64_t norm_statistics_workspace(Type type, const NormShape& shape);
void launch_norm_statistics(Type type, const NormShape& shape, const NormStatistics& call, Stream stream);

// y = activation(z): one read and one write. y may be x.
void launch_norm_map(Type type, const NormShape& shape, const NormAffine& affine, Activation activation,
                     const void* x, void* y, Stream stream);

// The same for a norm by channel with ReLU, and one bit per element (core/mask.h). `workspace`: one float per
// channel.
void launch_norm_mask(Type type, const NormShape& shape, const NormAffine& affine, float* workspace,
                      const void* x, void* y, uint8_t* bits, Stream stream);

// Gradients of launch_norm_map's y. `training`: also through the statistics, which are then those of x. Those
// that are null are not computed.
struct NormBackward {
  const void* grad = nullptr;
  const void* x = nullptr;
  bool training = true;
  float* workspace = nullptr;  // norm_backward_workspace() floats
  void* grad_input = nullptr;
  float* grad_weight = nullptr;
  float* grad_bias = nullptr;
};
int64_t norm_backward_workspace(Type type, const NormShape& shape);
void launch_norm_backward(Type type, const NormShape& shape, const NormAffine& affine, Activation activation,
                          const NormBackward& call, Stream stream);

}  // namespace patchconv::kernels
