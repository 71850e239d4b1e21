// Normalisation by channel or group, in the parts that forward, backward and rebuild share. With an
// activation (core/norm.h) the value before the activation is not saved: backward computes it again.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "core/norm.h"
#include "ops/optional.h"

namespace patchconv {

// ---------------------------------------------------------------------------------------------------------
// By channel, over all images. Statistics are (C), in float32 for half precision.

// patchconv::_batch_statistics: mean and biased variance; updates the running ones that are given.
std::tuple<at::Tensor, at::Tensor> batch_statistics(const at::Tensor& input,
                                                    const OptionalTensor& running_mean,
                                                    const OptionalTensor& running_var, double momentum);
std::tuple<at::Tensor, at::Tensor> batch_statistics_with_aten(const at::Tensor& input,
                                                              const OptionalTensor& running_mean,
                                                              const OptionalTensor& running_var,
                                                              double momentum);
void move_running(const OptionalTensor& running, const at::Tensor& now, double momentum, double factor);

// patchconv::instance_norm: a view of the result of patchconv::batch_norm.
at::Tensor instance_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& running_mean, const OptionalTensor& running_var,
                         bool use_input_stats, double momentum, double eps);

// patchconv::_normalize: activation((input - mean) / sqrt(var + eps) * weight + bias). An element of the
// result depends only on its own value and on its channel's numbers.
at::Tensor normalize(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const at::Tensor& mean, const at::Tensor& var, double eps, Activation activation);
at::Tensor normalize_with_aten(const at::Tensor& input, const OptionalTensor& weight,
                               const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& var,
                               double eps, int64_t activation);

// patchconv::_normalize_masked: the same with ReLU, and its bits (core/mask.h).
std::tuple<at::Tensor, at::Tensor> normalize_masked(const at::Tensor& input, const OptionalTensor& weight,
                                                    const OptionalTensor& bias, const at::Tensor& mean,
                                                    const at::Tensor& var, double eps);

std::tuple<at::Tensor, at::Tensor> normalize_masked_with_aten(const at::Tensor& input,
                                                              const OptionalTensor& weight,
                                                              const OptionalTensor& bias,
                                                              const at::Tensor& mean, const at::Tensor& var,
                                                              double eps);

// patchconv::_batch_norm_backward: gradients of normalize(). `training`: also through the statistics, which
// are then those of the input.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of input, weight and bias
Gradients batch_norm_backward(const at::Tensor& grad, const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& var,
                              bool training, double eps, Activation activation, std::array<bool, 3> mask);
Gradients batch_norm_backward_with_aten(const at::Tensor& grad, const at::Tensor& input,
                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                        const at::Tensor& mean, const at::Tensor& var, bool training,
                                        double eps, int64_t activation, std::array<bool, 3> mask);

// patchconv::_batch_norm_backward_: the same, with the input's gradient written over `grad`. On the CPU it
// allocates only the parameters' gradients, which are returned.
std::tuple<at::Tensor, at::Tensor> batch_norm_backward_(at::Tensor grad, const at::Tensor& input,
                                                        const OptionalTensor& weight,
                                                        const OptionalTensor& bias, const at::Tensor& mean,
                                                        const at::Tensor& var, bool training, double eps,
                                                        bool relu, std::array<bool, 2> mask);

std::tuple<at::Tensor, at::Tensor> batch_norm_backward_with_aten_(
    at::Tensor& grad, const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const at::Tensor& mean, const at::Tensor& var, bool training, double eps, bool relu,
    std::array<bool, 2> mask);

at::Tensor inverse_deviation(const at::Tensor& var, double eps);

// The result of batch norm below autograd.
struct BatchNormed {
  at::Tensor y;
  at::Tensor mean, var;  // the statistics it was computed with
  at::Tensor bits;       // ReLU's, if asked for
};
// patchconv::batch_norm or batch_norm_relu. The running statistics are updated if `training`.
BatchNormed batch_norm_parts(const at::Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, bool training, double momentum, double eps,
                             Activation activation, bool with_bits);

// patchconv::batch_norm, through the dispatcher.
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps);

// ---------------------------------------------------------------------------------------------------------
// By group of channels, in each image. Statistics have stock's form: (N, G), mean and 1 / sqrt(var + eps).

// patchconv::_group_norm: y, mean, 1 / sqrt(var + eps).
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_parts(const at::Tensor& input,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias, int64_t groups,
                                                                double eps, Activation activation);
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_with_aten(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t groups,
    double eps, int64_t activation, std::optional<at::ScalarType> statistics);
// patchconv::_group_norm_again: y, from the statistics of the forward pass.
at::Tensor group_norm_again(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                            const at::Tensor& mean, const at::Tensor& rstd, int64_t groups, double eps,
                            Activation activation);
// patchconv::_group_norm_backward.
Gradients group_norm_backward(const at::Tensor& grad, const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& rstd,
                              int64_t groups, double eps, Activation activation, std::array<bool, 3> mask);
Gradients group_norm_backward_with_aten(const at::Tensor& grad, const at::Tensor& input,
                                        const OptionalTensor& weight, const OptionalTensor& bias,
                                        const at::Tensor& mean, const at::Tensor& rstd, int64_t groups,
                                        double eps, int64_t activation, std::array<bool, 3> mask);

// ---------------------------------------------------------------------------------------------------------
// Over the last dimensions

// patchconv::_layer_norm: y, mean, 1 / sqrt(var + eps), as stock's native_layer_norm gives them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_parts(const at::Tensor& input,
                                                                c10::SymIntArrayRef shape,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias, double eps);
// patchconv::_layer_norm_backward.
Gradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input, c10::SymIntArrayRef shape,
                              const at::Tensor& mean, const at::Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, std::array<bool, 3> mask);

// Stock PyTorch's operator for an activation; in place.
at::Tensor stock_activation(const at::Tensor& z, Activation activation);
at::Tensor& activate_(at::Tensor& z, int64_t activation);

}  // namespace patchconv
