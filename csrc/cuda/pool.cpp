// Max pools with small offsets on CUDA: checks, memory and the launch. By stock operators where the project's
// own kernels are not asked for (backend) or do not serve the dtype or the size.
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

// The pool as the kernels see it, or nothing: they serve planes and images that are dense, of dimensions
// below 2^31, and windows of at most 65536 places.
std::optional<kernels::MaxPool> described(const Tensor& like, IntArrayRef input, IntArrayRef output,
                                          const PoolSpec& spec) {
  const bool channels_last = !like.is_contiguous();
  if (!native_kernel_for(like) || like.numel() == 0 ||
      (channels_last && !like.is_contiguous(like.suggest_memory_format()))) {
    return std::nullopt;
  }
  const Pool pool(input.slice(2), output.slice(2), spec.kernel, spec.stride, spec.padding, spec.dilation);
  kernels::MaxPool result;
  result.dims = pool.dims;
  result.outer = channels_last ? input[0] : input[0] * input[1];
  result.inner = channels_last ? input[1] : 1;
  result.offset_bytes = static_cast<int>(offset_bytes(pool.positions()));
  return result.offset_bytes <= 2 && kernels::serves(result) ? std::optional(result) : std::nullopt;
}

at::ScalarType offset_dtype(const kernels::MaxPool& pool) {
  return pool.offset_bytes == 1 ? at::kByte : at::kUInt16;
}

Tensor dense(const Tensor& tensor) { return tensor.contiguous(tensor.suggest_memory_format()); }

std::tuple<Tensor, Tensor> max_pool_cuda(const Tensor& input, IntArrayRef kernel, IntArrayRef stride,
                                         IntArrayRef padding, IntArrayRef dilation, IntArrayRef output_size) {
  const Tensor x = dense(input);
  std::vector<int64_t> size{x.size(0), x.size(1)};
  size.insert(size.end(), output_size.begin(), output_size.end());
  const auto pool =
      described(x, x.sizes(), size, {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool) return max_pool_with_aten(input, kernel, stride, padding, dilation, output_size);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto options = x.options().memory_format(x.suggest_memory_format());
  Tensor y = at::empty(size, options), offsets = at::empty(size, options.dtype(offset_dtype(*pool)));
  kernels::launch_max_pool(kernel_type(x), *pool, x.const_data_ptr(), y.mutable_data_ptr(),
                           offsets.mutable_data_ptr(), /*take=*/false, current_stream(x));
  return {std::move(y), std::move(offsets)};
}

Tensor max_pool_take_cuda(const Tensor& input, const Tensor& offsets, IntArrayRef kernel, IntArrayRef stride,
                          IntArrayRef padding, IntArrayRef dilation) {
  const auto format = offsets.suggest_memory_format();
  const Tensor x = input.contiguous(format), places = offsets.contiguous(format);
  const auto pool =
      described(x, x.sizes(), places.sizes(), {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool || places.scalar_type() != offset_dtype(*pool)) {
    return max_pool_take_with_aten(input, offsets, kernel, stride, padding, dilation);
  }
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor y = at::empty_like(places, x.options());
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
  const auto pool =
      described(g, size, places.sizes(), {kernel.vec(), stride.vec(), padding.vec(), dilation.vec()});
  if (!pool || places.scalar_type() != offset_dtype(*pool)) {
    return max_pool_backward_with_aten(grad, offsets, input_size, kernel, stride, padding, dilation);
  }
  const c10::cuda::CUDAGuard guard(g.device());
  const Tensor result = at::empty(size, g.options().memory_format(format));
  kernels::launch_max_pool_backward(kernel_type(g), *pool, g.const_data_ptr(), places.const_data_ptr(),
                                    result.mutable_data_ptr(), current_stream(g));
  return result;
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_max_pool", &max_pool_cuda);
  m.impl("_max_pool_take", &max_pool_take_cuda);
  m.impl("_max_pool_backward", &max_pool_backward_cuda);
}

}  // namespace

}  // namespace patchconv
