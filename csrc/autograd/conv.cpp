// Gradients of the convolutions.
//
// The forward node saves the input only if the weight needs a gradient, and the weight only if the input
// does; it keeps the sizes of what is not saved. An input that its producer can rebuild is not saved either
// (lean_node.h). The backward operators are differentiable themselves: a convolution is linear in input and
// in weight, so every second derivative is again one of these operators, and so on to any order.
//
// torch.func transforms and forward-mode AD cannot run a C++ node: such calls go to stock operators.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>

#include "autograd/lean_node.h"
#include "ops/conv_rooms.h"

namespace patchconv {

using at::Tensor;
using torch::autograd::AutogradContext;

namespace {

bool needs_grad(const OptionalTensor& tensor) { return tensor.has_value() && tensor->requires_grad(); }

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// A ConvSpec that outlives its call, and the settings of that call. All its numbers are stored as one list:
// one map entry per number would cost more than a small convolution. `flags` belongs to the caller.
struct StoredSpec {
  static void save(AutogradContext* ctx, const ConvSpec& spec, int64_t flags) {
    PaddingMode mode = PaddingMode::kZeros;
    parse_padding_mode(spec.padding_mode, &mode);  // the forward call has checked it
    std::vector<int64_t> numbers{spec.dims,
                                 spec.transposed,
                                 spec.groups,
                                 static_cast<int64_t>(mode),
                                 flags,
                                 spec.splits.has_value(),
                                 static_cast<int64_t>(backend()),
                                 own_settings().workspace_limit.value_or(0)};
    numbers.reserve(32);
    for (const at::IntArrayRef list :
         {spec.stride, spec.padding, spec.output_padding, spec.dilation,
          spec.splits.has_value() ? at::IntArrayRef(*spec.splits) : at::IntArrayRef()}) {
      numbers.push_back(static_cast<int64_t>(list.size()));
      numbers.insert(numbers.end(), list.begin(), list.end());
    }
    ctx->saved_data["spec"] = std::move(numbers);
  }
  explicit StoredSpec(AutogradContext* ctx)
      : numbers(ctx->saved_data["spec"].toIntVector()), flags(numbers[4]) {
    size_t next = 8;
    auto list = [&] {
      const auto size = static_cast<size_t>(numbers[next]);
      const at::IntArrayRef values(numbers.data() + next + 1, size);
      next += 1 + size;
      return values;
    };
    spec.dims = static_cast<int>(numbers[0]);
    spec.transposed = numbers[1] != 0;
    spec.groups = numbers[2];
    spec.padding_mode = padding_mode_name(static_cast<PaddingMode>(numbers[3]));
    spec.stride = list();
    spec.padding = list();
    spec.output_padding = list();
    spec.dilation = list();
    const at::IntArrayRef splits = list();
    if (numbers[5] != 0) spec.splits = splits;
  }
  StoredSpec(const StoredSpec&) = delete;
  StoredSpec& operator=(const StoredSpec&) = delete;

  // The backend of the forward call, and the workspace limit that its thread had set for itself, unless this
  // thread has one too.
  OwnSettings settings() const {
    OwnSettings found{.backend = static_cast<Backend>(numbers[6])};
    if (numbers[7] > 0 && !own_settings().workspace_limit) found.workspace_limit = numbers[7];
    return found;
  }

