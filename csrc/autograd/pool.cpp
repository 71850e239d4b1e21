// Gradients of pools. A max pool saves the position of each maximum in its window, one byte per output for
// windows of up to 256 positions. An average pool saves only sizes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/adaptive_max_pool1d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool3d.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "autograd/activation.h"
#include "ops/pool.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

namespace {

class MaxPoolBackward final : public LeanNode {
 public:
  MaxPoolBackward() : LeanNode("patchconv::MaxPoolBackward") {}
  Source input, offsets;
  PoolSpec spec;
  std::vector<c10::SymInt> input_size;

 protected:
  variable_list backward(const Tensor& grad) override {
    return {with_flat_slope(max_pool_backward(grad, offsets.get(*this), input_size, spec))};
  }
  Tensor rebuild() override { return max_pool_take(input.get(*this), offsets.get(*this), spec); }
  std::vector<Source*> sources() override { return {&input}; }
  std::vector<Source*> others() override { return {&offsets}; }
};

// Reading the maxima (take) and adding gradients to their positions (put) are linear, and each other's
// transpose.
struct TakeOrPut : torch::autograd::Function<TakeOrPut> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& offsets,
                        bool take, c10::SymIntArrayRef input_size, const PoolSpec& spec) {
    ctx->save_for_backward({offsets});
    ctx->saved_data["take"] = take;
    ctx->saved_data["size"] = input_size;
    std::vector<int64_t> numbers;
    for (const auto* list : {&spec.kernel, &spec.stride, &spec.padding, &spec.dilation}) {
      numbers.push_back(static_cast<int64_t>(list->size()));
      numbers.insert(numbers.end(), list->begin(), list->end());
    }
    ctx->saved_data["spec"] = std::move(numbers);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return take ? max_pool_take(x, offsets, spec) : max_pool_backward(x, offsets, input_size, spec);
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    PoolSpec spec;
    const auto numbers = ctx->saved_data["spec"].toIntVector();
    auto next = numbers.begin();
    for (auto* list : {&spec.kernel, &spec.stride, &spec.padding, &spec.dilation}) {
      const auto end = next + 1 + *next;
      list->assign(next + 1, end);
      next = end;
    }
    const Tensor offsets = ctx->get_saved_variables()[0];
    const auto size = ctx->saved_data["size"].toSymIntVector();
    return {ctx->saved_data["take"].toBool() ? max_pool_backward(grads[0], offsets, size, spec)
                                             : max_pool_take(grads[0], offsets, spec),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor take_autograd(const Tensor& input, const Tensor& offsets, IntArrayRef kernel, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation) {
  const PoolSpec spec{kernel.vec(), stride.vec(), padding.vec(), dilation.vec()};
  if (needs_node(input)) return TakeOrPut::apply(input, offsets, true, input.sym_sizes(), spec);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return max_pool_take(input, offsets, spec);
}

Tensor put_autograd(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                    IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  const PoolSpec spec{kernel.vec(), stride.vec(), padding.vec(), dilation.vec()};
  if (needs_node(grad)) return TakeOrPut::apply(grad, offsets, false, input_size, spec);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return max_pool_backward(grad, offsets, input_size, spec);
}

// `input` is batched and the arguments are checked.
Tensor max_pool(const Tensor& input, const PoolSpec& spec, IntArrayRef output_size) {
  const auto node = make_node<MaxPoolBackward>(input);
  node->input.note(input);
  node->spec = spec;
  node->input_size = input.sym_sizes().vec();
  Tensor y, offsets;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(y, offsets) = max_pool_forward(input, spec, output_size);
  }
  node->offsets.keep(offsets);
  LeanNode::attach(y, node);
  return y;
}

// Whether this library records the call. Stock raises the errors for arguments that do not fit.
bool use_pool_node(const Tensor& x, int64_t dims) {
  return use_lean_node(x) && (x.dim() == dims + 1 || x.dim() == dims + 2) && x.numel() > 0;
}

// Calls `values`, which records nothing, where nothing has to be recorded.
bool records_nothing(const Tensor& x) { return !needs_node(x) && !has_tangent(x); }

template <int kDims, auto kStock>
Tensor max_pool_nd(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool ceil_mode) {
  if (records_nothing(x)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return max_pool_values(x, kDims, kernel, stride, padding, dilation, ceil_mode);
  }
  if (use_pool_node(x, kDims)) {
    const auto spec = pool_spec(kDims, kernel, stride, padding, dilation);
    if (const auto size = pool_output_size(x, spec, ceil_mode)) {
      if (x.dim() == kDims + 2) return max_pool(x, spec, *size);
      return max_pool(x.unsqueeze(0), spec, *size).squeeze(0);
    }
  }
  return kStock(x, kernel, stride, padding, dilation, ceil_mode);
}

template <int kDims, auto kStock>
Tensor adaptive_max_pool_nd(const Tensor& x, IntArrayRef output) {
  if (records_nothing(x)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return adaptive_max_pool_values(x, kDims, output);
  }
  const auto size = expanded(output, kDims);
  const bool fits =
      size.size() == kDims && std::all_of(size.begin(), size.end(), [](int64_t n) { return n > 0; });
  if (!use_pool_node(x, kDims) || !fits) return std::get<0>(kStock(x, output));
  if (x.dim() == kDims + 2) return max_pool(x, {}, size);
  return max_pool(x.unsqueeze(0), {}, size).squeeze(0);
}

// ---------------------------------------------------------------------------------------------------------

class AvgPoolBackward final : public LeanNode {
 public:
  AvgPoolBackward() : LeanNode("patchconv::AvgPoolBackward") {}
  Source input;
  AvgPoolSpec spec;
  StandIn like;

 protected:
  variable_list backward(const Tensor& grad) override {
    // Stock's operator is differentiable.
    if (at::GradMode::is_enabled()) return {spec.backward_with_aten(grad, like.tensor(grad))};
    return {avg_pool_backward(grad, like.sizes, like.format, spec)};
  }
  Tensor rebuild() override { return avg_pool_forward(input.get(*this), spec); }
  std::vector<Source*> sources() override { return {&input}; }
};

Tensor avg_pool(const Tensor& x, const AvgPoolSpec& spec) {
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = avg_pool_forward(x, spec);
  }
  const auto node = make_node<AvgPoolBackward>(x);
  node->input.note(x);
  node->spec = spec;
  node->like = StandIn(x);
  LeanNode::attach(y, node);
  return y;
}

