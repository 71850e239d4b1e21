// The parts of batch and group norm by stock operators, for devices, dtypes and backends without a kernel
// here, and the calls to them through the dispatcher.
//
// On CUDA the map by channel is stock's elementwise kernel of synchronised batch norm: it takes the
// statistics as arguments, so a rebuild gives the same bits as the forward pass.
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include "core/settings.h"
#include "ops/activation.h"
#include "ops/handle.h"
#include "ops/norm.h"

namespace patchconv {

using at::Tensor;

namespace {

using Mask3 = std::array<bool, 3>;

at::ScalarType statistics_type(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

// The gradient of z, which make(activation) computes again.
template <typename Make>
Tensor before_activation(const Tensor& grad, int64_t activation, Make make) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kNone:
      return grad;
    case Activation::kRelu:
      return at::threshold_backward(grad, make(Activation::kRelu), 0);
    case Activation::kSilu:
      return at::silu_backward(grad, make(Activation::kNone));
  }
  TORCH_CHECK(false, "patchconv: expected an activation of 0, 1 or 2, got ", activation);
}

// Parameters in the dtype of the statistics.
OptionalTensor parameter(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!given(tensor)) return std::nullopt;
  return tensor->scalar_type() == dtype ? *tensor : tensor->to(dtype);
}

Tensor group_norm_again_with_aten(const Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const Tensor& /*mean*/, const Tensor& /*rstd*/,
                                  int64_t groups, double eps, int64_t activation) {
  return std::get<0>(group_norm_with_aten(input, weight, bias, groups, eps, activation, std::nullopt));
}

bool by_native_kernels(const Tensor& x) {
  const auto dtype = x.scalar_type();
  return x.is_cuda() && backend() == Backend::kNative &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

// In its own layout where the device serves that, else contiguous. Called before the dispatcher, where fake
// tensors still know their device.
Tensor laid_out_for_groups(const Tensor& x) {
  const bool keeps_layout = x.is_cpu() || by_native_kernels(x);
  return x.contiguous(keeps_layout ? x.suggest_memory_format() : at::MemoryFormat::Contiguous);
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_batch_statistics", [](const Tensor& input, const OptionalTensor&, const OptionalTensor&, double) {
    const auto options = input.options().dtype(statistics_type(input));
    return std::make_tuple(at::empty_symint({input.sym_size(1)}, options),
                           at::empty_symint({input.sym_size(1)}, options));
  });
  m.impl("_normalize", [](const Tensor& input, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                          const Tensor&, double, int64_t) {
    return at::empty_like(input, input.options().memory_format(input.suggest_memory_format()));
  });
  // Inputs come in a layout that the device serves (laid_out_for_groups).
  m.impl("_group_norm", [](const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           int64_t groups, double eps, int64_t activation,
                           std::optional<at::ScalarType> statistics) {
    auto [y, mean, rstd] = group_norm_with_aten(input, weight, bias, groups, eps, activation, statistics);
    const auto dtype = statistics.value_or(mean.scalar_type());
    return std::make_tuple(at::empty_like(input), mean.to(dtype), rstd.to(dtype));
  });
  m.impl("_group_norm_again",
         [](const Tensor& input, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
            int64_t, double, int64_t) { return at::empty_like(input); });
  m.impl("_group_norm_backward",
         [](const Tensor&, const Tensor& input, const OptionalTensor& weight, const OptionalTensor&,
            const Tensor&, const Tensor&, int64_t, double, int64_t, Mask3 mask) {
           const auto like = given(weight) ? weight->options() : input.options();
           const auto parameter = [&](bool wanted) {
             return wanted ? at::empty_symint({input.sym_size(1)}, like) : Tensor();
           };
           return std::make_tuple(mask[0] ? at::empty_like(input) : Tensor(), parameter(mask[1]),
                                  parameter(mask[2]));
         });
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_batch_statistics", &batch_statistics_with_aten);
  m.impl("_normalize", &normalize_with_aten);
  m.impl("_normalize_masked", &normalize_masked_with_aten);
  m.impl("_batch_norm_backward", &batch_norm_backward_with_aten);
  m.impl("_batch_norm_backward_", &batch_norm_backward_with_aten_);
  m.impl("_group_norm", &group_norm_with_aten);
  m.impl("_group_norm_again", &group_norm_again_with_aten);
  m.impl("_group_norm_backward", &group_norm_backward_with_aten);
  m.impl("_layer_norm", TORCH_FN(at::native_layer_norm_symint));
  m.impl("_layer_norm_backward", TORCH_FN(at::native_layer_norm_backward_symint));
}

}  // namespace

Tensor& activate_(Tensor& z, int64_t activation) {
  switch (static_cast<Activation>(activation)) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return at::relu_(z);
    case Activation::kSilu:
      return at::silu_(z);
  }
  TORCH_CHECK(false, "patchconv: expected an activation of 0, 1 or 2, got ", activation);
}

