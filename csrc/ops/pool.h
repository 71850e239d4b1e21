// Pooling windows and the operators of max pools, which keep the place of each maximum in its window.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace patchconv {

// One number a spatial dimension. An empty `kernel` means adaptive windows.
struct PoolSpec {
  std::vector<int64_t> kernel, stride, padding, dilation;
};

// patchconv::_max_pool*, through the dispatcher. Inputs are batched: (N, C, L), (N, C, H, W) or (N, C, D, H,
// W).
std::tuple<at::Tensor, at::Tensor> max_pool_forward(const at::Tensor& input, const PoolSpec& spec,
                                                    at::IntArrayRef output_size);
at::Tensor max_pool_take(const at::Tensor& input, const at::Tensor& offsets, const PoolSpec& spec);
at::Tensor max_pool_backward(const at::Tensor& grad, const at::Tensor& offsets,
                             c10::SymIntArrayRef input_size, const PoolSpec& spec);

// The same by stock operators, for devices, dtypes and sizes that have no kernel of ours.
std::tuple<at::Tensor, at::Tensor> max_pool_with_aten(const at::Tensor& input, at::IntArrayRef kernel,
                                                      at::IntArrayRef stride, at::IntArrayRef padding,
                                                      at::IntArrayRef dilation, at::IntArrayRef output_size);
at::Tensor max_pool_take_with_aten(const at::Tensor& input, const at::Tensor& offsets, at::IntArrayRef kernel,
                                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation);
at::Tensor max_pool_backward_with_aten(const at::Tensor& grad, const at::Tensor& offsets,
                                       c10::SymIntArrayRef input_size, at::IntArrayRef kernel,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation);

}  // namespace patchconv
