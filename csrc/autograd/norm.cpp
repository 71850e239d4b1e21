// Gradients of batch, group, layer and RMS norm. Each saves its input, and a mean and a deviation per
// channel, group or row. Batch norm in eval mode saves its input only if the weight needs a gradient. All of
// them rebuild their output from that by their elementwise part.
//
// First derivatives are stock's own backward operators. Where stock has no differentiable one, second
// derivatives go through its forward operator, recorded again.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "autograd/activation.h"
#include "ops/norm.h"

namespace patchconv {

using at::Tensor;

namespace {

bool use_norm_node(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  return needs_node(input, weight, bias) && served(input) && !has_tangent(input) && !has_tangent(weight) &&
         !has_tangent(bias);
}

// The gradient in the input's layout. In another one stock's batch norm is wrong for one image in
// channels_last whose strides are those that view() gives.
Tensor in_layout_of(const Tensor& input, const Tensor& grad) {
  const auto last = input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return (input.dim() == 4 || input.dim() == 5) && input.is_contiguous(last) ? grad.contiguous(last) : grad;
}

// What the norms share: an input, an affine map, and which of the three have edges.
class NormNode : public LeanNode {
 public:
  using LeanNode::LeanNode;

  void keep_affine(const OptionalTensor& w, const OptionalTensor& b) {
    has_weight_ = given(w);
    has_bias_ = given(b);
    if (has_weight_) weight.keep(*w);
    if (has_bias_) {
      bias.keep(*b);
      bias_dtype = b->scalar_type();
    }
  }
  Source input, weight, bias, mean, deviation;
  at::ScalarType bias_dtype = at::kFloat;
  double eps = 0;

 protected:
  Tensor get_weight() { return has_weight_ ? weight.get(*this) : Tensor(); }
  Tensor get_bias() { return has_bias_ ? bias.get(*this) : Tensor(); }

  // Which gradients of input, weight and bias this pass needs. There is an edge for each of them that is
  // given.
  std::array<bool, 3> wanted() const {
    return {task_should_compute_output(0), has_weight_ && task_should_compute_output(1),
            has_bias_ && task_should_compute_output(has_weight_ ? 2 : 1)};
  }
  variable_list on_edges(const Tensor& grad_input, const Tensor& grad_weight, const Tensor& grad_bias) const {
    variable_list grads{grad_input};
    if (has_weight_) grads.push_back(grad_weight);
    if (has_bias_) grads.push_back(grad_bias);
    return grads;
  }

  // The output again, from the saved statistics.
  Tensor normalized(int64_t groups, Activation activation) {
    return normalize(input.get(*this), {if_defined(get_weight()), if_defined(get_bias()), mean.get(*this),
                                        deviation.get(*this), groups, eps, activation});
  }

  // Differentiable gradients: through stock's forward operator, called again.
  template <typename Forward>
  variable_list recorded(const Tensor& grad, Forward forward) {
    const bool create_graph = at::GradMode::is_enabled();
    const std::array<Tensor, 3> given{input.get(*this), get_weight(), get_bias()};
    const at::AutoGradMode with_grad(true);
    // New tensors with the history of the old ones: gradients stop here, and can be differentiated further.
    auto stand_in = [&](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return create_graph && tensor.requires_grad() ? at::alias(tensor) : tensor.detach().requires_grad_();
    };
    const std::array<Tensor, 3> all{stand_in(given[0]), stand_in(given[1]), stand_in(given[2])};
    const auto want = wanted();
    variable_list inputs, result(3);
    for (size_t i = 0; i < 3; ++i) {
      if (want[i]) inputs.push_back(all[i]);
    }
    const variable_list grads =
        torch::autograd::grad({forward(all[0], all[1], all[2])}, inputs, {in_layout_of(given[0], grad)},
                              /*retain_graph=*/create_graph, create_graph, /*allow_unused=*/true);
    size_t next = 0;
    for (size_t i = 0; i < 3; ++i) {
      if (want[i]) result[i] = grads[next++];
    }
    return on_edges(result[0], result[1], result[2]);
  }

  std::vector<Source*> sources() override {
    std::vector<Source*> all{&input};
    if (has_weight_) all.push_back(&weight);
    if (has_bias_) all.push_back(&bias);
    for (Source* source : {&mean, &deviation}) {
      if (source->available()) all.push_back(source);
    }
    return all;
  }

