// Gradients of group, layer and RMS norm: norms whose statistics belong to one image.
#include "autograd/norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <torch/library.h>

namespace patchconv {

using at::Tensor;

namespace {

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
  m.impl("group_norm", &group_norm<Activation::kNone>);
  m.impl("group_norm_silu", &group_norm<Activation::kSilu>);
  m.impl("layer_norm", &layer_norm);
  m.impl("rms_norm", &rms_norm);
}

}  // namespace

}  // namespace patchconv
