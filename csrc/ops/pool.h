// Pooling windows and the pooling operators: max pools, which save the position of each maximum in its
// window, and average pools, which save sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace patchconv {

// One number per spatial dimension. An empty `kernel` means adaptive windows.
struct PoolSpec {
  std::vector<int64_t> kernel, stride, padding, dilation;
};

std::vector<int64_t> expanded(at::IntArrayRef list, int64_t dims);  // one number for all dimensions
// From the arguments of a stock max pool. An empty stride is the kernel.
PoolSpec pool_spec(int64_t dims, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                   at::IntArrayRef dilation);
// The spatial sizes of the output. None for arguments that do not fit: stock raises their errors.
std::optional<std::vector<int64_t>> pool_output_size(const at::Tensor& x, const PoolSpec& spec,
                                                     bool ceil_mode);

// A max pool of which nothing is recorded. Positions take one byte meanwhile, where stock's take eight.
at::Tensor max_pool_values(const at::Tensor& x, int64_t dims, at::IntArrayRef kernel, at::IntArrayRef stride,
                           at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode);
at::Tensor adaptive_max_pool_values(const at::Tensor& x, int64_t dims, at::IntArrayRef output_size);

// patchconv::_max_pool*, through the dispatcher. Inputs are batched: (N, C, L), (N, C, H, W) or (N, C, D, H,
// W).
std::tuple<at::Tensor, at::Tensor> max_pool_forward(const at::Tensor& input, const PoolSpec& spec,
                                                    at::IntArrayRef output_size);
at::Tensor max_pool_take(const at::Tensor& input, const at::Tensor& offsets, const PoolSpec& spec);
at::Tensor max_pool_backward(const at::Tensor& grad, const at::Tensor& offsets,
                             c10::SymIntArrayRef input_size, const PoolSpec& spec);

// The same by stock operators, for devices, dtypes and sizes without a kernel here.
std::tuple<at::Tensor, at::Tensor> max_pool_with_aten(const at::Tensor& input, at::IntArrayRef kernel,
                                                      at::IntArrayRef stride, at::IntArrayRef padding,
                                                      at::IntArrayRef dilation, at::IntArrayRef output_size);
at::Tensor max_pool_take_with_aten(const at::Tensor& input, const at::Tensor& offsets, at::IntArrayRef kernel,
                                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation);
at::Tensor max_pool_backward_with_aten(const at::Tensor& grad, const at::Tensor& offsets,
                                       c10::SymIntArrayRef input_size, at::IntArrayRef kernel,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation);

// An average pool over two or three dimensions.
struct AvgPoolSpec {
  bool adaptive = false;
  std::vector<int64_t> kernel, stride = {}, padding = {};  // kernel: the output's size if adaptive
  bool ceil_mode = false, count_include_pad = true;
  std::optional<int64_t> divisor = {};

  at::Tensor forward_with_aten(const at::Tensor& x) const;
  // `like` stands for the input: only its sizes and layout are read.
  at::Tensor backward_with_aten(const at::Tensor& grad, const at::Tensor& like) const;
};

// patchconv::_avg_pool*, through the dispatcher. Unbatched inputs too.
at::Tensor avg_pool_forward(const at::Tensor& input, const AvgPoolSpec& spec);
at::Tensor avg_pool_backward(const at::Tensor& grad, at::IntArrayRef input_size, at::MemoryFormat format,
                             const AvgPoolSpec& spec);

// Stands for an input of which a stock backward operator reads only sizes and layout.
at::Tensor stand_in(const at::Tensor& grad, at::IntArrayRef sizes, at::MemoryFormat format);

}  // namespace patchconv
