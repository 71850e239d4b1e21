// The piecewise linear activations, which save one bit per element: a row each. Schemas (library.cpp), stock
// operators and bits made by them (activation.cpp) and nodes (autograd/activation_masked.cpp) follow from it.
// Kernels, where a row has some, are in cpu/activation.cpp and cuda/kernels/activation.cu.
//
// A row is a type with
//     kMask             its number: one of core/mask.h, of which kernels make values and bits in one pass, or
//                       another, such as Mask{5}
//     kName, kNode      the operator's name and its node's
//     kNumbers, kArguments  how many numbers follow the input (none where Row has it), as the schema says it
//     value, value_     stock's function of the input and two numbers, and the one in place, if it has one
//     inside            where the bit is 1
//     kRoundedNumber    whether stock rounds the first number to the input's type before it compares
//     output_tells      whether the output shows the bit: then from_output is the gradient by the output
//     slope_inside, slope_outside   what a gradient is multiplied with
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/hardshrink.h>
#include <ATen/ops/hardshrink_backward.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softshrink.h>
#include <ATen/ops/softshrink_backward.h>
#include <ATen/ops/threshold.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>

#include "core/mask.h"

namespace patchconv::masked {

using at::Scalar;
using at::Tensor;

// What most rows have.
struct Row {
  static constexpr int kNumbers = 0;
  static constexpr const char* kArguments = "";
  static constexpr bool kRoundedNumber = false;
  static double slope_inside() { return 1; }
  static double slope_outside(double) { return 0; }
};

struct Relu : Row {
  static constexpr Mask kMask = Mask::kRelu;
  static constexpr const char* kName = "relu";
  static constexpr const char* kNode = "patchconv::ReluBackward";
  static Tensor value(const Tensor& x, const Scalar&, const Scalar&) { return at::relu(x); }
  static Tensor& value_(Tensor& x, const Scalar&, const Scalar&) { return at::relu_(x); }
  static Tensor inside(const Tensor& x, double, double) { return x.le(0).logical_not(); }
  static bool output_tells(double, double) { return true; }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double, double) {
    return at::threshold_backward(grad, y, 0);
  }
};

struct LeakyRelu : Row {
  static constexpr Mask kMask = Mask::kLeakyRelu;
  static constexpr const char* kName = "leaky_relu";
  static constexpr const char* kNode = "patchconv::LeakyReluBackward";
  static constexpr int kNumbers = 1;
  static constexpr const char* kArguments = ", Scalar negative_slope=0.01";
  static Tensor value(const Tensor& x, const Scalar& slope, const Scalar&) {
    return at::leaky_relu(x, slope);
  }
  static Tensor& value_(Tensor& x, const Scalar& slope, const Scalar&) { return at::leaky_relu_(x, slope); }
  static Tensor inside(const Tensor& x, double, double) { return x.gt(0); }
  static bool output_tells(double slope, double) { return slope >= 0; }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double slope, double) {
    return at::leaky_relu_backward(grad, y, slope, /*self_is_result=*/true);
  }
  static double slope_outside(double slope) { return slope; }
};

struct Hardtanh : Row {
  static constexpr Mask kMask = Mask::kHardtanh;
  static constexpr const char* kName = "hardtanh";
  static constexpr const char* kNode = "patchconv::HardtanhBackward";
  static constexpr int kNumbers = 2;
  static constexpr const char* kArguments = ", Scalar min_val=-1, Scalar max_val=1";
  static Tensor value(const Tensor& x, const Scalar& min, const Scalar& max) {
    return at::hardtanh(x, min, max);
  }
  static Tensor& value_(Tensor& x, const Scalar& min, const Scalar& max) {
    return at::hardtanh_(x, min, max);
  }
  static Tensor inside(const Tensor& x, double min, double max) {
    return x.le(min).logical_or_(x.ge(max)).logical_not_();
  }
  static bool output_tells(double min, double max) { return min < max; }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double min, double max) {
    return at::hardtanh_backward(grad, y, min, max);
  }
};

struct Threshold : Row {
  static constexpr Mask kMask = Mask::kThreshold;
  static constexpr const char* kName = "threshold";
  static constexpr const char* kNode = "patchconv::ThresholdBackward";
  static constexpr int kNumbers = 2;
  static constexpr const char* kArguments = ", Scalar threshold, Scalar value";
  static Tensor value(const Tensor& x, const Scalar& threshold, const Scalar& value) {
    return at::threshold(x, threshold, value);
  }
  static Tensor& value_(Tensor& x, const Scalar& threshold, const Scalar& value) {
    return at::threshold_(x, threshold, value);
  }
  static Tensor inside(const Tensor& x, double threshold, double) { return x.le(threshold).logical_not(); }
  static bool output_tells(double threshold, double value) { return value <= threshold; }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double threshold, double) {
    return at::threshold_backward(grad, y, threshold);
  }
};

