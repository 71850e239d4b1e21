// Max pools with small offsets, and average pools, on CUDA: checks, memory and the launch. Stock operators
// are used unless the backend asks for this project's kernels and they serve the dtype and the size.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/kernel_call.h"
#include "cuda/kernels/pool.h"
#include "ops/pool.h"

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;

namespace {

// The pool in the form that kernels take, or nothing if they do not serve it: they serve dimensions below
// 2^31 and, for max pools, windows of at most 65536 positions. All tensors are dense in `format`, which a
// tensor with sizes of one does not show.
template <typename Description>
std::optional<Description> described(const Tensor& like, at::MemoryFormat format, IntArrayRef input,
                                     IntArrayRef output, const PoolSpec& spec) {
  if (!native_kernel_for(like) || like.numel() == 0 || !like.is_contiguous(format)) return std::nullopt;
  const Pool pool(input.slice(2), output.slice(2), spec.kernel, spec.stride, spec.padding, spec.dilation);
  Description result;
  result.dims = pool.dims;
  const bool planes = format == at::MemoryFormat::Contiguous;
  result.outer = planes ? input[0] * input[1] : input[0];
  result.inner = planes ? 1 : input[1];
  if constexpr (std::is_same_v<Description, kernels::MaxPool>) {
    result.offset_bytes = static_cast<int>(offset_bytes(pool.positions()));
    if (result.offset_bytes > 2) return std::nullopt;
  }
  return kernels::serves(result) ? std::optional(result) : std::nullopt;
}

at::ScalarType offset_dtype(const kernels::MaxPool& pool) {
  return pool.offset_bytes == 1 ? at::kByte : at::kUInt16;
}

std::tuple<Tensor, Tensor> max_pool_cuda(const Tensor& input, IntArrayRef kernel, IntArrayRef stride,
                                         IntArrayRef padding, IntArrayRef dilation, IntArrayRef output_size) {
  const auto format = input.suggest_memory_format();
  const Tensor x = input.contiguous(format);
  std::vector<int64_t> size{x.size(0), x.size(1)};
  size.insert(size.end(), output_size.begin(), output_size.end());
  const auto pool = described<kernels::MaxPool>(x, format, x.sizes(), size,
                                                {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool) return max_pool_with_aten(input, kernel, stride, padding, dilation, output_size);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto options = x.options().memory_format(format);
  Tensor y = at::empty(size, options), offsets = at::empty(size, options.dtype(offset_dtype(*pool)));
  kernels::launch_max_pool(kernel_type(x), *pool, x.const_data_ptr(), y.mutable_data_ptr(),
                           offsets.mutable_data_ptr(), /*take=*/false, current_stream(x));
  return {std::move(y), std::move(offsets)};
}

Tensor max_pool_take_cuda(const Tensor& input, const Tensor& offsets, IntArrayRef kernel, IntArrayRef stride,
                          IntArrayRef padding, IntArrayRef dilation) {
  const auto format = offsets.suggest_memory_format();
  const Tensor x = input.contiguous(format), places = offsets.contiguous(format);
  const auto pool = described<kernels::MaxPool>(x, format, x.sizes(), places.sizes(),
                                                {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool || places.scalar_type() != offset_dtype(*pool)) {
    return max_pool_take_with_aten(input, offsets, kernel, stride, padding, dilation);
  }
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor y = at::empty(places.sizes(), x.options().memory_format(format));
  kernels::launch_max_pool(kernel_type(x), *pool, x.const_data_ptr(), y.mutable_data_ptr(),
                           const_cast<void*>(places.const_data_ptr()), /*take=*/true, current_stream(x));
  return y;
}

Tensor max_pool_backward_cuda(const Tensor& grad, const Tensor& offsets, c10::SymIntArrayRef input_size,
                              IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                              IntArrayRef dilation) {
  const auto format = offsets.suggest_memory_format();
  const Tensor g = grad.contiguous(format), places = offsets.contiguous(format);
  const auto size = C10_AS_INTARRAYREF_SLOW(input_size);
  const auto pool = described<kernels::MaxPool>(g, format, size, places.sizes(),
                                                {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool || places.scalar_type() != offset_dtype(*pool)) {
    return max_pool_backward_with_aten(grad, offsets, input_size, kernel, stride, padding, dilation);
  }
  const c10::cuda::CUDAGuard guard(g.device());
  const Tensor result = at::empty(size, g.options().memory_format(format));
  kernels::launch_max_pool_backward(kernel_type(g), *pool, g.const_data_ptr(), places.const_data_ptr(),
                                    result.mutable_data_ptr(), current_stream(g));
  return result;
}

// The sizes of an average pool's output, counted as stock does.
std::vector<int64_t> pooled(IntArrayRef input, const AvgPoolSpec& spec) {
  std::vector<int64_t> size(input.begin(), input.begin() + 2);
  if (spec.adaptive) size.insert(size.end(), spec.kernel.begin(), spec.kernel.end());
  for (size_t d = 0; d < spec.kernel.size() && !spec.adaptive; ++d) {
    const int64_t k = spec.kernel[d], s = spec.stride.empty() ? k : spec.stride[d];
    const int64_t in = input[2 + d], p = spec.padding.size() == 1 ? spec.padding[0] : spec.padding[d];
    int64_t out = (in + 2 * p - k + (spec.ceil_mode ? s - 1 : 0)) / s + 1;
    if (spec.ceil_mode && (out - 1) * s >= in + p) --out;
    size.push_back(out);
  }
  return size;
}

// The windows, with one number per dimension.
PoolSpec windows(const AvgPoolSpec& spec) {
  if (spec.adaptive) return {};
  const size_t dims = spec.kernel.size();
  const auto all = [&](const std::vector<int64_t>& list) {
    return list.size() == 1 ? std::vector<int64_t>(dims, list[0]) : list;
  };
  return {spec.kernel, spec.stride.empty() ? spec.kernel : all(spec.stride), all(spec.padding),
          std::vector<int64_t>(dims, 1)};
}

std::optional<kernels::AvgPool> described(const Tensor& like, at::MemoryFormat format, IntArrayRef input,
                                          IntArrayRef output, const AvgPoolSpec& spec) {
  auto pool = described<kernels::AvgPool>(like, format, input, output, windows(spec));
  if (pool) {
    pool->count_padding = spec.count_include_pad;
    pool->divisor = spec.divisor.value_or(0);
  }
  return pool;
}

// Whether the kernels may be used at all. For calls that they do not serve, stock checks the arguments.
bool kernels_serve(const Tensor& tensor, IntArrayRef input, const AvgPoolSpec& spec) {
  const auto positive = [](IntArrayRef list, int64_t least) {
    return std::all_of(list.begin(), list.end(), [&](int64_t n) { return n >= least; });
  };
  const size_t dims = spec.kernel.size();
  const auto fits = [&](const std::vector<int64_t>& list) { return list.size() == 1 || list.size() == dims; };
  if (!spec.adaptive && ((!spec.stride.empty() && !fits(spec.stride)) || !fits(spec.padding))) return false;
  if (!native_kernel_for(tensor) || input.size() != dims + 2 || !positive(input, 1) ||
      !positive(spec.kernel, 1) || !positive(spec.stride, 1) || !positive(spec.padding, 0)) {
    return false;
  }
  if (spec.adaptive) return true;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t p = spec.padding.size() == 1 ? spec.padding[0] : spec.padding[d];
    if (2 * p > spec.kernel[d] || input[2 + d] + 2 * p < spec.kernel[d]) return false;
  }
  return !spec.divisor || *spec.divisor != 0;
}

Tensor avg_pool_cuda(const Tensor& input, bool adaptive, IntArrayRef kernel, IntArrayRef stride,
                     IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                     std::optional<int64_t> divisor) {
  const AvgPoolSpec spec{adaptive,  kernel.vec(),      stride.vec(), padding.vec(),
                         ceil_mode, count_include_pad, divisor};
  if (!kernels_serve(input, input.sizes(), spec)) return spec.forward_with_aten(input);
  // Volumes come out contiguous, as stock's do.
  const auto format = kernel.size() == 2 ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
  const Tensor x = input.contiguous(format);
  const std::vector<int64_t> size = pooled(x.sizes(), spec);
  const auto pool = described(x, format, x.sizes(), size, spec);
  if (!pool) return spec.forward_with_aten(input);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::empty(size, x.options().memory_format(format));
  kernels::launch_avg_pool(kernel_type(x), *pool, x.const_data_ptr(), y.mutable_data_ptr(),
                           current_stream(x));
  return y;
}

Tensor avg_pool_backward_cuda(const Tensor& grad, IntArrayRef input_size, at::MemoryFormat format,
                              bool adaptive, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                              bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  const AvgPoolSpec spec{adaptive,  kernel.vec(),      stride.vec(), padding.vec(),
                         ceil_mode, count_include_pad, divisor};
  const auto by_aten = [&] { return spec.backward_with_aten(grad, stand_in(grad, input_size, format)); };
  if (!kernels_serve(grad, input_size, spec)) return by_aten();
  if (kernel.size() == 3) format = at::MemoryFormat::Contiguous;
  const Tensor g = grad.contiguous(format);
  Tensor result = at::empty(input_size, g.options().memory_format(format));
  const auto pool = described(g, format, input_size, g.sizes(), spec);
  if (!pool) return by_aten();
  const c10::cuda::CUDAGuard guard(g.device());
  kernels::launch_avg_pool_backward(kernel_type(g), *pool, g.const_data_ptr(), result.mutable_data_ptr(),
                                    current_stream(g));
  return result;
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_avg_pool", &avg_pool_cuda);
  m.impl("_avg_pool_backward", &avg_pool_backward_cuda);
  m.impl("_max_pool", &max_pool_cuda);
  m.impl("_max_pool_take", &max_pool_take_cuda);
  m.impl("_max_pool_backward", &max_pool_backward_cuda);
}

}  // namespace

}  // namespace patchconv
