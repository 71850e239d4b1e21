// Gradients of the convolutions.
//
// The forward node saves the input only if the weight needs a gradient, and the weight only if the input
// does; it keeps the sizes of what is not saved. An input that its producer can rebuild is not saved either
// (lean_node.h). The backward operators are differentiable themselves: a convolution is linear in input and
// in weight, so every second derivative is again one of these operators, and so on to any order.
//
// A convolution fused with ReLU saves what a convolution saves, and one bit per element; or its output
// instead of the bits, if that is saved anyway. Its backward operator unpacks the bits as it reads the
// gradient. Without ReLU, or with a scale, the fused operator is composed of its parts, which save what they
// need.
//
// torch.func transforms and forward-mode AD cannot run a C++ node: such calls go to stock operators.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/threshold_backward.h>

#include "autograd/activation.h"
#include "ops/conv.h"

namespace patchconv {

using at::Tensor;

namespace {

class ConvBackward final : public LeanNode {
 public:
  ConvBackward() : LeanNode("patchconv::ConvBackward") {}

  Source input, weight;
  ConvSpec spec;
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
        spec, {grad, if_defined(x), if_defined(weight.get(*this)), input_size, weight_size, want});
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
  node->spec = spec;
  node->input_size = input.sym_sizes();
  node->weight_size = weight.sym_sizes();
  LeanNode::attach(output, node);
}

// Its outputs: the gradients that were asked for.
class ConvDoubleBackward final : public torch::autograd::Node {
 public:
  Source grad_output, input, weight;
  ConvSpec spec;
  c10::SymDimVector input_size, weight_size;
  std::array<bool, 3> made = {false, false, false};  // gradients of input, weight and bias

  std::string name() const override { return "patchconv::ConvDoubleBackward"; }

