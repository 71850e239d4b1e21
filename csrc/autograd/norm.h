// What the nodes of the norms share. Each saves its input, and a mean and a deviation per channel, group or
// row, and rebuilds its output from that by its elementwise part. First derivatives are operators of this
// library or stock's own. Where stock has no differentiable one, second derivatives go through its forward
// operator, recorded again.
#pragma once

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>

#include "autograd/activation.h"
#include "ops/norm.h"

namespace patchconv {

inline bool use_norm_node(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  return needs_node(input, weight, bias) && served(input) && !has_tangent(input) && !has_tangent(weight) &&
         !has_tangent(bias);
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
  at::Tensor get_weight() { return has_weight_ ? weight.get(*this) : at::Tensor(); }
  at::Tensor get_bias() { return has_bias_ ? bias.get(*this) : at::Tensor(); }

  // Which gradients of input, weight and bias this pass needs. There is an edge for each of them that is
  // given.
  std::array<bool, 3> wanted() const {
    return {task_should_compute_output(0), has_weight_ && task_should_compute_output(1),
            has_bias_ && task_should_compute_output(has_weight_ ? 2 : 1)};
  }
  variable_list on_edges(const at::Tensor& grad_input, const at::Tensor& grad_weight,
                         const at::Tensor& grad_bias) const {
    variable_list grads{grad_input};
    if (has_weight_) grads.push_back(grad_weight);
    if (has_bias_) grads.push_back(grad_bias);
    return grads;
  }

  // The output again, from the saved statistics.
  at::Tensor normalized(int64_t groups, Activation activation) {
    return normalize(input.get(*this), {if_defined(get_weight()), if_defined(get_bias()), mean.get(*this),
                                        deviation.get(*this), groups, eps, activation});
  }

  // Differentiable gradients: through stock's forward operator, called again.
  template <typename Forward>
  variable_list recorded(const at::Tensor& grad, Forward forward) {
    const bool create_graph = at::GradMode::is_enabled();
    const std::array<at::Tensor, 3> given{input.get(*this), get_weight(), get_bias()};
    const at::AutoGradMode with_grad(true);
    // New tensors with the history of the old ones: gradients stop here, and can be differentiated further.
    auto stand_in = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return create_graph && tensor.requires_grad() ? at::alias(tensor) : tensor.detach().requires_grad_();
    };
    const std::array<at::Tensor, 3> all{stand_in(given[0]), stand_in(given[1]), stand_in(given[2])};
    const auto want = wanted();
    variable_list inputs, result(3);
    for (size_t i = 0; i < 3; ++i) {
      if (want[i]) inputs.push_back(all[i]);
    }
    const variable_list grads =
        torch::autograd::grad({forward(all[0], all[1], all[2])}, inputs, {grad},
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
auto norm_node(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  std::vector<at::Tensor> given{input};
  if (weight.has_value() && weight->defined()) given.push_back(*weight);
  if (bias.has_value() && bias->defined()) given.push_back(*bias);
  auto node = make_node<T>(given);
  node->keep_affine(weight, bias);
  return node;
}

}  // namespace patchconv
