// The checks of a convolution's arguments, with their error messages. They are written once, for concrete
// sizes (CPU, CUDA) and symbolic ones (Meta).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <string_view>
#include <vector>

#include "core/conv.h"
#include "ops/optional.h"

namespace patchconv {

// The arguments of a public operator as the caller gave them, checked as far as that does not depend on
// tensors. A list has one entry, or one per dimension; `padding` of a convolution may have (before, after) of
// each dimension. One number for `splits` cuts the first dimension. `op`: the name, if it is not "conv2d" and
// so on.
ConvSpec conv_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups, std::string_view padding_mode, at::OptionalIntArrayRef splits,
                   const char* op = nullptr);
ConvSpec transposed_spec(int dims, at::IntArrayRef stride, at::IntArrayRef padding,
                         at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef dilation,
                         at::OptionalIntArrayRef splits);

// The lists in which a ConvSpec goes through the dispatcher: one entry per dimension, `padding` as (before,
// after), `splits` empty for automatic, `output_padding` empty for a convolution.
struct ConvLists {
  explicit ConvLists(const ConvSpec& spec);
  ConvLists(const ConvLists&) = delete;

  std::array<int64_t, 3> stride_of, dilation_of;
  std::array<int64_t, 6> padding_of;
  at::IntArrayRef stride, padding, dilation, output_padding, splits;
};
ConvSpec spec_of_lists(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                       at::IntArrayRef output_padding, at::IntArrayRef splits, int64_t groups,
                       bool transposed, std::string_view padding_mode);

// What a backward call is given. Non-owning: valid while the call lasts.
struct ConvBackwardArgs {
  const at::Tensor& grad_output;
  const OptionalTensor& input;   // needed only for the weight's gradient
  const OptionalTensor& weight;  // needed only for the input's gradient
  c10::SymIntArrayRef input_size, weight_size;
  std::array<bool, 3> output_mask;  // which gradients: of input, weight and bias
  // If defined, one bit per element of grad_output in its memory order, which is dense (core/mask.h):
  // elements whose bit is 0 count as zero.
  at::Tensor bits = {};
};

// What is applied to a convolution's sums, each part optional: relu(sums * scale + bias + residual). Where
// this project's kernels run, the result is written once; elsewhere the parts follow in place.
struct FusedParts {
  const OptionalTensor& scale;     // (K)
  const OptionalTensor& residual;  // of the result's shape and dtype
  bool relu = false;
  bool mask = false;  // also return the bits of ReLU (core/mask.h); if not, an empty tensor in their place
};

// The gradient with its bits applied, and the call with it in place of the two.
at::Tensor masked_grad(const ConvBackwardArgs& args);
inline ConvBackwardArgs without_bits(const ConvBackwardArgs& args, const at::Tensor& grad) {
  return {grad, args.input, args.weight, args.input_size, args.weight_size, args.output_mask};
}

// Checks the sizes of input and weight and returns the output's: batched or not, as the input is. Int is
// int64_t or c10::SymInt.
template <typename Int>
std::vector<Int> check_sizes(const ConvSpec& spec, c10::ArrayRef<Int> input, c10::ArrayRef<Int> weight);

// Checks dtype, device and layout of the tensors of a forward call, and the bias's size.
void check_forward_tensors(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                           const OptionalTensor& bias);

// Raises where a part does not fit the result's sizes.
void check_fused(const FusedParts& parts, const at::Tensor& input, c10::SymIntArrayRef sizes);

// All of a backward call. A tensor that a requested gradient needs must be given and have the size that is
// passed for it.
void check_backward(const ConvSpec& spec, const ConvBackwardArgs& args);

// channels_last where the input or the weight has it, as stock PyTorch does.
at::MemoryFormat output_format(const at::Tensor& input, const at::Tensor& weight);

// The layout of a weight's gradient: the weight's own where it is known, so that it is accumulated without a
// copy.
at::MemoryFormat weight_format(const OptionalTensor& weight);

}  // namespace patchconv
