// Gradients of the convolutions.
//
// The forward node saves the input only if the weight needs a gradient and the weight only if the input does;
// sizes stand in for what is not saved. The backward operators are differentiable themselves: a convolution
// is linear in input and in weight, so every second derivative is again one of these operators, and so on to
// any order.
//
// A C++ node cannot be run by torch.func transforms nor by forward-mode AD: such calls go to stock operators.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>

#include "ops/conv_rooms.h"

namespace patchconv {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

bool needs_grad(const OptionalTensor& tensor) { return tensor.has_value() && tensor->requires_grad(); }

bool has_tangent(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() && tensor->_fw_grad(/*level=*/0).defined();
}

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// A ConvSpec that outlives its call, kept in the node's saved data.
struct OwnedSpec {
  static void save(AutogradContext* ctx, const ConvSpec& spec) {
    auto& data = ctx->saved_data;
    data["stride"] = spec.stride;
    data["padding"] = spec.padding;
    data["output_padding"] = spec.output_padding;
    data["dilation"] = spec.dilation;
    data["groups"] = spec.groups;
    data["mode"] = std::string(spec.padding_mode);
    if (spec.splits.has_value()) data["splits"] = at::IntArrayRef(*spec.splits);
    data["kind"] = static_cast<int64_t>(spec.dims * 2 + spec.transposed);
  }
  explicit OwnedSpec(AutogradContext* ctx)
      : stride(ctx->saved_data["stride"].toIntVector()),
        padding(ctx->saved_data["padding"].toIntVector()),
        output_padding(ctx->saved_data["output_padding"].toIntVector()),
        dilation(ctx->saved_data["dilation"].toIntVector()),
        mode(ctx->saved_data["mode"].toStringRef()) {
    const auto splits_entry = ctx->saved_data.find("splits");
    const int64_t kind = ctx->saved_data["kind"].toInt();
    spec = {static_cast<int>(kind / 2),        kind % 2 == 1, stride,      padding, output_padding, dilation,
            ctx->saved_data["groups"].toInt(), mode,          std::nullopt};
    if (splits_entry != ctx->saved_data.end()) {
      splits = splits_entry->second.toIntVector();
      spec.splits = at::IntArrayRef(splits);
    }
  }
  OwnedSpec(const OwnedSpec&) = delete;
  OwnedSpec& operator=(const OwnedSpec&) = delete;

