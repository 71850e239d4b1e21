// The operators for C++ programs. Arguments are those of torch::conv2d and the other convolutions, plus the
// padding mode and the number of pieces (`splits`): nothing for automatic, one number for the first spatial
// dimension, or one per dimension. Gradients are recorded as for any operator of PyTorch.
//
// Input (N, C, [D,] [H,] W) or without N; weight (K, C/groups, ...) for convolutions and (C, K/groups, ...)
// for transposed ones. `padding` takes one number, one per dimension, or (before, after) for each dimension.
// Raises c10::ValueError or c10::TypeError; the message names the operator, the argument, what was expected
// and what was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace patchconv {

#define PATCHCONV_DECLARE(NAME)                                                                  \
  at::Tensor NAME(const at::Tensor& input, const at::Tensor& weight,                             \
                  const std::optional<at::Tensor>& bias = {}, at::IntArrayRef stride = 1,        \
                  at::IntArrayRef padding = 0, at::IntArrayRef dilation = 1, int64_t groups = 1, \
                  std::string_view padding_mode = "zeros", at::OptionalIntArrayRef splits = {})
#define PATCHCONV_DECLARE_TRANSPOSED(NAME)                                                             \
  at::Tensor NAME(const at::Tensor& input, const at::Tensor& weight,                                   \
                  const std::optional<at::Tensor>& bias = {}, at::IntArrayRef stride = 1,              \
                  at::IntArrayRef padding = 0, at::IntArrayRef output_padding = 0, int64_t groups = 1, \
                  at::IntArrayRef dilation = 1, at::OptionalIntArrayRef splits = {})

PATCHCONV_DECLARE(conv1d);
PATCHCONV_DECLARE(conv2d);
PATCHCONV_DECLARE(conv3d);
PATCHCONV_DECLARE_TRANSPOSED(conv_transpose1d);
PATCHCONV_DECLARE_TRANSPOSED(conv_transpose2d);
PATCHCONV_DECLARE_TRANSPOSED(conv_transpose3d);

#undef PATCHCONV_DECLARE
#undef PATCHCONV_DECLARE_TRANSPOSED

}  // namespace patchconv
