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
using WithAten = NormSignatures<NormWithAten>;

at::ScalarType statistics_type(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

NormMap with_activation(const NormMap& map, Activation activation) {
  return {map.weight, map.bias, map.mean, map.var, map.groups, map.eps, activation};
}

// The gradient of the value before the activation, which is computed again.
Tensor before_activation(const Tensor& grad, const Tensor& input, const NormMap& map) {
  switch (map.activation) {
    case Activation::kNone:
      return grad;
    case Activation::kRelu:
      return at::threshold_backward(grad, normalize(input, map), 0);
    case Activation::kSilu:
      return at::silu_backward(grad, normalize(input, with_activation(map, Activation::kNone)));
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Parameters in the dtype of the statistics.
OptionalTensor parameter(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!given(tensor)) return std::nullopt;
  return tensor->scalar_type() == dtype ? *tensor : tensor->to(dtype);
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

struct MetaNorm : NormWithAten {
  static Tensor normalize(const Tensor& input, const NormMap&) {
    return at::empty_like(input, input.options().memory_format(input.suggest_memory_format()));
  }
  static Gradients backward(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                            Mask3 mask) {
    if (map.groups == 0) return NormWithAten::backward(grad, input, map, training, mask);
    // Inputs come in a layout that the device serves (laid_out_for_groups).
    const auto like = given(map.weight) ? map.weight->options() : input.options();
    const auto parameter = [&](bool wanted) {
      return wanted ? at::empty_symint({input.sym_size(1)}, like) : Tensor();
    };
    return {mask[0] ? at::empty_like(input) : Tensor(), parameter(mask[1]), parameter(mask[2])};
  }
  static TwoTensors batch_statistics(const Tensor& input, const OptionalTensor&, const OptionalTensor&,
                                     double) {
    const auto options = input.options().dtype(statistics_type(input));
    return {at::empty_symint({input.sym_size(1)}, options), at::empty_symint({input.sym_size(1)}, options)};
  }
  static ThreeTensors group_norm(const Tensor& input, const OptionalTensor& weight,
                                 const OptionalTensor& bias, int64_t groups, double eps, int64_t activation,
                                 std::optional<at::ScalarType> statistics) {
    auto [y, mean, rstd] = NormWithAten::group_norm(input, weight, bias, groups, eps, activation, statistics);
    const auto dtype = statistics.value_or(mean.scalar_type());
    return {at::empty_like(input), mean.to(dtype), rstd.to(dtype)};
  }
};

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_batch_statistics", &MetaNorm::batch_statistics);
  m.impl("_normalize", &NormSignatures<MetaNorm>::normalize);
  m.impl("_group_norm", &MetaNorm::group_norm);
  m.impl("_norm_backward", &NormSignatures<MetaNorm>::backward);
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_batch_statistics", &NormWithAten::batch_statistics);
  m.impl("_normalize", &WithAten::normalize);
  m.impl("_normalize_masked", &WithAten::normalize_masked);
  m.impl("_norm_backward", &WithAten::backward);
  m.impl("_batch_norm_backward_", &WithAten::backward_);
  m.impl("_group_norm", &NormWithAten::group_norm);
  m.impl("_layer_norm", TORCH_FN(at::native_layer_norm_symint));
  m.impl("_layer_norm_backward", TORCH_FN(at::native_layer_norm_backward_symint));
}

}  // namespace

Tensor& activate_(Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return at::relu_(z);
    case Activation::kSilu:
      return at::silu_(z);
  }
  TORCH_INTERNAL_ASSERT(false);
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

Tensor NormWithAten::normalize(const Tensor& input, const NormMap& map) {
  const auto& [weight, bias, mean, var, groups, eps, activation] = map;
  if (groups > 0) {
    return std::get<0>(group_norm(input, weight, bias, groups, eps, static_cast<int64_t>(activation), {}));
  }
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

TwoTensors NormWithAten::batch_statistics(const Tensor& input, const OptionalTensor& running_mean,
                                          const OptionalTensor& running_var, double momentum) {
  std::vector<int64_t> over{0};
  for (int64_t d = 2; d < input.dim(); ++d) over.push_back(d);
  const auto [var, mean] = at::var_mean(input.to(statistics_type(input)), over, /*unbiased=*/false);
  const auto count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
  move_running(running_mean, mean, momentum, 1);
  move_running(running_var, var, momentum, count / std::max(1.0, count - 1));
  return {mean, var};
}

TwoTensors NormWithAten::normalize_masked(const Tensor& input, const NormMap& map) {
  Tensor y = patchconv::normalize(input, map);
  Tensor bits = mask_forward_(y, Mask::kRelu, 0, 0);
  return {std::move(y), std::move(bits)};
}

Gradients NormWithAten::backward(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                                 Mask3 mask) {
  const auto& [weight, bias, mean, var, groups, eps, activation] = map;
  if (groups > 0) {
    const Tensor x = laid_out_for_groups(input);
    const Tensor g = before_activation(grad, x, map);
    const auto sizes = x.sym_sizes();
    return at::native_group_norm_backward_symint(g.contiguous(x.suggest_memory_format()), x, mean, var,
                                                 weight, sizes[0], sizes[1],
                                                 c10::multiply_integers(sizes.slice(2)), groups, mask);
  }
  const Tensor g = before_activation(grad, input, map);
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

TwoTensors NormWithAten::backward_(Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                                   std::array<bool, 2> mask) {
  auto [grad_input, grad_weight, grad_bias] = backward(grad, input, map, training, {true, mask[0], mask[1]});
  grad.copy_(grad_input);
  return {grad_weight, grad_bias};
}

ThreeTensors NormWithAten::group_norm(const Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias, int64_t groups, double eps,
                                      int64_t activation, std::optional<at::ScalarType> /*statistics*/) {
  const auto sizes = input.sym_sizes();
  auto [y, mean, rstd] =
      at::native_group_norm_symint(laid_out_for_groups(input), weight, bias, sizes[0], sizes[1],
                                   c10::multiply_integers(sizes.slice(2)), groups, eps);
  activate_(y, checked_activation(activation));
  return {y, mean, rstd};
}

// ---------------------------------------------------------------------------------------------------------
// Through the dispatcher

namespace {

// What the operators take: parameters by channel in the dtype of the statistics, images in a layout that
// group norms serve.
struct Prepared {
  Prepared(const Tensor& input, const NormMap& map)
      : input(map.groups > 0 ? laid_out_for_groups(input) : input),
        weight(map.groups > 0 ? map.weight : parameter(map.weight, map.mean.scalar_type())),
        bias(map.groups > 0 ? map.bias : parameter(map.bias, map.mean.scalar_type())) {}
  const Tensor input;
  const OptionalTensor weight, bias;
};

}  // namespace

TwoTensors batch_statistics(const Tensor& input, const OptionalTensor& running_mean,
                            const OptionalTensor& running_var, double momentum) {
  static const auto op = handle<decltype(NormWithAten::batch_statistics)>("_batch_statistics");
  return op.call(input, running_mean, running_var, momentum);
}

Tensor normalize(const Tensor& input, const NormMap& map) {
  static const auto op = handle<decltype(WithAten::normalize)>("_normalize");
  const Prepared p(input, map);
  return op.call(p.input, p.weight, p.bias, map.mean, map.var, map.groups, map.eps,
                 static_cast<int64_t>(map.activation));
}

TwoTensors normalize_masked(const Tensor& input, const NormMap& map) {
  static const auto op = handle<decltype(WithAten::normalize_masked)>("_normalize_masked");
  const Prepared p(input, map);
  return op.call(p.input, p.weight, p.bias, map.mean, map.var, map.eps);
}

Gradients norm_backward(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                        Mask3 mask) {
  static const auto op = handle<decltype(WithAten::backward)>("_norm_backward");
  const Prepared p(input, map);
  return op.call(grad, p.input, p.weight, p.bias, map.mean, map.var, map.groups, map.eps,
                 static_cast<int64_t>(map.activation), training, mask);
}

TwoTensors batch_norm_backward_(Tensor grad, const Tensor& input, const NormMap& map, bool training,
                                std::array<bool, 2> mask) {
  static const auto op = handle<decltype(WithAten::backward_)>("_batch_norm_backward_");
  const Prepared p(input, map);
  return op.call(grad, p.input, p.weight, p.bias, map.mean, map.var, map.eps,
                 map.activation == Activation::kRelu, training, mask);
}

ThreeTensors group_norm_parts(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                              int64_t groups, double eps, Activation activation) {
  static const auto op = handle<decltype(NormWithAten::group_norm)>("_group_norm");
  const auto statistics = by_native_kernels(input) ? std::optional(at::kFloat) : std::nullopt;
  return op.call(laid_out_for_groups(input), weight, bias, groups, eps, static_cast<int64_t>(activation),
                 statistics);
}

ThreeTensors layer_norm_parts(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                              const OptionalTensor& bias, double eps) {
  static const auto op = handle<decltype(layer_norm_parts)>("_layer_norm");
  return op.call(input, shape, weight, bias, eps);
}

Gradients layer_norm_backward(const Tensor& grad, const Tensor& input, c10::SymIntArrayRef shape,
                              const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                              const OptionalTensor& bias, Mask3 mask) {
  static const auto op = handle<decltype(layer_norm_backward)>("_layer_norm_backward");
  return op.call(grad, input, shape, mean, rstd, weight, bias, mask);
}

}  // namespace patchconv
