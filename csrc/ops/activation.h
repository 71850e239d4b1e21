// The activations: which tensors this library's nodes serve, and the operators that make and use masks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <tuple>

#include "core/mask.h"

namespace patchconv {

// Dense tensors of the four real floating-point types, of known sizes. All others go to stock PyTorch: a
// compiler that traces with symbolic sizes does its own recomputation.
inline bool served(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

// The same sizes and values in a given dense layout: the tensor itself if it already has that layout.
at::Tensor in_layout(const at::Tensor& tensor, c10::SymIntArrayRef strides);

// The same by stock operators, for devices and dtypes without a kernel here.
std::tuple<at::Tensor, at::Tensor> mask_forward_with_aten(const at::Tensor& input, int64_t mask, double a,
                                                          double b);
at::Tensor mask_forward_in_place_with_aten(at::Tensor& input, int64_t mask, double a, double b);
at::Tensor mask_pack_with_aten(const at::Tensor& input, int64_t mask, double a, double b);
at::Tensor mask_backward_with_aten(const at::Tensor& grad, const at::Tensor& bits, double inside,
                                   double outside);

// patchconv::_add_mask_forward: relu(input + other), of dense tensors of one shape, and its bits.
std::tuple<at::Tensor, at::Tensor> add_mask_forward_with_aten(const at::Tensor& input,
                                                              const at::Tensor& other);

// patchconv::_mask_*, through the dispatcher. Inputs and gradients are dense; masks follow their memory
// order.
std::tuple<at::Tensor, at::Tensor> mask_forward(const at::Tensor& input, Mask mask, double a, double b);
at::Tensor mask_forward_(at::Tensor& input, Mask mask, double a, double b);  // in place; returns the bits
at::Tensor mask_pack(const at::Tensor& input, Mask mask, double a, double b);
// bit ? grad * inside : grad * outside; a factor of 0 is a zero, whatever the gradient.
at::Tensor mask_backward(const at::Tensor& grad, const at::Tensor& bits, double inside, double outside);

}  // namespace patchconv
