// Max pools with small offsets where no kernel makes them: through stock's 64-bit indices, which exist only
// during the call. And pools under torch.func: stock operators.
#include "ops/pool.h"

#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/adaptive_max_pool1d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "core/pool.h"
#include "ops/activation.h"
#include "ops/handle.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

namespace {

at::ScalarType offset_type(const Pool& pool) {
  const int64_t bytes = offset_bytes(pool.positions());
  return bytes == 1 ? at::kByte : bytes == 2 ? at::kUInt16 : at::kInt;
}

Pool windows_of(const PoolSpec& spec, IntArrayRef input, IntArrayRef output) {
  return {input, output, spec.kernel, spec.stride, spec.padding, spec.dilation};
}

// From offsets to flat indices into the input's grid and back, dimension by dimension.
struct Grid {
  Grid(const PoolSpec& spec, IntArrayRef input, IntArrayRef output, const at::Device& device)
      : sizes(input.vec()) {
    const size_t dims = output.size();
    const auto options = at::TensorOptions().dtype(at::kLong).device(device);
    for (size_t d = 0; d < dims; ++d) {
      std::vector<int64_t> shape(dims, 1);
      shape[d] = output[d];
      // Created on the device: a copy from the host would synchronise, and cannot be captured in a graph.
      const Tensor o = at::arange(output[d], options);
      Tensor start, taps;
      if (spec.kernel.empty()) {
        start = o.mul(input[d]).div_(output[d], "floor");
        taps = o.add(1).mul_(input[d]).add_(output[d] - 1).div_(output[d], "floor").sub_(start);
      } else {
        start = o.mul(spec.stride[d]).sub_(spec.padding[d]);
        taps = at::full({output[d]}, spec.kernel[d], options);
      }
      begin.push_back(start.view(shape));
      width.push_back(taps.view(shape));
      step.push_back(spec.kernel.empty() ? 1 : spec.dilation[d]);
    }
  }
  Tensor indices(const Tensor& offsets) const {
    Tensor rest = offsets.to(at::kLong), index;
    int64_t plane = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      const Tensor place = rest.remainder(width[d]).mul_(step[d]).add_(begin[d]).mul_(plane);
      index = index.defined() ? index.add_(place) : place;
      rest = rest.div(width[d], "floor");
      plane *= sizes[d];
    }
    return index;
  }
  Tensor offsets(const Tensor& indices, at::ScalarType dtype) const {
    Tensor rest = indices, offset, window;
    for (size_t d = sizes.size(); d-- > 0;) {
      const Tensor place = rest.remainder(sizes[d]).sub_(begin[d]).div_(step[d], "floor");
      offset = offset.defined() ? offset.add_(place.mul_(window)) : place;
      window = window.defined() ? window.mul(width[d]) : width[d];
      rest = rest.div(sizes[d], "floor");
    }
    return offset.to(dtype);
  }

  std::vector<int64_t> sizes, step;
  std::vector<Tensor> begin, width;
};

IntArrayRef spatial(const Tensor& tensor) { return tensor.sizes().slice(2); }

}  // namespace

std::tuple<Tensor, Tensor> max_pool_with_aten(const Tensor& input, IntArrayRef kernel, IntArrayRef stride,
                                              IntArrayRef padding, IntArrayRef dilation,
                                              IntArrayRef output_size) {
  const PoolSpec spec{kernel.vec(), stride.vec(), padding.vec(), dilation.vec()};
  const size_t dims = output_size.size();
  Tensor output, indices;
  if (kernel.empty()) {
    std::tie(output, indices) = dims == 1   ? at::adaptive_max_pool1d(input, output_size)
                                : dims == 2 ? at::adaptive_max_pool2d(input, output_size)
                                            : at::adaptive_max_pool3d(input, output_size);
  } else {
    // The output's size shows whether a last window that fits only in part counts (ceil mode).
    bool ceil = false;
    for (size_t d = 0; d < dims; ++d) {
      const int64_t reach = dilation[d] * (kernel[d] - 1) + 1;
      ceil |=
          (output_size[d] - 1) * stride[d] + reach > input.size(2 + static_cast<int64_t>(d)) + 2 * padding[d];
    }
    auto with_one = [](IntArrayRef list, int64_t one) { return std::vector<int64_t>{one, list[0]}; };
    if (dims == 1) {
      std::tie(output, indices) =
          at::max_pool2d_with_indices(input.unsqueeze(2), with_one(kernel, 1), with_one(stride, 1),
                                      with_one(padding, 0), with_one(dilation, 1), ceil);
      output = output.squeeze(2);
      indices = indices.squeeze(2);
    } else {
      std::tie(output, indices) =
          dims == 2 ? at::max_pool2d_with_indices(input, kernel, stride, padding, dilation, ceil)
                    : at::max_pool3d_with_indices(input, kernel, stride, padding, dilation, ceil);
    }
  }
  const auto format = input.suggest_memory_format();  // stock loses it for adaptive pools of volumes on CUDA
  output = output.contiguous(format);
  indices = indices.contiguous(format);
  const Grid grid(spec, spatial(input), output_size, input.device());
  return {output, grid.offsets(indices, offset_type(windows_of(spec, spatial(input), output_size)))};
}

