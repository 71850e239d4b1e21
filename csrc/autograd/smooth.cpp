// Gradients of the smooth activations: SiLU, GELU, Hardswish, ELU, Softplus, Mish, which save their input,
// and sigmoid and tanh, which save their output, as stock's do.
//
// In-place forms write over their input. If backward needs it, it comes from its producer or is copied first.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <string>
#include <string_view>

#include "autograd/activation.h"

namespace patchconv {

using at::Scalar;
using at::Tensor;

namespace {

struct Numbers {
  Scalar a = 1, b = 1, c = 1;
  std::string_view mode = "none";
};

struct Silu {
  static constexpr const char* kName = "patchconv::SiluBackward";
  static Tensor value(const Tensor& x, const Numbers&) { return at::silu(x); }
  static Tensor& value_(Tensor& x, const Numbers&) { return at::silu_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers&) {
    if (!at::GradMode::is_enabled()) return at::silu_backward(grad, x);
    const Tensor s = at::sigmoid(x);  // stock's backward operator has no derivative
    return grad.mul(s.mul(x.mul(s.neg().add(1)).add(1)));
  }
};

struct Gelu {
  static constexpr const char* kName = "patchconv::GeluBackward";
  static Tensor value(const Tensor& x, const Numbers& n) { return at::gelu(x, n.mode); }
  static Tensor& value_(Tensor& x, const Numbers& n) { return at::gelu_(x, n.mode); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers& n) {
    return at::gelu_backward(grad, x, n.mode);
  }
};

struct Hardswish {
  static constexpr const char* kName = "patchconv::HardswishBackward";
  static Tensor value(const Tensor& x, const Numbers&) { return at::hardswish(x); }
  static Tensor& value_(Tensor& x, const Numbers&) { return at::hardswish_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers&) {
    return at::hardswish_backward(grad, x);
  }
};

struct Elu {
  static constexpr const char* kName = "patchconv::EluBackward";
  static Tensor value(const Tensor& x, const Numbers& n) { return at::elu(x, n.a, n.b, n.c); }
  static Tensor& value_(Tensor& x, const Numbers& n) { return at::elu_(x, n.a, n.b, n.c); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers& n) {
    return at::elu_backward(grad, n.a, n.b, n.c, /*is_result=*/false, x);
  }
};

// In place, stock computes the gradient from the output, which is possible only for slopes that are not
// negative.
struct EluInPlace {
  static constexpr const char* kName = "patchconv::EluInPlaceBackward";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x, const Numbers& n) { return Elu::value(x, n); }
  static Tensor& value_(Tensor& x, const Numbers& n) { return Elu::value_(x, n); }
  static Tensor gradient(const Tensor& grad, const Tensor& y, const Numbers& n) {
    return at::elu_backward(grad, n.a, n.b, n.c, /*is_result=*/true, y);
  }
};

struct Softplus {
  static constexpr const char* kName = "patchconv::SoftplusBackward";
  static Tensor value(const Tensor& x, const Numbers& n) { return at::softplus(x, n.a, n.b); }
  static Tensor& value_(Tensor& x, const Numbers& n) { return x.copy_(at::softplus(x, n.a, n.b)); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers& n) {
    return at::softplus_backward(grad, x, n.a, n.b);
  }
};

struct Mish {
  static constexpr const char* kName = "patchconv::MishBackward";
  static Tensor value(const Tensor& x, const Numbers&) { return at::mish(x); }
  static Tensor& value_(Tensor& x, const Numbers&) { return at::mish_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Numbers&) {
    if (!at::GradMode::is_enabled()) return at::mish_backward(grad, x);
    const Tensor t = at::tanh(at::softplus(x));  // stock's backward operator has no derivative
    return grad.mul(t.add(x.mul(at::sigmoid(x)).mul(t.mul(t).neg().add(1))));
  }
};

struct Sigmoid {
  static constexpr const char* kName = "patchconv::SigmoidBackward";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x, const Numbers&) { return at::sigmoid(x); }
  static Tensor& value_(Tensor& x, const Numbers&) { return at::sigmoid_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& y, const Numbers&) {
    return at::sigmoid_backward(grad, y);
  }
};

