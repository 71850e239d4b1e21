// Batch, instance, group, layer and RMS norm below autograd, and under torch.func: stock operators.
#include "ops/norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/instance_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "ops/activation.h"
#include "ops/handle.h"

namespace patchconv {

using at::Tensor;

// An instance norm is a batch norm of one image with N*C channels.
Tensor instance_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& running_mean, const OptionalTensor& running_var,
                     bool use_input_stats, double momentum, double eps) {
  TORCH_CHECK_VALUE(input.dim() >= 3,
                    "instance_norm: expected input to have at least 3 dimensions (N, C, ...), got ",
                    input.dim());
  const c10::SymInt n = input.sym_size(0), c = input.sym_size(1);
  for (const auto& [name, tensor] : {std::pair{"weight", &weight},
                                     {"bias", &bias},
                                     {"running_mean", &running_mean},
                                     {"running_var", &running_var}}) {
    TORCH_CHECK(!tensor->has_value() || !(*tensor)->defined() ||
                    ((*tensor)->dim() == 1 && (*tensor)->sym_size(0) == c),
                "instance_norm: expected ", name, " to have C = ", c, " elements, got shape ",
                (*tensor)->sym_sizes());
  }
  auto repeated = [&](const OptionalTensor& tensor) -> OptionalTensor {
    if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
    return tensor->repeat_symint({n});
  };
  std::vector<c10::SymInt> shape = input.sym_sizes().vec();
  shape[0] = 1;
  shape[1] = n * c;
  const OptionalTensor mean = repeated(running_mean), var = repeated(running_var);
  const Tensor y = batch_norm(input.contiguous().view_symint(shape), repeated(weight), repeated(bias), mean,
                              var, use_input_stats, momentum, eps);
  if (use_input_stats && mean.has_value()) {
    const at::NoGradGuard no_grad;
    running_mean->copy_(mean->view_symint({n, c}).mean(0));
    running_var->copy_(var->view_symint({n, c}).mean(0));
  }
  return y.view_symint(input.sym_sizes());
}

namespace {

Tensor stock_batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                        double momentum, double eps) {
  return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                        /*cudnn_enabled=*/true);
}

template <Activation kActivation>
Tensor below_autograd(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps) {
  if (!served(input) || input.numel() == 0) {
    return stock_activation(
        stock_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps),
        kActivation);
  }
  return batch_norm_parts(input, weight, bias, running_mean, running_var, training, momentum, eps,
                          kActivation, /*with_bits=*/false)
      .y;
}

Tensor stock_group_norm(const Tensor& input, int64_t groups, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
  return at::group_norm(input, groups, weight, bias, eps);
}

Tensor stock_group_norm_silu(const Tensor& input, int64_t groups, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps) {
  return at::silu(at::group_norm(input, groups, weight, bias, eps));
}

Tensor stock_batch_norm_relu(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             bool training, double momentum, double eps) {
  return at::relu(stock_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps));
}

Tensor stock_layer_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
  return at::layer_norm_symint(input, shape, weight, bias, eps);
}

Tensor stock_rms_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                      std::optional<double> eps) {
  return at::rms_norm_symint(input, shape, weight, eps);
}

TORCH_LIBRARY_IMPL(patchconv, CompositeImplicitAutograd, m) { m.impl("instance_norm", &instance_norm); }

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("batch_norm", &below_autograd<Activation::kNone>);
  m.impl("batch_norm_relu", &below_autograd<Activation::kRelu>);
  m.impl("group_norm", &stock_group_norm);
  m.impl("group_norm_silu", &stock_group_norm_silu);
  m.impl("layer_norm", &stock_layer_norm);
  m.impl("rms_norm", &stock_rms_norm);
}

Tensor stock_instance_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           bool use_input_stats, double momentum, double eps) {
  return at::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
                           /*cudnn_enabled=*/true);
}

TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("instance_norm", &stock_instance_norm);
  m.impl("batch_norm", &stock_batch_norm);
  m.impl("batch_norm_relu", &stock_batch_norm_relu);
  m.impl("group_norm", &stock_group_norm);
  m.impl("group_norm_silu", &stock_group_norm_silu);
  m.impl("layer_norm", &stock_layer_norm);
  m.impl("rms_norm", &stock_rms_norm);
}

}  // namespace

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                  double momentum, double eps) {
  static const auto op = handle<decltype(batch_norm)>("batch_norm");
  return op.call(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

BatchNormed batch_norm_parts(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             bool training, double momentum, double eps, Activation activation,
                             bool with_bits) {
  const Tensor old_mean = or_none(running_mean), old_var = or_none(running_var);
  TORCH_CHECK_VALUE(input.dim() >= 2,
                    "batch_norm: expected input to have at least 2 dimensions (N, C, ...), got ",
                    input.dim());
  const auto check = [&](const char* name, const Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || (tensor.dim() == 1 && tensor.size(0) == input.size(1)),
                "batch_norm: expected ", name, " to have C = ", input.size(1), " elements, got shape ",
                tensor.sizes());
    TORCH_CHECK(!tensor.defined() || tensor.device() == input.device(), "batch_norm: expected ", name, " on ",
                input.device(), ", got ", tensor.device());
  };
  check("weight", or_none(weight));
  check("bias", or_none(bias));
  check("running_mean", old_mean);
  check("running_var", old_var);
  TORCH_CHECK_VALUE(training || (old_mean.defined() && old_var.defined()),
                    "batch_norm: expected running_mean and running_var where training is False, got None");
  BatchNormed result;
  if (training) {
    std::tie(result.mean, result.var) = batch_statistics(input, running_mean, running_var, momentum);
  } else {
    // Copies, since a later forward pass may update the statistics.
    const auto dtype = at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
    result.mean = old_mean.to(dtype, /*non_blocking=*/false, /*copy=*/true);
    result.var = old_var.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
  const NormMap map{weight, bias, result.mean, result.var, /*groups=*/0, eps, activation};
  if (with_bits) {
    std::tie(result.y, result.bits) = normalize_masked(input, map);
  } else {
    result.y = normalize(input, map);
  }
  return result;
}

}  // namespace patchconv