 private:
  bool has_weight_ = false, has_bias_ = false;
};

// A node with edges to the tensors that are given, the input first.
template <typename T>
auto norm_node(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  std::vector<Tensor> given{input};
  if (weight.has_value() && weight->defined()) given.push_back(*weight);
  if (bias.has_value() && bias->defined()) given.push_back(*bias);
  auto node = make_node<T>(given);
  node->keep_affine(weight, bias);
  return node;
}

// ---------------------------------------------------------------------------------------------------------

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
        return recorded(grad, [&](const Tensor& x, const Tensor& scale, const Tensor& shift) {
          // Parameters in the dtype of the statistics: with parameters in half precision, stock would want
          // statistics in half precision too.
          const auto dtype = average.scalar_type();
          const Tensor z =
              at::batch_norm(x, scale.defined() ? scale.to(dtype) : scale,
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

// ---------------------------------------------------------------------------------------------------------

class GroupNormBackward final : public NormNode {
 public:
  GroupNormBackward() : NormNode("patchconv::GroupNormBackward") {}
  std::string name() const override {
    return activation == Activation::kNone ? "patchconv::GroupNormBackward"
                                           : "patchconv::GroupNormSiluBackward";
  }
  Activation activation = Activation::kNone;
  int64_t groups = 1;

 protected:
  variable_list backward(const Tensor& grad) override {
    if (at::GradMode::is_enabled()) {
      return recorded(grad, [this](const Tensor& x, const Tensor& w, const Tensor& b) {
        return stock_activation(at::group_norm(x, groups, w, b, eps), activation);
      });
    }
    const auto [grad_input, grad_weight, grad_bias] =
        norm_backward(grad, input.get(*this),
                      {if_defined(get_weight()), if_defined(get_bias()), mean.get(*this),
                       deviation.get(*this), groups, eps, activation},
                      /*training=*/true, wanted());
    return on_edges(grad_input, grad_weight, grad_bias);
  }

  Tensor rebuild() override { return normalized(groups, activation); }
};

template <Activation kActivation>
Tensor group_norm(const Tensor& input, int64_t groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  const auto fits = [&](const OptionalTensor& parameter) {
    return !parameter.has_value() || !parameter->defined() || parameter->numel() == input.size(1);
  };
  if (!use_norm_node(input, weight, bias) || input.dim() < 2 || groups < 1 || input.size(1) % groups != 0 ||
      !fits(weight) || !fits(bias) || input.numel() == 0)
    return stock_activation(at::group_norm(input, groups, weight, bias, eps), kActivation);
  const auto node = norm_node<GroupNormBackward>(input, weight, bias);
  node->activation = kActivation;
  node->groups = groups;
  node->eps = eps;
  node->input.keep(input);
  Tensor y, mean, rstd;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(y, mean, rstd) = group_norm_parts(input, weight, bias, groups, eps, kActivation);
  }
  node->mean.keep(mean);
  node->deviation.keep(rstd);
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

class LayerNormBackward final : public NormNode {
 public:
  LayerNormBackward() : NormNode("patchconv::LayerNormBackward") {}
  std::vector<c10::SymInt> shape;

 protected:
  variable_list backward(const Tensor& grad) override {
    if (at::GradMode::is_enabled()) {
      return recorded(grad, [this](const Tensor& x, const Tensor& w, const Tensor& b) {
        return at::layer_norm_symint(x, shape, w, b, eps);
      });
    }
    const auto [grad_input, grad_weight, grad_bias] =
        layer_norm_backward(grad, input.get(*this), shape, mean.get(*this), deviation.get(*this),
                            get_weight(), get_bias(), wanted());
    return on_edges(grad_input, grad_weight, grad_bias);
  }

  Tensor rebuild() override {
    const Tensor x = input.get(*this);
    return std::get<0>(layer_norm_parts(x, shape, get_weight(), get_bias(), eps));
  }
};

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  if (!use_norm_node(input, weight, bias) || input.numel() == 0)
    return at::layer_norm_symint(input, shape, weight, bias, eps);
  Tensor y, mean, rstd;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(y, mean, rstd) = layer_norm_parts(input, shape, weight, bias, eps);
  }
  const auto node = norm_node<LayerNormBackward>(input, weight, bias);
  node->shape = shape.vec();
  node->eps = eps;
  node->input.keep(input);
  node->mean.keep(mean);
  node->deviation.keep(rstd);
  LeanNode::attach(y, node);
  return y;
}

// ---------------------------------------------------------------------------------------------------------

// Stock composes its RMS norm of operators that each save a tensor. Here it is recorded again in backward.
class RmsNormBackward final : public NormNode {
 public:
  RmsNormBackward() : NormNode("patchconv::RmsNormBackward") {}
  std::vector<c10::SymInt> shape;
  std::optional<double> epsilon;

 protected:
  variable_list backward(const Tensor& grad) override {
    return recorded(grad, [this](const Tensor& x, const Tensor& w, const Tensor&) { return value(x, w); });
  }
  Tensor rebuild() override { return value(input.get(*this), get_weight()); }

 private:
  Tensor value(const Tensor& x, const Tensor& w) const {
    return at::rms_norm_symint(x, shape, w.defined() ? OptionalTensor(w) : std::nullopt, epsilon);
  }
};

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                std::optional<double> eps) {
  if (!use_norm_node(input, weight, std::nullopt)) return at::rms_norm_symint(input, shape, weight, eps);
  Tensor y;
  {
    const at::NoGradGuard no_grad;
    y = at::rms_norm_symint(input, shape, weight, eps);
  }
  const auto node = norm_node<RmsNormBackward>(input, weight, std::nullopt);
  node->shape = shape.vec();
  node->epsilon = eps;
  node->input.keep(input);
  LeanNode::attach(y, node);
  return y;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("batch_norm", &batch_norm_autograd<Activation::kNone>);
  m.impl("batch_norm_relu", &batch_norm_autograd<Activation::kRelu>);
  m.impl("group_norm", &group_norm<Activation::kNone>);
  m.impl("group_norm_silu", &group_norm<Activation::kSilu>);
  m.impl("layer_norm", &layer_norm);
  m.impl("rms_norm", &rms_norm);
}

// Where an operator has a composite kernel, one under the key Autograd is not used, but one of each device
// is.
TORCH_LIBRARY_IMPL(patchconv, AutogradCPU, m) { m.impl("instance_norm", &instance_norm_autograd); }
TORCH_LIBRARY_IMPL(patchconv, AutogradCUDA, m) { m.impl("instance_norm", &instance_norm_autograd); }
TORCH_LIBRARY_IMPL(patchconv, AutogradMeta, m) { m.impl("instance_norm", &instance_norm_autograd); }

}  // namespace

}  // namespace patchconv
