// The activations with packed masks on CUDA: checks, memory and the launch. Stock operators are used unless
// the backend asks for this project's kernels and they serve the dtype.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/kernel_call.h"
#include "cuda/kernels/activation.h"
#include "ops/activation.h"

namespace patchconv {

using at::Tensor;

namespace {

// Fills y, if there is one, and returns the bits.
Tensor launch_forward(const Tensor& input, const Tensor& y, int64_t mask, double a, double b,
                      const Tensor& other = Tensor()) {
  TORCH_CHECK(input.is_non_overlapping_and_dense(),
              "patchconv::_mask_forward: expected input to be dense, got strides ", input.strides());
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t count = input.numel();
  const Tensor bits = at::empty({mask_bytes(count)}, input.options().dtype(at::kByte));
  kernels::MaskForward call;
  call.x = input.const_data_ptr();
  call.other = other.defined() ? other.const_data_ptr() : nullptr;
  call.y = y.defined() ? y.mutable_data_ptr() : nullptr;
  call.bits = bits.mutable_data_ptr<uint8_t>();
  call.count = count;
  call.a = static_cast<float>(a);
  call.b = static_cast<float>(b);
  kernels::launch_mask_forward(kernel_type(input), static_cast<Mask>(mask), call, current_stream(input));
  return bits;
}

std::tuple<Tensor, Tensor> mask_forward_cuda(const Tensor& input, int64_t mask, double a, double b) {
  if (!native_kernel_for(input) || !has_mask_kernel(mask)) return mask_forward_with_aten(input, mask, a, b);
  Tensor y = at::empty_like(input);
  const Tensor bits = launch_forward(input, y, mask, a, b);
  return {std::move(y), bits};
}

Tensor mask_forward_in_place_cuda(Tensor& input, int64_t mask, double a, double b) {
  if (!native_kernel_for(input) || !has_mask_kernel(mask))
    return mask_forward_in_place_with_aten(input, mask, a, b);
  return launch_forward(input, input, mask, a, b);
}

Tensor mask_pack_cuda(const Tensor& input, int64_t mask, double a, double b) {
  if (!native_kernel_for(input) || !has_mask_kernel(mask)) return mask_pack_with_aten(input, mask, a, b);
  return launch_forward(input, Tensor(), mask, a, b);
}

std::tuple<Tensor, Tensor> add_mask_forward_cuda(const Tensor& input, const Tensor& other) {
  if (!native_kernel_for(input) || !input.is_non_overlapping_and_dense() || input.sizes() != other.sizes() ||
      input.strides() != other.strides() || input.scalar_type() != other.scalar_type() ||
      input.device() != other.device()) {
    return add_mask_forward_with_aten(input, other);
  }
  Tensor y = at::empty_like(input);
  const Tensor bits = launch_forward(input, y, static_cast<int64_t>(Mask::kRelu), 0, 0, other);
  return {std::move(y), bits};
}

Tensor mask_backward_cuda(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  if (!native_kernel_for(grad)) return mask_backward_with_aten(grad, bits, inside, outside);
  TORCH_CHECK(grad.is_non_overlapping_and_dense(),
              "patchconv::_mask_backward: expected grad to be dense, got strides ", grad.strides());
  TORCH_CHECK(bits.scalar_type() == at::kByte && bits.is_contiguous() && bits.device() == grad.device() &&
                  bits.numel() == mask_bytes(grad.numel()),
              "patchconv::_mask_backward: expected bits to hold ", mask_bytes(grad.numel()),
              " bytes on grad's device, got ", bits.sizes(), " of ", bits.scalar_type(), " on ",
              bits.device());
  const c10::cuda::CUDAGuard guard(grad.device());
  const Tensor out = at::empty_like(grad);
  const kernels::MaskBackward call{grad.const_data_ptr(),      bits.const_data_ptr<uint8_t>(),
                                   out.mutable_data_ptr(),     grad.numel(),
                                   static_cast<float>(inside), static_cast<float>(outside)};
  kernels::launch_mask_backward(kernel_type(grad), call, current_stream(grad));
  return out;
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_mask_forward", &mask_forward_cuda);
  m.impl("_mask_forward_", &mask_forward_in_place_cuda);
  m.impl("_mask_pack", &mask_pack_cuda);
  m.impl("_add_mask_forward", &add_mask_forward_cuda);
  m.impl("_mask_backward", &mask_backward_cuda);
}

}  // namespace

}  // namespace patchconv
