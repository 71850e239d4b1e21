// conv2d_fused on a device: one launch where this project's kernels run, else the convolution in tiles and
// then its other parts in place. Besides the result only the bits are allocated.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "ops/activation.h"
#include "ops/conv_fused.h"
#include "tiled/passes.h"

namespace patchconv {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Tensor;

namespace {

const ConvEngine& engine_of(const Tensor& tensor) {
  return *find_engine(tensor.is_cuda() ? "cuda" : "cpu");  // registered with the operators
}

std::tuple<Tensor, Tensor> conv2d_fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                        int64_t groups, const OptionalTensor& scale,
                                        const OptionalTensor& residual, bool relu,
                                        std::string_view padding_mode, OptionalIntArrayRef splits,
                                        bool mask) {
  const c10::DeviceGuard guard(input.device());
  const BelowAutograd below;
  const ConvEngine& engine = engine_of(input);
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  const ConvParams params = check_params(spec, "conv2d_fused");
  const auto sizes = check_sizes<int64_t>(params, input.sizes(), weight.sizes());
  check_forward_tensors(params, input, weight, bias);
  check_fused({scale, residual, relu}, input, c10::fromIntArrayRefSlow(sizes));

  const Lift lift{input.dim() == 4, /*lifted=*/false};
  const Tensor x = lift(input);
  const ConvProblem problem = make_problem(params, x.sizes(), weight.sizes());
  const TensorFacts facts = tensor_facts(problem, x, weight);
  Tensor y, bits;
  const bool empty = x.numel() == 0 || c10::multiply_integers(sizes) == 0;
  if (!empty && engine.native_kernel(problem, ConvPass::kSmall, facts.dtype, facts.format)) {
    const Tensor whole =
        at::empty(problem.small_sizes(problem.batch), x.options().memory_format(facts.format));
    Epilogue epilogue{bias, scale, std::nullopt, relu};
    if (given(residual)) epilogue.residual = lift(*residual);
    if (mask && relu && engine.native_bits(problem, ConvPass::kSmall, whole)) {
      epilogue.bits = bits = at::empty({mask_bytes(whole.numel())}, x.options().dtype(at::kByte));
    }
    engine.native_grid(problem, ConvPass::kSmall, x, Tensor(), weight, epilogue, whole);
    y = lift.undo(whole);
    if (mask && relu && !bits.defined()) bits = mask_pack(y, Mask::kRelu, 0, 0);
  } else {
    y = conv_forward(engine, spec, input, weight, given(scale) ? std::nullopt : bias);
    if (given(scale)) {
      // As for gradients: half precision is computed in float32 and rounded once.
      const auto by_channel = [](const Tensor& vector) { return vector.view({-1, 1, 1}); };
      const bool reduced = at::isReducedFloatingType(y.scalar_type());
      Tensor z = reduced ? y.to(at::kFloat) : y;
      z.mul_(by_channel(*scale));
      if (given(bias)) z.add_(by_channel(*bias));
      if (reduced) y.copy_(z);
    }
    if (given(residual)) y.add_(*residual);
    if (relu && mask) {
      bits = mask_forward_(y, Mask::kRelu, 0, 0);
    } else if (relu) {
      y.relu_();
    }
  }
  if (!bits.defined()) bits = at::empty({0}, x.options().dtype(at::kByte));
  return {y, bits};
}

ConvGrads conv2d_masked_backward(const Tensor& grad_output, const Tensor& bits, const OptionalTensor& input,
                                 const OptionalTensor& weight, c10::SymIntArrayRef input_size,
                                 c10::SymIntArrayRef weight_size, IntArrayRef stride, IntArrayRef padding,
                                 IntArrayRef dilation, int64_t groups, std::string_view padding_mode,
                                 OptionalIntArrayRef splits, std::array<bool, 3> output_mask) {
  const c10::DeviceGuard guard(grad_output.device());
  TORCH_CHECK(grad_output.is_non_overlapping_and_dense() && bits.scalar_type() == at::kByte &&
                  bits.is_contiguous() && bits.device() == grad_output.device() &&
                  bits.numel() == mask_bytes(grad_output.numel()),
              "patchconv::_conv2d_masked_backward: expected a dense grad_output and a bit for each element");
  const BelowAutograd below;
  const ConvEngine& engine = engine_of(grad_output);
  const ConvSpec spec = conv_spec(2, stride, padding, dilation, groups, padding_mode, splits);
  return conv_backward(engine, spec, grad_output, input, weight, input_size, weight_size, output_mask, bits);
}

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_conv2d_fused", &conv2d_fused);
  m.impl("_conv2d_masked_backward", &conv2d_masked_backward);
}

TORCH_LIBRARY_IMPL(patchconv, CUDA, m) {
  m.impl("_conv2d_fused", &conv2d_fused);
  m.impl("_conv2d_masked_backward", &conv2d_masked_backward);
}

}  // namespace

}  // namespace patchconv
