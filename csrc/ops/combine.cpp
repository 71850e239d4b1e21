// The cheap operators below autograd and under torch.func: stock's.
#include "ops/combine.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "ops/handle.h"
#include "ops/optional.h"

namespace patchconv {

using at::Scalar;
using at::Tensor;

Tensor cast(const Tensor& x, at::ScalarType dtype) {
  static const auto op = handle<Tensor(const Tensor&, at::ScalarType)>("cast");
  return op.call(x, dtype);
}

namespace {

Tensor stock_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return at::linear(x, weight, bias);
}
Tensor stock_mul(const Tensor& a, const Tensor& b) { return at::mul(a, b); }
Tensor stock_glu(const Tensor& x, int64_t dim) { return at::glu(x, dim); }
Tensor stock_add(const Tensor& a, const Tensor& b, const Scalar& alpha) { return at::add(a, b, alpha); }
Tensor stock_add_relu(const Tensor& a, const Tensor& b) { return at::add(a, b).relu_(); }
Tensor& stock_add_(Tensor& a, const Tensor& b, const Scalar& alpha) { return a.add_(b, alpha); }
Tensor stock_cat(at::TensorList tensors, int64_t dim) { return at::cat(tensors, dim); }
// Always a copy: an operator's result must not be its input.
Tensor stock_cast(const Tensor& x, at::ScalarType dtype) {
  return x.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

void stock_combine(torch::Library& m) {
  m.impl("cat", &stock_cat);
  m.impl("add", &stock_add);
  m.impl("add_", &stock_add_);
  m.impl("add_relu", &stock_add_relu);
  m.impl("mul", &stock_mul);
  m.impl("glu", &stock_glu);
  m.impl("cast", &stock_cast);
  m.impl("linear", &stock_linear);
}
TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) { stock_combine(m); }
TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { stock_combine(m); }

}  // namespace

}  // namespace patchconv