Tensor stock_activation(const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return at::relu(z);
    case Activation::kSilu:
      return at::silu(z);
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Rounded once, since its error scales a whole channel.
Tensor inverse_deviation(const Tensor& var, double eps) {
  return var.to(at::kDouble).add(eps).rsqrt_().to(var.scalar_type());
}

void move_running(const OptionalTensor& running, const Tensor& now, double momentum, double factor) {
  if (!given(running)) return;
  Tensor all = *running;
  all.mul_(1 - momentum).add_(now.to(all.scalar_type()), momentum * factor);
}

Tensor normalize_with_aten(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           const Tensor& mean, const Tensor& var, double eps, int64_t activation) {
  const Tensor invstd = inverse_deviation(var, eps);
  Tensor y;
  if (input.is_cuda()) {
    y = at::batch_norm_elemt(input, weight, bias, mean, invstd, /*eps=*/0);
  } else {
    std::vector<int64_t> shape(input.dim(), 1);
    shape[1] = -1;
    const Tensor scale = given(weight) ? invstd.mul(*weight) : invstd;
    Tensor shift = mean.mul(scale).neg_();
    if (given(bias)) shift.add_(*bias);
    y = input.mul(scale.view(shape)).add_(shift.view(shape)).to(input.scalar_type());
  }
  return activate_(y, activation);
}

std::tuple<Tensor, Tensor> batch_statistics_with_aten(const Tensor& input, const OptionalTensor& running_mean,
                                                      const OptionalTensor& running_var, double momentum) {
  std::vector<int64_t> over{0};
  for (int64_t d = 2; d < input.dim(); ++d) over.push_back(d);
  const auto [var, mean] = at::var_mean(input.to(statistics_type(input)), over, /*unbiased=*/false);
  const auto count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
  move_running(running_mean, mean, momentum, 1);
  move_running(running_var, var, momentum, count / std::max(1.0, count - 1));
  return {mean, var};
}

std::tuple<Tensor, Tensor> normalize_masked_with_aten(const Tensor& input, const OptionalTensor& weight,
                                                      const OptionalTensor& bias, const Tensor& mean,
                                                      const Tensor& var, double eps) {
  Tensor y = normalize(input, weight, bias, mean, var, eps, Activation::kNone);
  Tensor bits = mask_forward_(y, Mask::kRelu, 0, 0);
  return {std::move(y), std::move(bits)};
}

Gradients batch_norm_backward_with_aten(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& bias, const Tensor& mean, const Tensor& var,
                                        bool training, double eps, int64_t activation, Mask3 mask) {
  const Tensor g = before_activation(grad, activation, [&](Activation what) {
    return normalize(input, weight, bias, mean, var, eps, what);
  });
  // Parameters in the dtype of the statistics: with parameters in half precision, stock would want statistics
  // in half precision too.
  const OptionalTensor scale = parameter(weight, mean.scalar_type());
  if (training) {
    return at::native_batch_norm_backward(g, input, scale, {}, {}, mean, inverse_deviation(var, eps), true,
                                          eps, mask);
  }
  // On CUDA stock wants the statistics of a batch even where there are none: empty, as its forward pass
  // returns them.
  const Tensor none = at::empty({0}, mean.options());
  return at::native_batch_norm_backward(g, input, scale, mean, var, none, none, false, eps, mask);
}

std::tuple<Tensor, Tensor> batch_norm_backward_with_aten_(Tensor& grad, const Tensor& input,
                                                          const OptionalTensor& weight,
                                                          const OptionalTensor& bias, const Tensor& mean,
                                                          const Tensor& var, bool training, double eps,
                                                          bool relu, std::array<bool, 2> mask) {
  const auto activation = static_cast<int64_t>(relu ? Activation::kRelu : Activation::kNone);
  auto [grad_input, grad_weight, grad_bias] = batch_norm_backward_with_aten(
      grad, input, weight, bias, mean, var, training, eps, activation, {true, mask[0], mask[1]});
  grad.copy_(grad_input);
  return {grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> group_norm_with_aten(const Tensor& input, const OptionalTensor& weight,
                                                        const OptionalTensor& bias, int64_t groups,
                                                        double eps, int64_t activation,
                                                        std::optional<at::ScalarType> /*statistics*/) {
  const auto sizes = input.sym_sizes();
  auto [y, mean, rstd] =
      at::native_group_norm_symint(laid_out_for_groups(input), weight, bias, sizes[0], sizes[1],
                                   c10::multiply_integers(sizes.slice(2)), groups, eps);
  activate_(y, activation);
  return {y, mean, rstd};
}

Gradients group_norm_backward_with_aten(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd,
                                        int64_t groups, double eps, int64_t activation, Mask3 mask) {
  const Tensor x = laid_out_for_groups(input);
  const Tensor g = before_activation(grad, activation, [&](Activation what) {
    return group_norm_again(x, weight, bias, mean, rstd, groups, eps, what);
  });
  const auto sizes = x.sym_sizes();
  return at::native_group_norm_backward_symint(g.contiguous(x.suggest_memory_format()), x, mean, rstd, weight,
                                               sizes[0], sizes[1], c10::multiply_integers(sizes.slice(2)),
                                               groups, mask);
}

// ---------------------------------------------------------------------------------------------------------
// Through the dispatcher

std::tuple<Tensor, Tensor> batch_statistics(const Tensor& input, const OptionalTensor& running_mean,
                                            const OptionalTensor& running_var, double momentum) {
  static const auto op =
      handle<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&, double)>(
          "_batch_statistics");
  return op.call(input, running_mean, running_var, momentum);
}

Tensor normalize(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                 const Tensor& mean, const Tensor& var, double eps, Activation activation) {
  static const auto op = handle<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                       const Tensor&, const Tensor&, double, int64_t)>("_normalize");
  const auto dtype = mean.scalar_type();
  return op.call(input, parameter(weight, dtype), parameter(bias, dtype), mean, var, eps,
                 static_cast<int64_t>(activation));
}

std::tuple<Tensor, Tensor> normalize_masked(const Tensor& input, const OptionalTensor& weight,
                                            const OptionalTensor& bias, const Tensor& mean, const Tensor& var,
                                            double eps) {
  static const auto op =
      handle<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                        const Tensor&, const Tensor&, double)>("_normalize_masked");
  const auto dtype = mean.scalar_type();
  return op.call(input, parameter(weight, dtype), parameter(bias, dtype), mean, var, eps);
}