struct Tanh {
  static constexpr const char* kName = "patchconv::TanhBackward";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x, const Numbers&) { return at::tanh(x); }
  static Tensor& value_(Tensor& x, const Numbers&) { return at::tanh_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& y, const Numbers&) {
    return at::tanh_backward(grad, y);
  }
};

template <typename Kind>
constexpr bool from_output = requires { Kind::kFromOutput; };

template <typename Kind>
class SmoothBackward final : public ActivationNode {
 public:
  SmoothBackward() : ActivationNode(Kind::kName) {}
  Numbers numbers;
  std::string mode;

 protected:
  variable_list backward(const Tensor& grad) override {
    return {Kind::gradient(grad, from_output<Kind> ? value() : input.get(*this), all())};
  }
  Tensor apply_to(const Tensor& x) override { return Kind::value(x, all()); }
  void apply_to_(Tensor& x) override { Kind::value_(x, all()); }

 private:
  Numbers all() const { return {numbers.a, numbers.b, numbers.c, mode}; }
};

template <typename Kind>
auto smooth_node(const Tensor& x, const Numbers& numbers) {
  auto node = make_node<SmoothBackward<Kind>>(x);
  node->numbers = numbers;
  node->mode = std::string(numbers.mode);
  return node;
}

template <typename Kind>
Tensor smooth(const Tensor& x, const Numbers& numbers) {
  if (!use_lean_node(x)) return Kind::value(x, numbers);
  const auto node = smooth_node<Kind>(x, numbers);
  if constexpr (from_output<Kind>) {
    node->input.note(x);
  } else {
    node->input.keep(x);
  }
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = Kind::value(x, numbers);
  }
  LeanNode::attach(y, node);
  if constexpr (from_output<Kind>) node->provide(y);
  return y;
}

template <typename Kind>
Tensor& smooth_(Tensor& x, const Numbers& numbers) {
  if (!use_lean_node(x) || x.is_view()) return Kind::value_(x, numbers);
  torch::autograd::check_inplace(x, /*requires_grad=*/true);
  const auto node = smooth_node<Kind>(x, numbers);
  if constexpr (from_output<Kind>) {
    node->input.note(x);
  } else {
    // The input is about to be written over: it comes from its producer if that can rebuild it without saving
    // it, else from a copy.
    const auto link = Link::find(x, /*provide=*/false);
    node->input.keep(link && link->producer->secure() ? x : x.clone());
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Kind::value_(x, numbers);
  }
  LeanNode::attach(x, node, /*in_place=*/true);
  if constexpr (from_output<Kind>) node->provide(x);
  return x;
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("silu", [](const Tensor& x) { return smooth<Silu>(x, {}); });
  m.impl("silu_", [](Tensor& x) -> Tensor& { return smooth_<Silu>(x, {}); });
  m.impl("gelu", [](const Tensor& x, std::string_view mode) { return smooth<Gelu>(x, {1, 1, 1, mode}); });
  m.impl("hardswish", [](const Tensor& x) { return smooth<Hardswish>(x, {}); });
  m.impl("hardswish_", [](Tensor& x) -> Tensor& { return smooth_<Hardswish>(x, {}); });
  m.impl("elu", [](const Tensor& x, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
    return smooth<Elu>(x, {alpha, scale, input_scale});
  });
  m.impl("elu_",
         [](Tensor& x, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) -> Tensor& {
           const Numbers numbers{alpha, scale, input_scale};
           return alpha.toDouble() < 0 ? smooth_<Elu>(x, numbers) : smooth_<EluInPlace>(x, numbers);
         });
  m.impl("softplus", [](const Tensor& x, const Scalar& beta, const Scalar& threshold) {
    return smooth<Softplus>(x, {beta, threshold});
  });
  m.impl("mish", [](const Tensor& x) { return smooth<Mish>(x, {}); });
  m.impl("mish_", [](Tensor& x) -> Tensor& { return smooth_<Mish>(x, {}); });
  m.impl("sigmoid", [](const Tensor& x) { return smooth<Sigmoid>(x, {}); });
  m.impl("sigmoid_", [](Tensor& x) -> Tensor& { return smooth_<Sigmoid>(x, {}); });
  m.impl("tanh", [](const Tensor& x) { return smooth<Tanh>(x, {}); });
  m.impl("tanh_", [](Tensor& x) -> Tensor& { return smooth_<Tanh>(x, {}); });
}

}  // namespace

}  // namespace patchconv