struct Hardsigmoid : Row {
  static constexpr Mask kMask = Mask::kHardsigmoid;
  static constexpr const char* kName = "hardsigmoid";
  static constexpr const char* kNode = "patchconv::HardsigmoidBackward";
  static Tensor value(const Tensor& x, const Scalar&, const Scalar&) { return at::hardsigmoid(x); }
  static Tensor& value_(Tensor& x, const Scalar&, const Scalar&) { return at::hardsigmoid_(x); }
  static Tensor inside(const Tensor& x, double, double) { return x.gt(-3).logical_and(x.lt(3)); }
  static bool output_tells(double, double) { return false; }
  static Tensor from_output(const Tensor&, const Tensor&, double, double) {
    TORCH_INTERNAL_ASSERT(false, "hardsigmoid: its output does not tell");
  }
  static double slope_inside() { return 1.0F / 6; }
};

// Both are 0 from -lambd to lambd, and nowhere else.
struct Shrink : Row {
  static constexpr int kNumbers = 1;
  static constexpr const char* kArguments = ", Scalar lambd=0.5";
  static constexpr bool kRoundedNumber = true;
  // What stock's vectors on the CPU make of NaN, a gradient of 0, depends on the element's place.
  static Tensor inside(const Tensor& x, double lambd, double) {
    return x.ge(-lambd).logical_and_(x.le(lambd)).logical_not_();
  }
  static bool output_tells(double lambd, double) { return lambd >= 0; }
};

struct Softshrink : Shrink {
  static constexpr Mask kMask = Mask{5};
  static constexpr const char* kName = "softshrink";
  static constexpr const char* kNode = "patchconv::SoftshrinkBackward";
  static Tensor value(const Tensor& x, const Scalar& lambd, const Scalar&) {
    return at::softshrink(x, lambd);
  }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double, double) {
    return at::softshrink_backward(grad, y, 0);
  }
};

struct Hardshrink : Shrink {
  static constexpr Mask kMask = Mask{6};
  static constexpr const char* kName = "hardshrink";
  static constexpr const char* kNode = "patchconv::HardshrinkBackward";
  static Tensor value(const Tensor& x, const Scalar& lambd, const Scalar&) {
    return at::hardshrink(x, lambd);
  }
  static Tensor from_output(const Tensor& grad, const Tensor& y, double, double) {
    return at::hardshrink_backward(grad, y, 0);
  }
};

using Rows = std::tuple<Relu, LeakyRelu, Hardtanh, Threshold, Hardsigmoid, Softshrink, Hardshrink>;

template <typename... Row>
constexpr bool have_numbers_of_their_own(std::tuple<Row...>*) {
  const Mask all[] = {Row::kMask...};
  for (size_t i = 0; i < sizeof...(Row); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (all[i] == all[j]) return false;
    }
  }
  return true;
}
static_assert(have_numbers_of_their_own(static_cast<Rows*>(nullptr)));

template <typename Row>
constexpr bool has_in_place = requires { Row::value_; };

// Writes the values over the input.
template <typename Row>
Tensor& write_over(Tensor& x, const Scalar& a, const Scalar& b) {
  if constexpr (has_in_place<Row>) {
    return Row::value_(x, a, b);
  } else {
    return x.copy_(Row::value(x, a, b));
  }
}

// Calls `use` with each row.
template <typename Use>
void for_each_row(const Use& use) {
  std::apply([&](auto... rows) { (use(rows), ...); }, Rows{});
}

// What `use` makes with the row of a mask.
template <typename Use>
Tensor with_row(Mask mask, const Use& use) {
  Tensor made;
  for_each_row([&]<typename One>(One row) {
    if (One::kMask == mask) made = use(row);
  });
  TORCH_CHECK_VALUE(made.defined(), "patchconv: expected the number of an activation with bits, got ",
                    static_cast<int64_t>(mask));
  return made;
}

// Registers a row's operator. kForward is a function of the input and two numbers, of which the operator
// takes as many as the row says.
template <typename Activation, auto kForward>
void register_row(torch::Library& m) {
  if constexpr (Activation::kNumbers == 0) {
    m.impl(Activation::kName, [](const Tensor& x) { return kForward(x, 0, 0); });
  } else if constexpr (Activation::kNumbers == 1) {
    m.impl(Activation::kName, [](const Tensor& x, const Scalar& a) { return kForward(x, a, 0); });
  } else {
    m.impl(Activation::kName,
           [](const Tensor& x, const Scalar& a, const Scalar& b) { return kForward(x, a, b); });
  }
}

// Registers the operator in place of a row that has one; kInPlace is as kForward above.
template <typename Activation, auto kInPlace>
void register_row_in_place(torch::Library& m) {
  const std::string name = std::string(Activation::kName) + "_";
  if constexpr (Activation::kNumbers == 0) {
    m.impl(name.c_str(), [](Tensor& x) -> Tensor& { return kInPlace(x, 0, 0); });
  } else if constexpr (Activation::kNumbers == 1) {
    m.impl(name.c_str(), [](Tensor& x, const Scalar& a) -> Tensor& { return kInPlace(x, a, 0); });
  } else {
    m.impl(name.c_str(),
           [](Tensor& x, const Scalar& a, const Scalar& b) -> Tensor& { return kInPlace(x, a, b); });
  }
}

}  // namespace patchconv::masked
