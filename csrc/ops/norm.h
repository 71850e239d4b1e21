// Normalisation by channel or group, in the parts that forward, backward and rebuild share. With an
// activation (core/norm.h) the value before the activation is not saved: backward computes it again.
//
// As for the convolutions (ops/conv.h), an implementation is a type with static functions in terms of a
// NormMap, and NormSignatures joins it to the operators' signatures.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "core/norm.h"
#include "ops/optional.h"

namespace patchconv {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of input, weight and bias
using ThreeTensors = Gradients;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// How an input is normalised: activation((input - mean) / sqrt(var + eps) * weight + bias). Non-owning, like
// the arguments of a call.
struct NormMap {
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  // By channel, over all images: (C), in float32 for half precision. By group, in each image: (N, G), of
  // which `var` is 1 / sqrt(var + eps), as stock has it.
  const at::Tensor& mean;
  const at::Tensor& var;
  int64_t groups = 0;  // 0: by channel
  double eps = 0;
  Activation activation = Activation::kNone;
};

inline Activation checked_activation(int64_t activation) {
  TORCH_CHECK(activation >= 0 && activation <= 2, "patchconv: expected an activation of 0, 1 or 2, got ",
              activation);
  return static_cast<Activation>(activation);
}

template <typename Room>
struct NormSignatures {
  static at::Tensor normalize(const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& var,
                              int64_t groups, double eps, int64_t activation) {
    return Room::normalize(input, {weight, bias, mean, var, groups, eps, checked_activation(activation)});
  }
  static TwoTensors normalize_masked(const at::Tensor& input, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const at::Tensor& mean,
                                     const at::Tensor& var, double eps) {
    return Room::normalize_masked(input, {weight, bias, mean, var, 0, eps});
  }
  static Gradients backward(const at::Tensor& grad, const at::Tensor& input, const OptionalTensor& weight,
                            const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& var,
                            int64_t groups, double eps, int64_t activation, bool training,
                            std::array<bool, 3> mask) {
    return Room::backward(grad, input, {weight, bias, mean, var, groups, eps, checked_activation(activation)},
                          training, mask);
  }
  static TwoTensors backward_(at::Tensor& grad, const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& var,
                              double eps, bool relu, bool training, std::array<bool, 2> mask) {
    const auto activation = relu ? Activation::kRelu : Activation::kNone;
    return Room::backward_(grad, input, {weight, bias, mean, var, 0, eps, activation}, training, mask);
  }
};

// By stock operators, for devices, dtypes and backends without a kernel here.
struct NormWithAten {
  static at::Tensor normalize(const at::Tensor& input, const NormMap& map);
  static TwoTensors normalize_masked(const at::Tensor& input, const NormMap& map);
  static Gradients backward(const at::Tensor& grad, const at::Tensor& input, const NormMap& map,
                            bool training, std::array<bool, 3> mask);
  static TwoTensors backward_(at::Tensor& grad, const at::Tensor& input, const NormMap& map, bool training,
                              std::array<bool, 2> mask);
  static TwoTensors batch_statistics(const at::Tensor& input, const OptionalTensor& running_mean,
                                     const OptionalTensor& running_var, double momentum);
  static ThreeTensors group_norm(const at::Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& bias, int64_t groups, double eps, int64_t activation,
                                 std::optional<at::ScalarType> statistics);
};

// ---------------------------------------------------------------------------------------------------------
// The internal operators, through the dispatcher.

// patchconv::_batch_statistics: mean and biased variance; updates the running ones that are given.
TwoTensors batch_statistics(const at::Tensor& input, const OptionalTensor& running_mean,
                            const OptionalTensor& running_var, double momentum);

// patchconv::_group_norm: y, mean, 1 / sqrt(var + eps).
ThreeTensors group_norm_parts(const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, int64_t groups, double eps, Activation activation);

// patchconv::_normalize. An element of the result depends only on its own value and on the numbers of its
// channel or group.
at::Tensor normalize(const at::Tensor& input, const NormMap& map);

// patchconv::_normalize_masked: the same with ReLU, by channel, and its bits (core/mask.h).
TwoTensors normalize_masked(const at::Tensor& input, const NormMap& map);

// patchconv::_norm_backward: gradients of normalize(). `training`: also through the statistics, which are
// then those of the input.
Gradients norm_backward(const at::Tensor& grad, const at::Tensor& input, const NormMap& map, bool training,
                        std::array<bool, 3> mask);

// patchconv::_batch_norm_backward_: the same by channel, with the input's gradient written over `grad`. On
// the CPU it allocates only the parameters' gradients, which are returned.
TwoTensors batch_norm_backward_(at::Tensor grad, const at::Tensor& input, const NormMap& map, bool training,
                                std::array<bool, 2> mask);

// patchconv::_layer_norm: y, mean, 1 / sqrt(var + eps), as stock's native_layer_norm gives them.
ThreeTensors layer_norm_parts(const at::Tensor& input, c10::SymIntArrayRef shape,
                              const OptionalTensor& weight, const OptionalTensor& bias, double eps);
// patchconv::_layer_norm_backward.
Gradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input, c10::SymIntArrayRef shape,
                              const at::Tensor& mean, const at::Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, std::array<bool, 3> mask);

// ---------------------------------------------------------------------------------------------------------
// Whole norms

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

// patchconv::instance_norm: a view of the result of patchconv::batch_norm.
at::Tensor instance_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& running_mean, const OptionalTensor& running_var,
                         bool use_input_stats, double momentum, double eps);

void move_running(const OptionalTensor& running, const at::Tensor& now, double momentum, double factor);
at::Tensor inverse_deviation(const at::Tensor& var, double eps);
// Stock PyTorch's operator for an activation; in place.
at::Tensor& activate_(at::Tensor& z, Activation activation);
at::Tensor stock_activation(const at::Tensor& z, Activation activation);

}  // namespace patchconv