  std::vector<int64_t> numbers;
  int64_t flags;
  ConvSpec spec;
};

// A Link that outlives its call. It is valid only if the engine runs this very node, whose edge keeps the
// producer alive; compiled autograd runs a copy.
void save_link(AutogradContext* ctx, const Link& link) {
  std::vector<int64_t> numbers{reinterpret_cast<int64_t>(link.producer),
                               reinterpret_cast<int64_t>(link.grad_fn), link.view, link.offset};
  numbers.insert(numbers.end(), link.sizes.begin(), link.sizes.end());
  numbers.insert(numbers.end(), link.strides.begin(), link.strides.end());
  ctx->saved_data["link"] = std::move(numbers);
}

Tensor linked_value(AutogradContext* ctx) {
  const auto numbers = ctx->saved_data["link"].toIntVector();
  Link link;
  link.producer = reinterpret_cast<LeanNode*>(numbers[0]);
  link.grad_fn = reinterpret_cast<torch::autograd::Node*>(numbers[1]);
  link.view = numbers[2] != 0;
  link.offset = numbers[3];
  const auto dims = static_cast<int64_t>(numbers.size() - 4) / 2;
  link.sizes.assign(numbers.begin() + 4, numbers.begin() + 4 + dims);
  link.strides.assign(numbers.begin() + 4 + dims, numbers.end());
  const auto running = torch::autograd::get_current_node();
  const bool same =
      running && running->num_outputs() > 0 && running->next_edge(0).function.get() == link.grad_fn;
  if (same) link.output = running->next_edge(0).input_nr;
  TORCH_CHECK_NOT_IMPLEMENTED(same,
                              "patchconv: compiled autograd cannot rebuild an input from its producer; call "
                              "patchconv_native.recompute(False) before the forward pass");
  return link.value();
}

// Sizes of a tensor that may not be saved: those of the saved tensor, else the sizes that are stored here.
void save_sizes(AutogradContext* ctx, const char* key, bool tensor_saved, c10::SymIntArrayRef sizes) {
  if (!tensor_saved) ctx->saved_data[key] = sizes;
}

std::vector<c10::SymInt> saved_sizes(AutogradContext* ctx, const char* key, const Tensor& saved) {
  return saved.defined() ? saved.sym_sizes().vec() : ctx->saved_data[key].toSymIntVector();
}

// Which of the first three inputs need a gradient in this pass. Inputs that are not given have no edge.
std::array<bool, 3> wanted(AutogradContext* ctx, const std::array<bool, 3>& given) {
  std::array<bool, 3> result = {false, false, false};
  size_t edge = 0;
  for (size_t i = 0; i < 3; ++i) {
    if (given[i]) result[i] = ctx->needs_input_grad(edge++);
  }
  return result;
}

// The node has only the gradients that were asked for; the operator returns all three, some undefined.
variable_list spread(const variable_list& present, const std::array<bool, 3>& mask) {
  variable_list result(3);
  size_t next = 0;
  for (size_t i = 0; i < 3; ++i) {
    if (mask[i]) result[i] = present[next++];
  }
  return result;
}

// If set, the next forward pass on this thread returns this tensor instead of computing its output.
thread_local const Tensor* given_output = nullptr;

struct ConvBackward : torch::autograd::Function<ConvBackward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const ConvSpec& spec) {
    const Tensor* computed = std::exchange(given_output, nullptr);
    ctx->set_materialize_grads(false);
    const auto link = weight.requires_grad() ? Link::find(input) : std::nullopt;
    if (link) save_link(ctx, *link);
    const bool save_input = weight.requires_grad() && !link;
    const bool save_weight = input.requires_grad();
    ctx->save_for_backward({save_input ? input : Tensor(), save_weight ? weight : Tensor()});
    save_sizes(ctx, "input_size", save_input, input.sym_sizes());
    save_sizes(ctx, "weight_size", save_weight, weight.sym_sizes());
    const bool has_bias = given(bias);
    StoredSpec::save(ctx, spec, /*flags=*/int64_t{has_bias} | int64_t{link.has_value()} << 1);
    if (computed != nullptr) return *computed;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_conv(spec, input, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const StoredSpec stored(ctx);
    const SettingsGuard as_before(stored.settings());
    const auto saved = ctx->get_saved_variables();
    const auto mask = wanted(ctx, {true, true, (stored.flags & 1) != 0});
    const Tensor input = mask[1] && (stored.flags & 2) != 0 ? linked_value(ctx) : saved[0];
    std::tie(result[0], result[1], result[2]) = call_conv_backward(
        stored.spec, grads[0], optional(input), optional(saved[1]), saved_sizes(ctx, "input_size", saved[0]),
        saved_sizes(ctx, "weight_size", saved[1]), mask);
    return result;
  }
};

// Flags of a double backward: which gradients were asked for (bits 0 to 2), which tensors were given (3 and
// 4).
int64_t flags(const std::array<bool, 3>& mask, const OptionalTensor& input, const OptionalTensor& weight) {
  const bool has_input = given(input);
  const bool has_weight = given(weight);
  return mask[0] | mask[1] << 1 | mask[2] << 2 | has_input << 3 | has_weight << 4;
}

struct ConvDoubleBackward : torch::autograd::Function<ConvDoubleBackward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& grad_output, const OptionalTensor& input,
                               const OptionalTensor& weight, const ConvSpec& spec,
                               c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                               std::array<bool, 3> mask) {
    ctx->set_materialize_grads(false);
    const bool for_grad = grad_output.requires_grad();
    const bool save_input = for_grad && mask[1];
    const bool save_weight = for_grad && mask[0];
    ctx->save_for_backward({grad_output, save_input ? *input : Tensor(), save_weight ? *weight : Tensor()});
    save_sizes(ctx, "input_size", save_input, input_size);
    save_sizes(ctx, "weight_size", save_weight, weight_size);
    StoredSpec::save(ctx, spec, flags(mask, input, weight));
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [grad_input, grad_weight, grad_bias] =
        call_conv_backward(spec, grad_output, input, weight, input_size, weight_size, mask);
    variable_list results;
    for (const Tensor& result : {grad_input, grad_weight, grad_bias}) {
      if (result.defined()) results.push_back(result);
    }
    return results;
  }

  // `outputs`: gradients with respect to the gradients of input, weight and bias, as far as those were asked
  // for.
  static variable_list backward(AutogradContext* ctx, const variable_list& outputs) {
    variable_list result(7);
    const StoredSpec stored(ctx);
    const SettingsGuard as_before(stored.settings());
    const auto flag = [&](int bit) { return (stored.flags >> bit & 1) != 0; };
    const variable_list grads = spread(outputs, {flag(0), flag(1), flag(2)});
    const auto saved = ctx->get_saved_variables();
    const Tensor& grad_output = saved[0];
    const auto input_size = saved_sizes(ctx, "input_size", saved[1]);
    const auto weight_size = saved_sizes(ctx, "weight_size", saved[2]);
    const auto want = wanted(ctx, {true, flag(3), flag(4)});
    auto add = [](Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum.add(term) : term; };
    if (want[0]) {
      if (grads[0].defined()) add(result[0], call_conv(stored.spec, grads[0], saved[2], std::nullopt));
      if (grads[1].defined()) add(result[0], call_conv(stored.spec, saved[1], grads[1], std::nullopt));
      if (grads[2].defined()) {
        std::vector<c10::SymInt> shape(grad_output.dim(), 1);
        shape[grad_output.dim() - 1 - stored.spec.dims] = grads[2].sym_size(0);
        add(result[0], grads[2].view_symint(shape).expand_symint(grad_output.sym_sizes()));
      }
    }
    if (want[1] && grads[1].defined()) {
      result[1] = std::get<0>(call_conv_backward(stored.spec, grad_output, std::nullopt, grads[1], input_size,
                                                 weight_size, {true, false, false}));
    }
    if (want[2] && grads[0].defined()) {
      result[2] = std::get<1>(call_conv_backward(stored.spec, grad_output, grads[0], std::nullopt, input_size,
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
  struct Guard {
    explicit Guard(const Tensor& output) { given_output = &output; }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() { given_output = nullptr; }
  } guard(output);
  return call_conv(spec, input, weight, bias);
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
