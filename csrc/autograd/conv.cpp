// Gradients of the convolutions.
//
// The forward node saves the input only if the weight needs a gradient, and the weight only if the input
// does; it keeps the sizes of what is not saved. An input that its producer can rebuild is not saved either
// (lean_node.h). The backward operators are differentiable themselves: a convolution is linear in input and
// in weight, so every second derivative is again one of these operators, and so on to any order.
//
// torch.func transforms and forward-mode AD cannot run a C++ node: such calls go to stock operators.
#include <ATen/core/LegacyTypeDispatch.h>

#include "autograd/lean_node.h"
#include "ops/conv_rooms.h"

namespace patchconv {

using at::Tensor;

namespace {

class ConvBackward final : public LeanNode {
 public:
  ConvBackward() : LeanNode("patchconv::ConvBackward") {}

  Source input, weight;
  OwnedSpec spec;
  c10::SymDimVector input_size, weight_size;

 protected:
  variable_list backward(const Tensor& grad) override {
    // Nothing is saved, and so nothing else would notice, where the bias alone is trained.
    TORCH_CHECK(!released(), torch::autograd::ERR_BACKWARD_TWICE);
    const std::array<bool, 3> want = {task_should_compute_output(0), task_should_compute_output(1),
                                      task_should_compute_output(2)};
    // A saved input serves the input's gradient too: stock computes both in one call.
    const Tensor x = want[1] || input.linked() == nullptr ? input.get(*this) : Tensor();
    variable_list grads(3);
    std::tie(grads[0], grads[1], grads[2]) = call_conv_backward(
        spec.get(), grad, if_defined(x), if_defined(weight.get(*this)), input_size, weight_size, want);
    return grads;
  }
  std::vector<Source*> others() override { return {&input, &weight}; }
  // Consumers save the output themselves, and free it before this node's backward.
  bool may_save_output() const override { return false; }
};

// Makes a call's node the grad_fn of its output.
void record(const ConvSpec& spec, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
            const Tensor& output) {
  const auto node = make_node<ConvBackward>(input, weight, or_none(bias));
  if (weight.requires_grad()) node->input.keep(input);
  if (input.requires_grad()) node->weight.keep(weight);
  node->spec = OwnedSpec(spec);
  node->input_size = input.sym_sizes();
  node->weight_size = weight.sym_sizes();
  LeanNode::attach(output, node);
}

// Its outputs: the gradients that were asked for.
class ConvDoubleBackward final : public torch::autograd::Node {
 public:
  Source grad_output, input, weight;
  OwnedSpec spec;
  c10::SymDimVector input_size, weight_size;
  std::array<bool, 3> made = {false, false, false};  // gradients of input, weight and bias

  std::string name() const override { return "patchconv::ConvDoubleBackward"; }

  // `outputs`: gradients with respect to the gradients that were made.
  variable_list apply(variable_list&& outputs) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SettingsGuard as_before(settings_.again());
    const ConvSpec conv = spec.get();
    std::array<Tensor, 3> grads;
    for (size_t i = 0, next = 0; i < 3; ++i) {
      if (made[i]) grads[i] = outputs[next++];
    }
    const Tensor grad = grad_output.get(*this);
    variable_list result(3);
    auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; };
    if (task_should_compute_output(0)) {
      if (grads[0].defined()) add(result[0], call_conv(conv, grads[0], weight.get(*this), std::nullopt));
      if (grads[1].defined()) add(result[0], call_conv(conv, input.get(*this), grads[1], std::nullopt));
      if (grads[2].defined()) {
        std::vector<c10::SymInt> shape(grad.dim(), 1);
        shape[grad.dim() - 1 - conv.dims] = grads[2].sym_size(0);
        add(result[0], grads[2].view_symint(shape).expand_symint(grad.sym_sizes()));
      }
    }
    if (task_should_compute_output(1) && grads[1].defined()) {
      result[1] = std::get<0>(call_conv_backward(conv, grad, std::nullopt, grads[1], input_size, weight_size,
                                                 {true, false, false}));
    }
    if (task_should_compute_output(2) && grads[0].defined()) {
      result[2] = std::get<1>(call_conv_backward(conv, grad, grads[0], std::nullopt, input_size, weight_size,
                                                 {false, true, false}));
    }
    for (Source* source : {&grad_output, &input, &weight}) source->forget();
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Source* source : {&grad_output, &input, &weight}) source->release();
  }

 private:
  const CallSettings settings_;
};

void record_backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                     const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                     c10::SymIntArrayRef weight_size, const ConvGrads& grads) {
  const auto node = make_node<ConvDoubleBackward>(grad_output, or_none(input), or_none(weight));
  node->grad_output.keep(grad_output);
  const std::array<Tensor, 3> made = {std::get<0>(grads), std::get<1>(grads), std::get<2>(grads)};
  for (size_t i = 0; i < 3; ++i) {
    node->made[i] = made[i].defined();
    if (made[i].defined()) torch::autograd::set_history(made[i], node);
  }
  if (grad_output.requires_grad() && node->made[1]) node->input.keep(*input);
  if (grad_output.requires_grad() && node->made[0]) node->weight.keep(*weight);
  node->spec = OwnedSpec(spec);
  node->input_size = input_size;
  node->weight_size = weight_size;
}

struct AutogradRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    if (has_tangent(input) || has_tangent(weight) || has_tangent(bias))
      return stock_conv(spec, input, weight, bias);
    Tensor output;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      output = call_conv(spec, input, weight, bias);
    }
    if (needs_node(input, weight, or_none(bias))) record(spec, input, weight, bias, output);
    return output;
  }

  static ConvGrads backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
    if (has_tangent(grad_output) || has_tangent(input) || has_tangent(weight)) {
      return stock_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
    }
    ConvGrads grads;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      grads = call_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
    }
    if (needs_node(grad_output, or_none(input), or_none(weight)))
      record_backward(spec, grad_output, input, weight, input_size, weight_size, grads);
    return grads;
  }
};

struct TransformsRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const auto [x, w, b] = autocast_as_enabled(input, weight, bias);  // transforms run before autocast
    return stock_conv(spec, x, w, b);
  }
  static ConvGrads backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
    return stock_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
  }
};

}  // namespace

Tensor conv_given(const ConvSpec& spec, const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  const Tensor& output) {
  TORCH_CHECK(!output.requires_grad(), "conv_given: expected output to have no history");
  const auto [x, w, b] = autocast_as_enabled(input, weight, bias, /*wrapped=*/false);
  record(spec, x, w, b, output);
  return output;
}

namespace {

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  register_conv_forward<AutogradRoom>(m);
  register_conv_backward<AutogradRoom>(m);
}

TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) {
  register_conv_forward<TransformsRoom>(m);
  register_conv_backward<TransformsRoom>(m);
}

}  // namespace

}  // namespace patchconv
