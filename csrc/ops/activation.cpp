// The activations without autograd, and under torch.func: stock operators. And masks where no kernel makes
// them: composed of stock operators, with several bytes per element of transient memory.
#include "ops/activation.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "ops/activation_masked.h"
#include "ops/activation_smooth.h"
#include "ops/handle.h"

namespace patchconv {

using at::Scalar;
using at::Tensor;

namespace {

Tensor flat(const Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

double rounded_as(const Tensor& input, double a) {
  if (!at::isReducedFloatingType(input.scalar_type())) return a;
  return input.scalar_type() == at::kHalf ? static_cast<double>(static_cast<at::Half>(a))
                                          : static_cast<double>(static_cast<at::BFloat16>(a));
}

Tensor inside(const Tensor& input, Mask mask, double a, double b) {
  // Stock compares in float32, most with limits that are not rounded to half precision.
  const Tensor x = at::isReducedFloatingType(input.scalar_type()) ? input.to(at::kFloat) : input;
  return masked::with_row(mask, [&]<typename Row>(Row) {
    // Stock's threshold is rounded to the tensor's type on CUDA, and there alone.
    const bool rounded = Row::kRoundedNumber || (Row::kMask == Mask::kThreshold && input.is_cuda());
    return Row::inside(x, rounded ? rounded_as(input, a) : a, b);
  });
}

Tensor stock_masked(const Tensor& x, Mask mask, double a, double b) {
  return masked::with_row(mask, [&]<typename Row>(Row) { return Row::value(x, a, b); });
}

}  // namespace

// A part at a time, since each bit is a byte or more on its way.
Tensor mask_pack_with_aten(const Tensor& input, int64_t mask, double a, double b) {
  constexpr int64_t kPart = int64_t{1} << 20;  // elements
  const Tensor x = flat(input);
  const int64_t elements = x.numel();
  const Tensor result = at::empty({mask_bytes(elements)}, x.options().dtype(at::kByte));
  const Tensor place = at::arange(8, result.options());
  for (int64_t begin = 0; begin < elements; begin += kPart) {
    const int64_t count = std::min(kPart, elements - begin);
    const Tensor part = x.narrow(0, begin, count);
    const Tensor bits = inside(part, static_cast<Mask>(mask), a, b).to(at::kByte);
    const Tensor padded = at::constant_pad_nd(bits, {0, mask_bytes(count) * 8 - count});
    Tensor bytes = result.narrow(0, begin / 8, mask_bytes(count));
    at::sum_out(bytes, padded.view({-1, 8}).bitwise_left_shift_(place), {1}, /*keepdim=*/false, at::kByte);
  }
  return result;
}

std::tuple<Tensor, Tensor> mask_forward_with_aten(const Tensor& input, int64_t mask, double a, double b) {
  return {stock_masked(input, static_cast<Mask>(mask), a, b), mask_pack_with_aten(input, mask, a, b)};
}

Tensor mask_forward_in_place_with_aten(Tensor& input, int64_t mask, double a, double b) {
  Tensor bits = mask_pack_with_aten(input, mask, a, b);
  masked::with_row(static_cast<Mask>(mask),
                   [&]<typename Row>(Row) { return masked::write_over<Row>(input, a, b); });
  return bits;
}

Tensor mask_backward_with_aten(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  const Tensor place = at::arange(8, bits.options());
  const Tensor ones = bits.unsqueeze(1).bitwise_right_shift(place).bitwise_and(1).flatten();
  const Tensor mask = ones.slice(0, 0, grad.numel()).as_strided(grad.sizes(), grad.strides()).to(at::kBool);
  auto times = [&](double factor) {
    return factor == 1 ? grad : factor == 0 ? at::zeros_like(grad) : grad.mul(factor);
  };
  return at::where(mask, times(inside), times(outside));
}

namespace {

Tensor bits_on_meta(const Tensor& input) {
  return at::empty_symint({(input.sym_numel() + 7) / 8}, input.options().dtype(at::kByte));
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_mask_forward", [](const Tensor& input, int64_t, double, double) {
    return std::make_tuple(at::empty_like(input), bits_on_meta(input));
  });
  m.impl("_mask_forward_", [](Tensor& input, int64_t, double, double) { return bits_on_meta(input); });
  m.impl("_mask_pack", [](const Tensor& input, int64_t, double, double) { return bits_on_meta(input); });
  m.impl("_mask_backward",
         [](const Tensor& grad, const Tensor&, double, double) { return at::empty_like(grad); });
}

}  // namespace

std::tuple<Tensor, Tensor> add_mask_forward_with_aten(const Tensor& input, const Tensor& other) {
  Tensor y = at::add(input, other);
  Tensor bits = mask_forward_(y, Mask::kRelu, 0, 0);
  return {std::move(y), std::move(bits)};
}

namespace {

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_mask_forward", &mask_forward_with_aten);
  m.impl("_mask_forward_", &mask_forward_in_place_with_aten);
  m.impl("_mask_pack", &mask_pack_with_aten);
  m.impl("_add_mask_forward", &add_mask_forward_with_aten);
  m.impl("_mask_backward", &mask_backward_with_aten);
}

void stock_activations(torch::Library& m) {
  masked::for_each_row([&]<typename Row>(Row) {
    masked::register_row<Row, Row::value>(m);
    if constexpr (masked::has_in_place<Row>) masked::register_row_in_place<Row, Row::value_>(m);
  });
  m.impl("prelu", TORCH_FN(at::prelu));
  smooth::for_each_row([&]<typename Row>(Row) {
    m.impl(Row::kName, +Row::value);
    if constexpr (smooth::has_operator_in_place<Row>)
      m.impl(smooth::name_in_place<Row>().c_str(), +Row::value_);
  });
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) { stock_activations(m); }
TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) { stock_activations(m); }

}  // namespace

Tensor in_layout(const Tensor& tensor, c10::SymIntArrayRef strides) {
  if (tensor.sym_strides() == strides) return tensor;
  return at::empty_strided_symint(tensor.sym_sizes(), strides, tensor.options()).copy_(tensor);
}

std::tuple<Tensor, Tensor> mask_forward(const Tensor& input, Mask mask, double a, double b) {
  static const auto op =
      handle<std::tuple<Tensor, Tensor>(const Tensor&, int64_t, double, double)>("_mask_forward");
  return op.call(input, static_cast<int64_t>(mask), a, b);
}

Tensor mask_forward_(Tensor& input, Mask mask, double a, double b) {
  static const auto op = handle<Tensor(Tensor&, int64_t, double, double)>("_mask_forward_");
  return op.call(input, static_cast<int64_t>(mask), a, b);
}

Tensor mask_pack(const Tensor& input, Mask mask, double a, double b) {
  static const auto op = handle<Tensor(const Tensor&, int64_t, double, double)>("_mask_pack");
  return op.call(input, static_cast<int64_t>(mask), a, b);
}

Tensor mask_backward(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  static const auto op = handle<Tensor(const Tensor&, const Tensor&, double, double)>("_mask_backward");
  return op.call(grad, bits, inside, outside);
}

}  // namespace patchconv