Gradients batch_norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const Tensor& mean, const Tensor& var,
                              bool training, double eps, Activation activation, Mask3 mask) {
  static const auto op =
      handle<Gradients(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const Tensor&, const Tensor&, bool, double, int64_t, Mask3)>("_batch_norm_backward");
  const auto dtype = mean.scalar_type();
  return op.call(grad, input, parameter(weight, dtype), parameter(bias, dtype), mean, var, training, eps,
                 static_cast<int64_t>(activation), mask);
}

std::tuple<Tensor, Tensor> batch_norm_backward_(Tensor grad, const Tensor& input,
                                                const OptionalTensor& weight, const OptionalTensor& bias,
                                                const Tensor& mean, const Tensor& var, bool training,
                                                double eps, bool relu, std::array<bool, 2> mask) {
  static const auto op = handle<std::tuple<Tensor, Tensor>(
      Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
      bool, double, bool, std::array<bool, 2>)>("_batch_norm_backward_");
  const auto dtype = mean.scalar_type();
  return op.call(grad, input, parameter(weight, dtype), parameter(bias, dtype), mean, var, training, eps,
                 relu, mask);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_parts(const Tensor& input, const OptionalTensor& weight,
                                                    const OptionalTensor& bias, int64_t groups, double eps,
                                                    Activation activation) {
  static const auto op =
      handle<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                int64_t, double, int64_t, std::optional<at::ScalarType>)>(
          "_group_norm");
  const auto statistics = by_native_kernels(input) ? std::optional(at::kFloat) : std::nullopt;
  return op.call(laid_out_for_groups(input), weight, bias, groups, eps, static_cast<int64_t>(activation),
                 statistics);
}

Tensor group_norm_again(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& rstd, int64_t groups, double eps,
                        Activation activation) {
  static const auto op =
      handle<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                    int64_t, double, int64_t)>("_group_norm_again");
  return op.call(laid_out_for_groups(input), weight, bias, mean, rstd, groups, eps,
                 static_cast<int64_t>(activation));
}

Gradients group_norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const Tensor& mean, const Tensor& rstd,
                              int64_t groups, double eps, Activation activation, Mask3 mask) {
  static const auto op =
      handle<Gradients(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const Tensor&, const Tensor&, int64_t, double, int64_t, Mask3)>(
          "_group_norm_backward");
  return op.call(grad, laid_out_for_groups(input), weight, bias, mean, rstd, groups, eps,
                 static_cast<int64_t>(activation), mask);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_parts(const Tensor& input, c10::SymIntArrayRef shape,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    double eps) {
  static const auto op =
      handle<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                                                const OptionalTensor&, double)>("_layer_norm");
  return op.call(input, shape, weight, bias, eps);
}

Gradients layer_norm_backward(const Tensor& grad, const Tensor& input, c10::SymIntArrayRef shape,
                              const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, Mask3 mask) {
  static const auto op =
      handle<Gradients(const Tensor&, const Tensor&, c10::SymIntArrayRef, const Tensor&, const Tensor&,
                       const OptionalTensor&, const OptionalTensor&, Mask3)>("_layer_norm_backward");
  return op.call(grad, input, shape, mean, rstd, weight, bias, mask);
}

}  // namespace patchconv