  // `outputs`: gradients with respect to the gradients that were made.
  variable_list apply(variable_list&& outputs) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SettingsGuard as_before(settings_.again());
    std::array<Tensor, 3> grads;
    for (size_t i = 0, next = 0; i < 3; ++i) {
      if (made[i]) grads[i] = outputs[next++];
    }
    const Tensor grad = grad_output.get(*this);
    variable_list result(3);
    auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; };
    if (task_should_compute_output(0)) {
      if (grads[0].defined()) add(result[0], call_conv(spec, grads[0], weight.get(*this), std::nullopt));
      if (grads[1].defined()) add(result[0], call_conv(spec, input.get(*this), grads[1], std::nullopt));
      if (grads[2].defined()) {
        std::vector<c10::SymInt> shape(grad.dim(), 1);
        shape[grad.dim() - 1 - static_cast<int64_t>(spec.dims.size())] = grads[2].sym_size(0);
        add(result[0], grads[2].view_symint(shape).expand_symint(grad.sym_sizes()));
      }
    }
    if (task_should_compute_output(1) && grads[1].defined()) {
      result[1] = std::get<0>(call_conv_backward(
          spec, {grad, std::nullopt, grads[1], input_size, weight_size, {true, false, false}}));
    }
    if (task_should_compute_output(2) && grads[0].defined()) {
      result[2] = std::get<1>(call_conv_backward(
          spec, {grad, grads[0], std::nullopt, input_size, weight_size, {false, true, false}}));
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

void record_backward(const ConvSpec& spec, const ConvBackwardArgs& args, const ConvGrads& grads) {
  const auto node =
      make_node<ConvDoubleBackward>(args.grad_output, or_none(args.input), or_none(args.weight));
  node->grad_output.keep(args.grad_output);
  const std::array<Tensor, 3> made = {std::get<0>(grads), std::get<1>(grads), std::get<2>(grads)};
  for (size_t i = 0; i < 3; ++i) {
    node->made[i] = made[i].defined();
    if (made[i].defined()) torch::autograd::set_history(made[i], node);
  }
  if (args.grad_output.requires_grad() && node->made[1]) node->input.keep(*args.input);
  if (args.grad_output.requires_grad() && node->made[0]) node->weight.keep(*args.weight);
  node->spec = spec;
  node->input_size = args.input_size;
  node->weight_size = args.weight_size;
}

class ConvReluBackward final : public LeanNode {
 public:
  ConvReluBackward() : LeanNode("patchconv::ConvReluBackward") {}

  Source input, weight, bits;
  ConvSpec spec;
  c10::SymDimVector input_size, weight_size;
  std::vector<c10::SymInt> strides;

 protected:
  variable_list backward(const Tensor& grad) override {
    const std::array<bool, 3> want = {task_should_compute_output(0), task_should_compute_output(1),
                                      task_should_compute_output(2)};
    const auto x = if_defined(want[1] ? input.get(*this) : Tensor());
    const auto w = if_defined(want[0] ? weight.get(*this) : Tensor());
    const bool recorded = at::GradMode::is_enabled();
    variable_list grads(4);
    if (!recorded && !has_output() && !task_should_compute_output(3)) {
      std::tie(grads[0], grads[1], grads[2]) = call_conv_backward(
          spec, {in_layout(grad, strides), x, w, input_size, weight_size, want, bits.get(*this)});
      return grads;
    }
    Tensor inside = has_output() ? at::threshold_backward(grad, value(), 0)
                                 : mask_backward(in_layout(grad, strides), bits.get(*this), 1, 0);
    if (recorded) inside = with_flat_slope(inside);
    if (want[0] || want[1] || want[2]) {
      std::tie(grads[0], grads[1], grads[2]) =
          call_conv_backward(spec, {inside, x, w, input_size, weight_size, want});
    }
    if (task_should_compute_output(3)) grads[3] = inside;
    return grads;
  }
  // Too expensive to rebuild: consumers that need the output have it saved.
  std::vector<Source*> others() override { return {&input, &weight, &bits}; }
  void output_was_saved() override { bits.release(); }
};

// Those that a call with these parts returns beside `y`.
Tensor bits_of(const Tensor& y, const FusedParts& parts) {
  return parts.mask && parts.relu ? mask_pack(y.detach(), Mask::kRelu, 0, 0) : no_bits(y);
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

  static ConvGrads backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
    const bool tangent = has_tangent(args.grad_output) || has_tangent(args.input) || has_tangent(args.weight);
    const bool recorded = needs_node(args.grad_output, or_none(args.input), or_none(args.weight));
    if (tangent) return stock_conv_backward(spec, args);
    if (args.bits.defined() && recorded) return backward(spec, without_bits(args, masked_grad(args)));
    ConvGrads grads;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      grads = call_conv_backward(spec, args);
    }
    if (recorded) record_backward(spec, args, grads);
    return grads;
  }

  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    const Tensor b = or_none(bias), scale = or_none(parts.scale), residual = or_none(parts.residual);
    const bool tangent = has_tangent(input) || has_tangent(weight) || has_tangent(b) || has_tangent(scale) ||
                         has_tangent(residual);
    if (!tangent && !needs_node(input, weight, b, scale, residual)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return call_conv_fused(spec, input, weight, bias, parts);
    }
    if (tangent || !parts.relu || scale.defined() || !served(input) || !served(weight)) {
      check_fused(parts, input, check_sizes<c10::SymInt>(spec, input.sym_sizes(), weight.sym_sizes()));
      check_forward_tensors(spec, input, weight, bias);
      const Tensor y = fused_from_parts(spec, input, weight, bias, parts);
      return {y, bits_of(y, parts)};
    }
    const auto node = make_node<ConvReluBackward>(input, weight, b, residual);
    Tensor y, bits;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      std::tie(y, bits) =
          call_conv_fused(spec, input, weight, bias, {parts.scale, parts.residual, true, /*mask=*/true});
    }
    if (weight.requires_grad()) node->input.keep(input);
    if (input.requires_grad()) node->weight.keep(weight);
    node->bits.keep(bits);
    node->spec = spec;
    node->input_size = input.sym_sizes();
    node->weight_size = weight.sym_sizes();
    node->strides = y.sym_strides().vec();
    LeanNode::attach(y, node);
    return {y, parts.mask ? bits : no_bits(input)};
  }
};

struct TransformsRoom {  // which run before autocast
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    const auto [x, w, b] = autocast_as_enabled(input, weight, bias);
    return stock_conv(spec, x, w, b);
  }
  static ConvGrads backward(const ConvSpec& spec, const ConvBackwardArgs& args) {
    return stock_conv_backward(spec, args);
  }
  static FusedResult fused(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias, const FusedParts& parts) {
    const auto [x, w, b] = autocast_as_enabled(input, weight, bias);
    const Tensor y = stock_conv_fused(spec, x, w, b, parts);
    return {y, bits_of(y, parts)};
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

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) { register_conv<AutogradRoom>(m); }

TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { register_conv<TransformsRoom>(m); }

}  // namespace

}  // namespace patchconv