namespace {

Tensor indices_with_aten(const Tensor& offsets, c10::SymIntArrayRef input_size, IntArrayRef kernel,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  const PoolSpec spec{kernel.vec(), stride.vec(), padding.vec(), dilation.vec()};
  const auto size = C10_AS_INTARRAYREF_SLOW(input_size).slice(2);
  return Grid(spec, size, spatial(offsets), offsets.device()).indices(offsets);
}

}  // namespace

Tensor max_pool_take_with_aten(const Tensor& input, const Tensor& offsets, IntArrayRef kernel,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  const Tensor indices = indices_with_aten(offsets, input.sym_sizes(), kernel, stride, padding, dilation);
  const Tensor taken = input.flatten(2).gather(2, indices.flatten(2)).view(offsets.sizes());
  return taken.contiguous(offsets.suggest_memory_format());
}

Tensor max_pool_backward_with_aten(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                                   IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                                   IntArrayRef dilation) {
  const Tensor indices = indices_with_aten(offsets, input_size, kernel, stride, padding, dilation);
  const auto size = C10_AS_INTARRAYREF_SLOW(input_size);
  Tensor result = at::zeros({size[0], size[1], c10::multiply_integers(size.slice(2))}, grad.options());
  result.scatter_add_(2, indices.flatten(2), grad.flatten(2));
  return result.view(size).contiguous(offsets.suggest_memory_format());
}

namespace {

TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("_max_pool", &max_pool_with_aten);
  m.impl("_max_pool_take", &max_pool_take_with_aten);
  m.impl("_max_pool_backward", &max_pool_backward_with_aten);
  m.impl("_max_pool_indices", &indices_with_aten);
}

TORCH_LIBRARY_IMPL(patchconv, Meta, m) {
  m.impl("_max_pool", [](const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                         IntArrayRef dilation, IntArrayRef output_size) {
    std::vector<int64_t> size{input.size(0), input.size(1)};
    size.insert(size.end(), output_size.begin(), output_size.end());
    const PoolSpec spec{kernel.vec(), stride.vec(), padding.vec(), dilation.vec()};
    const auto options = input.options().memory_format(input.suggest_memory_format());
    return std::make_tuple(
        at::empty(size, options),
        at::empty(size, options.dtype(offset_type(windows_of(spec, spatial(input), output_size)))));
  });
  m.impl("_max_pool_take", [](const Tensor& input, const Tensor& offsets, IntArrayRef, IntArrayRef,
                              IntArrayRef, IntArrayRef) { return at::empty_like(offsets, input.options()); });
  m.impl("_max_pool_backward", [](const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                                  IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef) {
    return at::empty_symint(input_size, grad.options().memory_format(offsets.suggest_memory_format()));
  });
  m.impl("_max_pool_indices", [](const Tensor& offsets, c10::SymIntArrayRef, IntArrayRef, IntArrayRef,
                                 IntArrayRef, IntArrayRef) { return at::empty_like(offsets, at::kLong); });
}

template <int kDims>
Tensor values(const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
              IntArrayRef dilation, bool ceil_mode) {
  return max_pool_values(x, kDims, kernel, stride, padding, dilation, ceil_mode);
}

template <int kDims>
Tensor adaptive_values(const Tensor& x, IntArrayRef output_size) {
  return adaptive_max_pool_values(x, kDims, output_size);
}

void stock_max_pools(torch::Library& m) {
  m.impl("max_pool1d", TORCH_FN(at::max_pool1d));
  m.impl("max_pool2d", TORCH_FN(at::max_pool2d));
  m.impl("max_pool3d", TORCH_FN(at::max_pool3d));
  m.impl("adaptive_max_pool1d",
         [](const Tensor& x, IntArrayRef size) { return std::get<0>(at::adaptive_max_pool1d(x, size)); });
  m.impl("adaptive_max_pool2d",
         [](const Tensor& x, IntArrayRef size) { return std::get<0>(at::adaptive_max_pool2d(x, size)); });
  m.impl("adaptive_max_pool3d",
         [](const Tensor& x, IntArrayRef size) { return std::get<0>(at::adaptive_max_pool3d(x, size)); });
}

void stock_average_pools(torch::Library& m) {
  m.impl("avg_pool1d", TORCH_FN(at::avg_pool1d));
  m.impl("avg_pool2d", TORCH_FN(at::avg_pool2d));
  m.impl("avg_pool3d", TORCH_FN(at::avg_pool3d));
  m.impl("adaptive_avg_pool1d", TORCH_FN(at::adaptive_avg_pool1d));
  m.impl("adaptive_avg_pool2d",
         [](const Tensor& x, IntArrayRef size) { return at::adaptive_avg_pool2d(x, size); });
  m.impl("adaptive_avg_pool3d",
         [](const Tensor& x, IntArrayRef size) { return at::adaptive_avg_pool3d(x, size); });
}
TORCH_LIBRARY_IMPL(patchconv, CompositeExplicitAutograd, m) {
  m.impl("max_pool1d", &values<1>);
  m.impl("max_pool2d", &values<2>);
  m.impl("max_pool3d", &values<3>);
  m.impl("adaptive_max_pool1d", &adaptive_values<1>);
  m.impl("adaptive_max_pool2d", &adaptive_values<2>);
  m.impl("adaptive_max_pool3d", &adaptive_values<3>);
  stock_average_pools(m);
}
TORCH_LIBRARY_IMPL(patchconv, FuncTorchDynamicLayerFrontMode, m) {
  stock_max_pools(m);
  stock_average_pools(m);
}

}  // namespace