Tensor lean_avg_pool2d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                       bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  const auto window = expanded(kernel, 2);
  if (!use_pool_node(x, 2) || window.size() != 2)
    return at::avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor);
  return avg_pool(x, {false, window, stride.vec(), padding.vec(), ceil_mode, count_include_pad, divisor});
}

Tensor lean_avg_pool3d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                       bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  const auto window = expanded(kernel, 3);
  if (!use_pool_node(x, 3) || window.size() != 3)
    return at::avg_pool3d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor);
  return avg_pool(x, {false, window, stride.vec(), padding.vec(), ceil_mode, count_include_pad, divisor});
}

// As in stock PyTorch: a 2-D pool over images of height one.
Tensor lean_avg_pool1d(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                       bool ceil_mode, bool count_include_pad) {
  if (!use_pool_node(x, 1) || kernel.size() != 1 || stride.size() > 1 || padding.size() != 1) {
    return at::avg_pool1d(x, kernel, stride, padding, ceil_mode, count_include_pad);
  }
  const int64_t step = stride.empty() ? kernel[0] : stride[0];
  return lean_avg_pool2d(x.unsqueeze(-2), {1, kernel[0]}, {1, step}, {0, padding[0]}, ceil_mode,
                         count_include_pad, std::nullopt)
      .squeeze(-2);
}

// Whether an adaptive pool gives one element. Stock computes that as a mean, which saves nothing either.
bool one(IntArrayRef size) {
  return std::all_of(size.begin(), size.end(), [](int64_t n) { return n == 1; });
}

Tensor lean_adaptive_avg_pool2d(const Tensor& x, IntArrayRef output) {
  const auto size = expanded(output, 2);
  if (!use_pool_node(x, 2) || size.size() != 2 || one(size)) return at::adaptive_avg_pool2d(x, size);
  return avg_pool(x, {true, size});
}

Tensor lean_adaptive_avg_pool3d(const Tensor& x, IntArrayRef output) {
  const auto size = expanded(output, 3);
  if (!use_pool_node(x, 3) || size.size() != 3 || one(size)) return at::adaptive_avg_pool3d(x, size);
  return avg_pool(x, {true, size});
}

Tensor lean_adaptive_avg_pool1d(const Tensor& x, IntArrayRef output) {
  if (!use_pool_node(x, 1) || output.size() != 1 || output[0] == 1) return at::adaptive_avg_pool1d(x, output);
  return lean_adaptive_avg_pool2d(x.unsqueeze(-2), {1, output[0]}).squeeze(-2);
}

TORCH_LIBRARY_IMPL(patchconv, Autograd, m) {
  m.impl("_max_pool_take", &take_autograd);
  m.impl("_max_pool_backward", &put_autograd);
  m.impl("max_pool1d", &max_pool_nd<1, &at::max_pool1d>);
  m.impl("max_pool2d", &max_pool_nd<2, &at::max_pool2d>);
  m.impl("max_pool3d", &max_pool_nd<3, &at::max_pool3d>);
  m.impl("adaptive_max_pool1d", &adaptive_max_pool_nd<1, &at::adaptive_max_pool1d>);
  m.impl("adaptive_max_pool2d", &adaptive_max_pool_nd<2, &at::adaptive_max_pool2d>);
  m.impl("adaptive_max_pool3d", &adaptive_max_pool_nd<3, &at::adaptive_max_pool3d>);
  m.impl("avg_pool1d", &lean_avg_pool1d);
  m.impl("avg_pool2d", &lean_avg_pool2d);
  m.impl("avg_pool3d", &lean_avg_pool3d);
  m.impl("adaptive_avg_pool1d", &lean_adaptive_avg_pool1d);
  m.impl("adaptive_avg_pool2d", &lean_adaptive_avg_pool2d);
  m.impl("adaptive_avg_pool3d", &lean_adaptive_avg_pool3d);
}

}  // namespace

}  // namespace patchconv
