// Batch norm and its kin below autograd, and under torch.func: stock operators.
//
// Where there is no kernel of our own (CUDA), stock's elementwise kernel of synchronised batch norm does the
// same job: it takes the statistics as arguments, so a rebuild gives the same bits as the forward pass.
#include "ops/norm.h"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/instance_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/var_mean.h>
#include <torch/library.h>

#include "ops/activation.h"
#include "ops/handle.h"

namespace patchconv {

using at::Tensor;

namespace {

Tensor or_none(const OptionalTensor& tensor) { return tensor.has_value() ? *tensor : Tensor(); }

at::ScalarType statistics_type(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

std::tuple<Tensor, Tensor> statistics_with_aten(const Tensor& input) {
  const Tensor x = input.to(statistics_type(input));
  const auto [var, mean] = at::var_mean(x, all_but_channels(input), /*unbiased=*/false);
  return {mean, var};
}

Tensor normalize_with_aten(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           const Tensor& mean, const Tensor& invstd) {
  if (input.is_cuda()) return at::batch_norm_elemt(input, weight, bias, mean, invstd, /*eps=*/0);
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = -1;
  const Tensor scale = weight.has_value() && weight->defined() ? invstd.mul(*weight) : invstd;
  Tensor shift = mean.mul(scale).neg_();
  if (bias.has_value() && bias->defined()) shift.add_(*bias);
  return input.mul(scale.view(shape)).add_(shift.view(shape)).to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_batch_statistics", [](const Tensor& input) {
    const auto options = input.options().dtype(statistics_type(input));
    return std::make_tuple(at::empty_symint({input.sym_size(1)}, options),
                           at::empty_symint({input.sym_size(1)}, options));
  });
  m.impl("_normalize",
         [](const Tensor& input, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&) {
           return at::empty_like(input, input.options().memory_format(input.suggest_memory_format()));
         });
}

Tensor stock_batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                        double momentum, double eps) {
  return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                        /*cudnn_enabled=*/true);
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_batch_statistics", &statistics_with_aten);
  m.impl("_normalize", &normalize_with_aten);
  m.impl("batch_norm", [](const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& running_mean, const OptionalTensor& running_var,
                          bool training, double momentum, double eps) {
    if (!served(input) || input.numel() == 0) {
      return stock_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
    }
    return std::get<0>(
        batch_norm_parts(input, weight, bias, running_mean, running_var, training, momentum, eps));
  });
}

Tensor stock_group_norm(const Tensor& input, int64_t groups, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
  return at::group_norm(input, groups, weight, bias, eps);
}

Tensor stock_layer_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
  return at::layer_norm_symint(input, shape, weight, bias, eps);
}

Tensor stock_rms_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                      std::optional<double> eps) {
  return at::rms_norm_symint(input, shape, weight, eps);
}

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

TORCH_LIBRARY_IMPL(patchconv, CompositeImplicitAutograd, m) { m.impl("instance_norm", &instance_norm); }

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("group_norm", &stock_group_norm);
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
  m.impl("group_norm", &stock_group_norm);
  m.impl("layer_norm", &stock_layer_norm);
  m.impl("rms_norm", &stock_rms_norm);
}

}  // namespace

std::tuple<Tensor, Tensor> batch_statistics(const Tensor& input) {
  static const auto op = handle<std::tuple<Tensor, Tensor>(const Tensor&)>("_batch_statistics");
  return op.call(input);
}

Tensor normalize(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                 const Tensor& mean, const Tensor& invstd) {
  static const auto op = handle<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                       const Tensor&, const Tensor&)>("_normalize");
  const auto dtype = mean.scalar_type();
  auto parameter = [&](const OptionalTensor& tensor) -> OptionalTensor {
    if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
    return tensor->scalar_type() == dtype ? *tensor : tensor->to(dtype);
  };
  return op.call(input, parameter(weight), parameter(bias), mean, invstd);
}

// Rounded once: its error scales all of a channel.
Tensor inverse_deviation(const Tensor& var, double eps) {
  return var.to(at::kDouble).add(eps).rsqrt_().to(var.scalar_type());
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                  double momentum, double eps) {
  static const auto op =
      handle<Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                    const OptionalTensor&, bool, double, double)>("batch_norm");
  return op.call(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_parts(const Tensor& input, const OptionalTensor& weight,
                                                    const OptionalTensor& bias,
                                                    const OptionalTensor& running_mean,
                                                    const OptionalTensor& running_var, bool training,
                                                    double momentum, double eps) {
  Tensor mean, var;
  const Tensor old_mean = or_none(running_mean), old_var = or_none(running_var);
  TORCH_CHECK_VALUE(input.dim() >= 2,
                    "batch_norm: expected input to have at least 2 dimensions (N, C, ...), got ",
                    input.dim());
  const auto check = [&](const char* name, const Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || (tensor.dim() == 1 && tensor.size(0) == input.size(1)),
                "batch_norm: expected ", name, " to have C = ", input.size(1), " elements, got shape ",
                tensor.sizes());
  };
  check("weight", or_none(weight));
  check("bias", or_none(bias));
  check("running_mean", old_mean);
  check("running_var", old_var);
  TORCH_CHECK_VALUE(training || (old_mean.defined() && old_var.defined()),
                    "batch_norm: expected running_mean and running_var where training is False, got None");
  if (training) {
    std::tie(mean, var) = batch_statistics(input);
    const double count =
        static_cast<double>(input.numel()) / std::max<double>(1, static_cast<double>(mean.numel()));
    if (old_mean.defined()) {
      old_mean.mul_(1 - momentum).add_(mean.to(old_mean.scalar_type()), momentum);
    }
    if (old_var.defined()) {
      old_var.mul_(1 - momentum)
          .add_(var.to(old_var.scalar_type()), momentum * count / std::max(1.0, count - 1));
    }
  } else {
    // Copies, since a later forward pass may move the statistics.
    mean = old_mean.to(statistics_type(input), /*non_blocking=*/false, /*copy=*/true);
    var = old_var.to(statistics_type(input), /*non_blocking=*/false, /*copy=*/true);
  }
  return {normalize(input, weight, bias, mean, inverse_deviation(var, eps)), mean, var};
}

}  // namespace patchconv
