// Gradients of batch and instance norm. Batch norm in eval mode saves its input only if the weight needs a
// gradient.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/batch_norm.h>
#include <torch/library.h>

#include "autograd/norm.h"

namespace patchconv {

using at::Tensor;

namespace {

// The gradient in the input's layout. In another one stock's batch norm is wrong for one image in
// channels_last whose strides are those that view() gives.
Tensor in_layout_of(const Tensor& input, const Tensor& grad) {
  const auto last = input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return (input.dim() == 4 || input.dim() == 5) && input.is_contiguous(last) ? grad.contiguous(last) : grad;
}

class BatchNormBackward final : public NormNode {
 public:
  BatchNormBackward() : NormNode("patchconv::BatchNormBackward") {}
  std::string name() const override {
    return activation == Activation::kNone ? "patchconv::BatchNormBackward"
                                           : "patchconv::BatchNormReluBackward";
  }
  Activation activation = Activation::kNone;
  bool training = false;
  bool keeps_input = false;
  Source bits;  // of a ReLU, if the input is not saved
  std::vector<c10::SymInt> sizes, strides;

 protected:
  // `deviation` holds the variance.
  variable_list backward(const Tensor& grad) override {
    const auto want = wanted();
    const Tensor average = mean.get(*this), variance = deviation.get(*this), w = get_weight();
    if (keeps_input) {
      if (at::GradMode::is_enabled()) {
        return recorded(in_layout_of(input.get(*this), grad),
                        [&](const Tensor& x, const Tensor& scale, const Tensor& shift) {
                          // Parameters in the dtype of the statistics: with parameters in half precision,
                          // stock would want statistics in half precision too.
                          const auto dtype = average.scalar_type();
                          const Tensor z = at::batch_norm(
                              x, scale.defined() ? scale.to(dtype) : scale,
                              shift.defined() ? shift.to(dtype) : shift, training ? Tensor() : average,
                              training ? Tensor() : variance, training, 0, eps, /*cudnn_enabled=*/false);
                          return stock_activation(z, activation);
                        });
      }
      const Tensor x = input.get(*this);
      const OptionalTensor scale = if_defined(w), shift = if_defined(get_bias());
      const NormMap map{scale, shift, average, variance, /*groups=*/0, eps, activation};
      Tensor grad_input, grad_weight, grad_bias;
      if (want[0] && x.is_cpu() && solely_owned(grad) && grad.strides() == x.strides() &&
          grad.scalar_type() == x.scalar_type() && activation != Activation::kSilu) {
        grad_input = grad;
        std::tie(grad_weight, grad_bias) = batch_norm_backward_(grad, x, map, training, {want[1], want[2]});
      } else {
        std::tie(grad_input, grad_weight, grad_bias) = norm_backward(grad, x, map, training, want);
      }
      if (want[1]) grad_weight = grad_weight.to(w.scalar_type());
      if (want[2]) grad_bias = grad_bias.to(bias_dtype);
      return on_edges(want[0] ? grad_input : Tensor(), grad_weight, grad_bias);
    }
    const Tensor g = activation == Activation::kNone
                         ? grad
                         : mask_backward(in_layout(grad, strides), bits.get(*this), 1, 0);
    Tensor grad_input, grad_bias;
    if (want[0]) {
      Tensor scale = inverse_deviation(variance, eps);
      if (w.defined()) scale = scale.mul(w);
      std::vector<int64_t> shape(sizes.size(), 1);
      shape[1] = -1;
      grad_input = with_flat_slope(g.mul(scale.view(shape)).to(grad.scalar_type()));
    }
    if (want[2]) {
      std::vector<int64_t> over{0};
      for (size_t d = 2; d < sizes.size(); ++d) over.push_back(static_cast<int64_t>(d));
      grad_bias = with_flat_slope(g.sum(over, /*keepdim=*/false, bias_dtype));
    }
    return on_edges(grad_input, Tensor(), grad_bias);
  }

  Tensor rebuild() override { return normalized(/*groups=*/0, activation); }
  Tensor rebuild_with_relu() override {
    if (activation != Activation::kNone) return {};
    return normalized(/*groups=*/0, Activation::kRelu);
  }
  std::vector<Source*> others() override {
    if (bits.available()) return {&bits};
    return {};
  }
};

template <Activation kActivation>
Tensor batch_norm_autograd(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           bool training, double momentum, double eps) {
  if (!served(input) || input.numel() == 0 || has_tangent(input) || has_tangent(weight) ||
      has_tangent(bias)) {
    return stock_activation(at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                           eps, /*cudnn_enabled=*/true),
                            kActivation);
  }
  const bool recorded = needs_node(input, weight, bias);
  const bool keeps_input = training || (given(weight) && weight->requires_grad());
  BatchNormed all;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    all =
        batch_norm_parts(input, weight, bias, running_mean, running_var, training, momentum, eps, kActivation,
                         /*with_bits=*/kActivation != Activation::kNone && recorded && !keeps_input);
  }
  if (!recorded) return all.y;
  const auto node = norm_node<BatchNormBackward>(input, weight, bias);
  node->activation = kActivation;
  node->training = training;
  node->eps = eps;
  node->sizes = input.sym_sizes().vec();
  node->strides = all.y.sym_strides().vec();
  node->mean.keep(all.mean);
  node->deviation.keep(all.var);
  node->keeps_input = keeps_input;
  if (keeps_input) {
    node->input.keep(input);
  } else {
    node->input.note(input);
  }
  if (all.bits.defined()) node->bits.keep(all.bits);
  LeanNode::attach(all.y, node);
  return all.y;
}

// ---------------------------------------------------------------------------------------------------------

// The result of an instance norm, which is a view of a batch norm's result, as a tensor of its own: so what
// works in place on it saves as little as after a batch norm. The batch norm's result is never read again.
class InstanceNormBackward final : public ActivationNode {
 public:
  InstanceNormBackward() : ActivationNode("patchconv::InstanceNormBackward") {}

 protected:
  variable_list backward(const Tensor& grad) override { return {grad}; }
  Tensor apply_to(const Tensor& x) override { return x.clone(); }
  void apply_to_(Tensor&) override {}
};

Tensor instance_norm_autograd(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                              const OptionalTensor& running_mean, const OptionalTensor& running_var,
                              bool use_input_stats, double momentum, double eps) {
  const Tensor view =
      instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps);
  if (!view.is_view() || !use_lean_node(view)) return view;
  const Tensor result = view.variable_data();
  const auto node = make_node<InstanceNormBackward>(view);
  node->input.note(view);
  LeanNode::attach(result, node);
  return result;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("batch_norm", &batch_norm_autograd<Activation::kNone>);
  m.impl("batch_norm_relu", &batch_norm_autograd<Activation::kRelu>);
}

// Where an operator has a composite kernel, one under the key Autograd is not used, but one of each device
// is.
TORCH_LIBRARY_IMPL(patchconv, AutogradCPU, m) { m.impl("instance_norm", &instance_norm_autograd); }
TORCH_LIBRARY_IMPL(patchconv, AutogradCUDA, m) { m.impl("instance_norm", &instance_norm_autograd); }
TORCH_LIBRARY_IMPL(patchconv, AutogradMeta, m) { m.impl("instance_norm", &instance_norm_autograd); }

}  // namespace

}  // namespace patchconv
