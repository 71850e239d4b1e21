// The smooth activations: a row each. Schemas (library.cpp), stock operators (activation.cpp) and nodes
// (autograd/activation_smooth.cpp) follow from it.
//
// A row is a type with
//     kName, kNode      the operator's name and its node's
//     kArguments        what the schema says after "Tensor input"
//     value, value_     stock's function of the input and those arguments, and the one in place, if it has
//     one gradient          of the incoming gradient, the input and the arguments; it is differentiable
// and, if it has them,
//     kFromOutput       gradient reads the output in place of the input
//     kNoOperatorInPlace  value_ serves this library alone
//     InPlace           another row, by which the operator in place is recorded where in_place(arguments)
//     says
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>
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

#include <string>
#include <string_view>
#include <tuple>

namespace patchconv::smooth {

using at::Scalar;
using at::Tensor;

struct Silu {
  static constexpr const char* kName = "silu";
  static constexpr const char* kNode = "patchconv::SiluBackward";
  static constexpr const char* kArguments = "";
  static Tensor value(const Tensor& x) { return at::silu(x); }
  static Tensor& value_(Tensor& x) { return at::silu_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x) {
    if (!at::GradMode::is_enabled()) return at::silu_backward(grad, x);
    const Tensor s = at::sigmoid(x);  // stock's backward operator has no derivative
    return grad.mul(s.mul(x.mul(s.neg().add(1)).add(1)));
  }
};

struct Gelu {
  static constexpr const char* kName = "gelu";
  static constexpr const char* kNode = "patchconv::GeluBackward";
  static constexpr const char* kArguments = ", *, str approximate='none'";
  static constexpr bool kNoOperatorInPlace = true;
  static Tensor value(const Tensor& x, std::string_view mode) { return at::gelu(x, mode); }
  static Tensor& value_(Tensor& x, std::string_view mode) { return at::gelu_(x, mode); }
  static Tensor gradient(const Tensor& grad, const Tensor& x, std::string_view mode) {
    return at::gelu_backward(grad, x, mode);
  }
};

struct Hardswish {
  static constexpr const char* kName = "hardswish";
  static constexpr const char* kNode = "patchconv::HardswishBackward";
  static constexpr const char* kArguments = "";
  static Tensor value(const Tensor& x) { return at::hardswish(x); }
  static Tensor& value_(Tensor& x) { return at::hardswish_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x) { return at::hardswish_backward(grad, x); }
};

// In place, stock computes the gradient from the output, which is possible only for slopes that are not
// negative.
struct EluInPlace {
  static constexpr const char* kNode = "patchconv::EluInPlaceBackward";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
    return at::elu(x, alpha, scale, input_scale);
  }
  static Tensor& value_(Tensor& x, const Scalar& alpha, const Scalar& scale, const Scalar& input_scale) {
    return at::elu_(x, alpha, scale, input_scale);
  }
  static Tensor gradient(const Tensor& grad, const Tensor& y, const Scalar& alpha, const Scalar& scale,
                         const Scalar& input_scale) {
    return at::elu_backward(grad, alpha, scale, input_scale, /*is_result=*/true, y);
  }
};

struct Elu {
  static constexpr const char* kName = "elu";
  static constexpr const char* kNode = "patchconv::EluBackward";
  static constexpr const char* kArguments = ", Scalar alpha=1, Scalar scale=1, Scalar input_scale=1";
  using InPlace = EluInPlace;
  static bool in_place(const Scalar& alpha, const Scalar&, const Scalar&) { return alpha.toDouble() >= 0; }
  static constexpr auto value = &EluInPlace::value;
  static constexpr auto value_ = &EluInPlace::value_;
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Scalar& alpha, const Scalar& scale,
                         const Scalar& input_scale) {
    return at::elu_backward(grad, alpha, scale, input_scale, /*is_result=*/false, x);
  }
};

struct Softplus {
  static constexpr const char* kName = "softplus";
  static constexpr const char* kNode = "patchconv::SoftplusBackward";
  static constexpr const char* kArguments = ", Scalar beta=1, Scalar threshold=20";
  static Tensor value(const Tensor& x, const Scalar& beta, const Scalar& threshold) {
    return at::softplus(x, beta, threshold);
  }
  static Tensor gradient(const Tensor& grad, const Tensor& x, const Scalar& beta, const Scalar& threshold) {
    return at::softplus_backward(grad, x, beta, threshold);
  }
};

// On the CPU stock also saves exp(-abs(x)). It is made again here, by the function that makes it.
struct LogSigmoid {
  static constexpr const char* kName = "logsigmoid";
  static constexpr const char* kNode = "patchconv::LogSigmoidBackward";
  static constexpr const char* kArguments = "";
  static Tensor value(const Tensor& x) { return at::log_sigmoid(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x) {
    const Tensor exponentials =
        x.is_cuda() ? at::empty({0}, x.options()) : std::get<1>(at::log_sigmoid_forward(x.detach()));
    return at::log_sigmoid_backward(grad, x, exponentials);
  }
};

struct Mish {
  static constexpr const char* kName = "mish";
  static constexpr const char* kNode = "patchconv::MishBackward";
  static constexpr const char* kArguments = "";
  static Tensor value(const Tensor& x) { return at::mish(x); }
  static Tensor& value_(Tensor& x) { return at::mish_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& x) {
    if (!at::GradMode::is_enabled()) return at::mish_backward(grad, x);
    const Tensor t = at::tanh(at::softplus(x));  // stock's backward operator has no derivative
    return grad.mul(t.add(x.mul(at::sigmoid(x)).mul(t.mul(t).neg().add(1))));
  }
};

struct Sigmoid {
  static constexpr const char* kName = "sigmoid";
  static constexpr const char* kNode = "patchconv::SigmoidBackward";
  static constexpr const char* kArguments = "";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x) { return at::sigmoid(x); }
  static Tensor& value_(Tensor& x) { return at::sigmoid_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& y) { return at::sigmoid_backward(grad, y); }
};

struct Tanh {
  static constexpr const char* kName = "tanh";
  static constexpr const char* kNode = "patchconv::TanhBackward";
  static constexpr const char* kArguments = "";
  static constexpr bool kFromOutput = true;
  static Tensor value(const Tensor& x) { return at::tanh(x); }
  static Tensor& value_(Tensor& x) { return at::tanh_(x); }
  static Tensor gradient(const Tensor& grad, const Tensor& y) { return at::tanh_backward(grad, y); }
};

using Rows = std::tuple<Silu, Gelu, Hardswish, Elu, Softplus, LogSigmoid, Mish, Sigmoid, Tanh>;

template <typename Row>
constexpr bool from_output = requires { Row::kFromOutput; };
template <typename Row>
constexpr bool has_value_in_place = requires { Row::value_; };
template <typename Row>
constexpr bool has_operator_in_place = has_value_in_place<Row> && !requires { Row::kNoOperatorInPlace; };

template <typename Row>
std::string name_in_place() {
  return std::string(Row::kName) + "_";
}

// Calls `use` with each row.
template <typename Use>
void for_each_row(const Use& use) {
  std::apply([&](auto... rows) { (use(rows), ...); }, Rows{});
}

}  // namespace patchconv::smooth