  std::vector<int64_t> stride, padding, output_padding, dilation, splits;
  std::string mode;
  ConvSpec spec;
};

std::vector<c10::SymInt> saved_sizes(AutogradContext* ctx, const char* key) {
  return ctx->saved_data[key].toSymIntVector();
}

void save_sizes(AutogradContext* ctx, const char* key, c10::SymIntArrayRef sizes) {
  ctx->saved_data[key] = sizes;
}

// Which of the first three inputs the engine wants a gradient for. Inputs that are not given have no edge.
std::array<bool, 3> wanted(AutogradContext* ctx, const std::array<bool, 3>& given) {
  std::array<bool, 3> result = {false, false, false};
  size_t edge = 0;
  for (size_t i = 0; i < 3; ++i) {
    if (given[i]) result[i] = ctx->needs_input_grad(edge++);
  }
  return result;
}

// The node carries only the gradients that were asked for; the operator returns three places.
variable_list spread(const variable_list& present, const std::array<bool, 3>& mask) {
  variable_list result(3);
  size_t next = 0;
  for (size_t i = 0; i < 3; ++i) {
    if (mask[i]) result[i] = present[next++];
  }
  return result;
}

struct ConvBackward : torch::autograd::Function<ConvBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const ConvSpec& spec) {
    ctx->save_for_backward(
        {weight.requires_grad() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    save_sizes(ctx, "input_size", input.sym_sizes());
    save_sizes(ctx, "weight_size", weight.sym_sizes());
    ctx->saved_data["bias"] = bias.has_value() && bias->defined();
    OwnedSpec::save(ctx, spec);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_conv(spec, input, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const OwnedSpec owned(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto mask = wanted(ctx, {true, true, ctx->saved_data["bias"].toBool()});
    std::tie(result[0], result[1], result[2]) =
        call_conv_backward(owned.spec, grads[0], optional(saved[0]), optional(saved[1]),
                           saved_sizes(ctx, "input_size"), saved_sizes(ctx, "weight_size"), mask);
    return result;
  }
};

struct ConvDoubleBackward : torch::autograd::Function<ConvDoubleBackward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& grad_output, const OptionalTensor& input,
                               const OptionalTensor& weight, const ConvSpec& spec,
                               c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                               std::array<bool, 3> mask) {
    const bool for_grad = grad_output.requires_grad();
    ctx->save_for_backward({grad_output, (for_grad || needs_grad(weight)) && mask[1] ? *input : Tensor(),
                            (for_grad || needs_grad(input)) && mask[0] ? *weight : Tensor()});
    save_sizes(ctx, "input_size", input_size);
    save_sizes(ctx, "weight_size", weight_size);
    ctx->saved_data["input"] = input.has_value() && input->defined();
    ctx->saved_data["weight"] = weight.has_value() && weight->defined();
    OwnedSpec::save(ctx, spec);
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [grad_input, grad_weight, grad_bias] =
        call_conv_backward(spec, grad_output, input, weight, input_size, weight_size, mask);
    variable_list results;
    for (const Tensor& result : {grad_input, grad_weight, grad_bias}) {
      if (result.defined()) results.push_back(result);
    }
    ctx->saved_data["mask"] = static_cast<int64_t>(mask[0] | mask[1] << 1 | mask[2] << 2);
    return results;
  }

  // outputs: gradients of the input's gradient, of the weight's and of the bias's, as far as they were asked
  // for.
  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    variable_list result(7);
    const OwnedSpec owned(ctx);
    const int64_t mask = ctx->saved_data["mask"].toInt();
    const variable_list grads = spread(outputs, {(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0});
    const auto saved = ctx->get_saved_variables();
    const Tensor& grad_output = saved[0];
    const auto input_size = saved_sizes(ctx, "input_size");
    const auto weight_size = saved_sizes(ctx, "weight_size");
    const auto want =
        wanted(ctx, {true, ctx->saved_data["input"].toBool(), ctx->saved_data["weight"].toBool()});
    auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; };
    if (want[0]) {
      if (grads[0].defined()) add(result[0], call_conv(owned.spec, grads[0], saved[2], std::nullopt));
      if (grads[1].defined()) add(result[0], call_conv(owned.spec, saved[1], grads[1], std::nullopt));
      if (grads[2].defined()) {
        std::vector<c10::SymInt> shape(grad_output.dim(), 1);
        shape[grad_output.dim() - 1 - owned.spec.dims] = grads[2].sym_size(0);
        add(result[0], grads[2].view_symint(shape).expand_symint(grad_output.sym_sizes()));
      }
    }
    if (want[1] && grads[1].defined()) {
      result[1] = std::get<0>(call_conv_backward(owned.spec, grad_output, std::nullopt, grads[1], input_size,
                                                 weight_size, {true, false, false}));
    }
    if (want[2] && grads[0].defined()) {
      result[2] = std::get<1>(call_conv_backward(owned.spec, grad_output, grads[0], std::nullopt, input_size,
                                                 weight_size, {false, true, false}));
    }
    return result;
  }
};

struct AutogradRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    if (has_tangent(input) || has_tangent(weight) || has_tangent(bias))
      return stock_conv(spec, input, weight, bias);
    if (at::GradMode::is_enabled() && (input.requires_grad() || weight.requires_grad() || needs_grad(bias))) {
      return ConvBackward::apply(input, weight, bias, spec);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_conv(spec, input, weight, bias);
  }

  static ConvGrads backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
    if (has_tangent(grad_output) || has_tangent(input) || has_tangent(weight)) {
      return stock_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
    }
    if (at::GradMode::is_enabled() &&
        (grad_output.requires_grad() || needs_grad(input) || needs_grad(weight))) {
      const auto grads = spread(
          ConvDoubleBackward::apply(grad_output, input, weight, spec, input_size, weight_size, output_mask),
          output_mask);
      return {grads[0], grads[1], grads[2]};
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
  }
};

struct TransformsRoom {
  static Tensor forward(const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    return stock_conv(spec, input, weight, bias);
  }
  static ConvGrads backward(const ConvSpec& spec, const Tensor& grad_output, const OptionalTensor& input,
                            const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                            c10::SymIntArrayRef weight_size, std::array<bool, 3> output_mask) {
    return stock_conv_backward(spec, grad_output, input, weight, input_size, weight_size, output_mask);
  }
};

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