std::tuple<Tensor, Tensor> max_pool_forward(const Tensor& input, const PoolSpec& spec,
                                            IntArrayRef output_size) {
  static const auto op = handle<std::tuple<Tensor, Tensor>(
      const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef)>("_max_pool");
  return op.call(input, spec.kernel, spec.stride, spec.padding, spec.dilation, output_size);
}

Tensor max_pool_take(const Tensor& input, const Tensor& offsets, const PoolSpec& spec) {
  static const auto op =
      handle<Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef)>(
          "_max_pool_take");
  return op.call(input, offsets, spec.kernel, spec.stride, spec.padding, spec.dilation);
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                         const PoolSpec& spec) {
  static const auto op = handle<Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, IntArrayRef,
                                       IntArrayRef, IntArrayRef, IntArrayRef)>("_max_pool_backward");
  return op.call(grad, offsets, input_size, spec.kernel, spec.stride, spec.padding, spec.dilation);
}

std::vector<int64_t> expanded(IntArrayRef list, int64_t dims) {
  return list.size() == 1 ? std::vector<int64_t>(dims, list[0]) : list.vec();
}

PoolSpec pool_spec(int64_t dims, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation) {
  return {expanded(kernel, dims), expanded(stride.empty() ? kernel : stride, dims), expanded(padding, dims),
          expanded(dilation, dims)};
}

std::optional<std::vector<int64_t>> pool_output_size(const Tensor& x, const PoolSpec& spec, bool ceil_mode) {
  std::vector<int64_t> sizes;
  const size_t dims = spec.kernel.size();
  if (dims == 0) return std::nullopt;
  for (const auto* list : {&spec.stride, &spec.padding, &spec.dilation}) {
    if (list->size() != dims) return std::nullopt;
  }
  for (size_t d = 0; d < dims; ++d) {
    const int64_t in = x.size(x.dim() - static_cast<int64_t>(dims - d));
    const int64_t k = spec.kernel[d], s = spec.stride[d], p = spec.padding[d], step = spec.dilation[d];
    if (k < 1 || s < 1 || p < 0 || step < 1 || p > (step * (k - 1) + 1) / 2) return std::nullopt;
    const int64_t room = in + 2 * p - step * (k - 1) - 1;
    if (room < 0 && !(ceil_mode && room + s > 0)) return std::nullopt;
    int64_t out = (room + (ceil_mode ? s - 1 : 0)) / s + 1;
    if (ceil_mode && (out - 1) * s >= in + p) --out;
    if (out < 1) return std::nullopt;
    sizes.push_back(out);
  }
  return sizes;
}

namespace {

// Whether x is an image of so many dimensions, with or without a batch, that this library pools.
bool pools(const Tensor& x, int64_t dims) {
  return served(x) && (x.dim() == dims + 1 || x.dim() == dims + 2) && x.numel() > 0;
}

Tensor maxima(const Tensor& x, int64_t dims, const PoolSpec& spec, IntArrayRef output_size) {
  if (x.dim() == dims + 2) return std::get<0>(max_pool_forward(x, spec, output_size));
  return std::get<0>(max_pool_forward(x.unsqueeze(0), spec, output_size)).squeeze(0);
}

}  // namespace

Tensor max_pool_values(const Tensor& x, int64_t dims, IntArrayRef kernel, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const PoolSpec spec = pool_spec(dims, kernel, stride, padding, dilation);
  if (pools(x, dims) && static_cast<int64_t>(spec.kernel.size()) == dims) {
    if (const auto size = pool_output_size(x, spec, ceil_mode)) return maxima(x, dims, spec, *size);
  }
  const auto stock = dims == 1 ? &at::max_pool1d : dims == 2 ? &at::max_pool2d : &at::max_pool3d;
  return stock(x, kernel, stride, padding, dilation, ceil_mode);
}

Tensor adaptive_max_pool_values(const Tensor& x, int64_t dims, IntArrayRef output_size) {
  const auto size = expanded(output_size, dims);
  const bool fits = static_cast<int64_t>(size.size()) == dims &&
                    std::all_of(size.begin(), size.end(), [](int64_t n) { return n > 0; });
  if (fits && pools(x, dims)) return maxima(x, dims, {}, size);
  if (dims == 1) return std::get<0>(at::adaptive_max_pool1d(x, output_size));
  if (dims == 2) return std::get<0>(at::adaptive_max_pool2d(x, output_size));
  return std::get<0>(at::adaptive_max_pool3d(x, output_size));
}

}  // namespace patchconv
