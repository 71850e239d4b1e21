// Average pools by stock operators, and the calls to them through the dispatcher.
#include <ATen/ops/_adaptive_avg_pool2d.h>
#include <ATen/ops/_adaptive_avg_pool2d_backward.h>
#include <ATen/ops/_adaptive_avg_pool3d.h>
#include <ATen/ops/_adaptive_avg_pool3d_backward.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool2d_backward.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/avg_pool3d_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/handle.h"
#include "ops/pool.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

namespace {

AvgPoolSpec spec_of(bool adaptive, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                    bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  return {adaptive, kernel.vec(), stride.vec(), padding.vec(), ceil_mode, count_include_pad, divisor};
}

Tensor forward(const Tensor& input, bool adaptive, IntArrayRef kernel, IntArrayRef stride,
               IntArrayRef padding, bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  return spec_of(adaptive, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
      .forward_with_aten(input);
}

Tensor backward(const Tensor& grad, IntArrayRef input_size, at::MemoryFormat format, bool adaptive,
                IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, bool ceil_mode,
                bool count_include_pad, std::optional<int64_t> divisor) {
  return spec_of(adaptive, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
      .backward_with_aten(grad, stand_in(grad, input_size, format));
}

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_avg_pool", &forward);
  m.impl("_avg_pool_backward", &backward);
}

}  // namespace

Tensor AvgPoolSpec::forward_with_aten(const Tensor& x) const {
  const bool plane = kernel.size() == 2;
  if (adaptive) return plane ? at::_adaptive_avg_pool2d(x, kernel) : at::_adaptive_avg_pool3d(x, kernel);
  return plane ? at::avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
               : at::avg_pool3d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor);
}

Tensor AvgPoolSpec::backward_with_aten(const Tensor& grad, const Tensor& like) const {
  const bool plane = kernel.size() == 2;
  if (adaptive) {
    return plane ? at::_adaptive_avg_pool2d_backward(grad, like)
                 : at::_adaptive_avg_pool3d_backward(grad, like);
  }
  return plane ? at::avg_pool2d_backward(grad, like, kernel, stride, padding, ceil_mode, count_include_pad,
                                         divisor)
               : at::avg_pool3d_backward(grad, like, kernel, stride, padding, ceil_mode, count_include_pad,
                                         divisor);
}

// One expanded element has the sizes of a contiguous tensor; channels_last needs real memory.
Tensor stand_in(const Tensor& grad, IntArrayRef sizes, at::MemoryFormat format) {
  return format == at::MemoryFormat::Contiguous ? at::empty({1}, grad.options()).expand(sizes)
                                                : at::empty(sizes, grad.options().memory_format(format));
}

Tensor avg_pool_forward(const Tensor& input, const AvgPoolSpec& spec) {
  static const auto op = handle<decltype(forward)>("_avg_pool");
  return op.call(input, spec.adaptive, spec.kernel, spec.stride, spec.padding, spec.ceil_mode,
                 spec.count_include_pad, spec.divisor);
}

Tensor avg_pool_backward(const Tensor& grad, IntArrayRef input_size, at::MemoryFormat format,
                         const AvgPoolSpec& spec) {
  static const auto op = handle<decltype(backward)>("_avg_pool_backward");
  return op.call(grad, input_size, format, spec.adaptive, spec.kernel, spec.stride, spec.padding,
                 spec.ceil_mode, spec.count_include_pad, spec.divisor);
}

}  // namespace patchconv
