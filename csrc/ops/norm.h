// Normalisation by channel, in the pieces that batch norm's forward, backward and rebuild are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace patchconv {

using OptionalTensor = std::optional<at::Tensor>;

// patchconv::_batch_statistics: mean and biased variance of every channel (dimension 1), (C) each, in float32
// for half precision.
std::tuple<at::Tensor, at::Tensor> batch_statistics(const at::Tensor& input);

// patchconv::_normalize: (input - mean) * invstd * weight + bias by channel. An element of the result depends
// on its own value and its channel's numbers alone.
at::Tensor normalize(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const at::Tensor& mean, const at::Tensor& invstd);

at::Tensor inverse_deviation(const at::Tensor& var, double eps);

// patchconv::batch_norm, through the dispatcher.
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps);

// Its parts below autograd: the output, and (C) each the mean and variance that it was made with. The running
// statistics are moved if `training`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_parts(const at::Tensor& input,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias,
                                                                const OptionalTensor& running_mean,
                                                                const OptionalTensor& running_var,
                                                                bool training, double momentum, double eps);

}  // namespace patchconv
