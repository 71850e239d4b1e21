#include "tiled/conv.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "ops/activation.h"
#include "ops/optional.h"
#include "tiled/passes.h"
#include "tiled/retry.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

Tensor allocate(at::IntArrayRef sizes, const Tensor& like, at::MemoryFormat format) {
  return at::empty(sizes, like.options().memory_format(format));
}

// One pass that writes a grid, by its plan, into a new tensor. `bits` belong to the source; only this
// project's kernels take them.
Tensor compute_grid(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass, const Tensor& source,
                    const Tensor& weight, const OptionalTensor& bias, const Tensor& bits = Tensor()) {
  const bool to_big = pass == ConvPass::kBig;
  const auto sizes = to_big ? problem.big_sizes(problem.batch) : problem.small_sizes(problem.batch);
  const TensorFacts facts = tensor_facts(problem, source, weight);
  if (source.numel() == 0 || std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    Tensor result = allocate(sizes, source, facts.format).zero_();
    if (given(bias)) result.add_(bias_shaped(*bias, result.dim()));
    return result;
  }
  if (engine.native_kernel(problem, pass, facts.dtype, facts.format)) {
    const Tensor result = allocate(sizes, source, facts.format);
    engine.native_grid(problem, pass, source, bits, weight, {bias}, result);
    return result;
  }
  TORCH_INTERNAL_ASSERT(!bits.defined());
  const Route route = find_route(engine, problem, pass, facts);
  if (route.plan.tiled) {
    const Tensor result = allocate(sizes, source, facts.format);
    (route.pass == ConvPass::kBig ? tile_big : tile_small)(
        engine, route.problem, route.plan, source, route.flipped ? flipped_weight(problem, weight) : weight,
        bias, result);
    return result;
  }
  std::vector<int64_t> output_padding(problem.dims.size(), 0);
  if (to_big) {
    for (const auto d : irange(problem.dims.size())) {
      const ConvDim& dim = problem.dims[d];
      output_padding[d] = dim.big - dim.big_range({0, dim.small}).size() + dim.pad_before + dim.pad_after;
    }
  }
  PathRecorder recorder(problem, pass, route.plan);
  recorder.tile(true);
  Tensor result = at::convolution(source, weight, bias, values(problem, &ConvDim::stride),
                                  values(problem, &ConvDim::pad_before), values(problem, &ConvDim::dilation),
                                  to_big, output_padding, problem.groups);
  recorder.finish();
  return result.contiguous(facts.format);
}

// The gradient, with zeros where the bit is 0.
Tensor without(const Tensor& grad, const Tensor& bits) { return mask_backward(grad, bits, 1, 0); }

}  // namespace

Tensor Lift::operator()(const Tensor& tensor) const {
  Tensor view = batched ? tensor : tensor.unsqueeze(0);
  return lifted ? view.unsqueeze(2) : view;
}

Tensor Lift::weight(const Tensor& tensor) const { return lifted ? tensor.unsqueeze(2) : tensor; }

Tensor Lift::undo(const Tensor& tensor) const {
  Tensor view = lifted ? tensor.squeeze(2) : tensor;
  return batched ? view : view.squeeze(0);
}

TensorFacts tensor_facts(const ConvProblem& problem, at::ArrayRef<Tensor> sources,
                         const OptionalTensor& weight) {
  TensorFacts facts{sources[0].scalar_type(), at::MemoryFormat::Contiguous};
  if (!problem.lifted) facts.format = output_format(sources[0], weight.has_value() ? *weight : Tensor());
  for (const Tensor& source : sources) {
    // Stock makes a dense copy of a tensor that is not dense in the layout it computes in.
    if (!source.is_contiguous(facts.format)) facts.copied_bytes += static_cast<int64_t>(source.nbytes());
  }
  return facts;
}

Tensor conv_forward(const ConvEngine& engine, const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                    const OptionalTensor& bias) {
  const ConvParams params = check_params(spec, spec.name());
  check_sizes(params, input.sizes(), weight.sizes());
  check_forward_tensors(params, input, weight, bias);
  const auto spatial = input.sizes().slice(input.dim() - spec.dims);
  TORCH_CHECK_VALUE(std::find(spatial.begin(), spatial.end(), 0) == spatial.end(), params.op,
                    ": expected every spatial size of input to be at least 1, got input of shape ",
                    input.sizes());
  const BelowAutograd guard;
  const Lift lift{input.dim() == spec.dims + 2, spec.dims == 1};
  const Tensor batched = lift.batched ? input : input.unsqueeze(0);
  Tensor result;
  with_more_tiles(make_problem(params, batched.sizes(), weight.sizes()), [&](const ConvProblem& problem) {
    result = compute_grid(engine, problem, spec.transposed ? ConvPass::kBig : ConvPass::kSmall, lift(input),
                          lift.weight(weight), bias);
  });
  return lift.undo(result);
}

namespace {

ConvGrads gradients(const ConvEngine& engine, const ConvSpec& spec, const ConvParams& params,
                    const ConvProblem& problem, const Lift& lift, const Tensor& grad_output,
                    const OptionalTensor& input, const OptionalTensor& weight,
                    std::array<bool, 3> output_mask, const Tensor& bits) {
  const Tensor grad = lift(grad_output);
  const Tensor in = given(input) ? lift(*input) : Tensor();
  const Tensor w = given(weight) ? lift.weight(*weight) : Tensor();
  const ConvPass input_pass = spec.transposed ? ConvPass::kSmall : ConvPass::kBig;
  const Tensor& big = spec.transposed ? grad : in;
  const Tensor& small = spec.transposed ? in : grad;
  const auto input_sizes =
      spec.transposed ? problem.small_sizes(problem.batch) : problem.big_sizes(problem.batch);
  const bool empty = grad.numel() == 0 || c10::multiply_integers(input_sizes) == 0;

  const auto native = [&](bool wanted, ConvPass pass, const TensorFacts& facts) {
    return wanted && !empty && engine.native_kernel(problem, pass, facts.dtype, facts.format);
  };
  const bool native_weight =
      native(output_mask[1], ConvPass::kWeight, tensor_facts(problem, {in.defined() ? in : grad, grad}, w));
  const bool native_input = native(output_mask[0], input_pass, tensor_facts(problem, grad, w));
  if (bits.defined() && (!(native_input || native_weight) || (output_mask[0] && !native_input) ||
                         (output_mask[1] && !native_weight))) {
    return gradients(engine, spec, params, problem, lift, without(grad_output, bits), input, weight,
                     output_mask, Tensor());
  }

  // The gradients that one stock call computes within the limit. That call needs all tensors.
  std::array<bool, 3> together = {false, false, false};
  TilePlan weight_plan;
  if (output_mask[1] && !empty && !native_weight) {
    weight_plan = plan_conv(engine, problem, ConvPass::kWeight, tensor_facts(problem, {in, grad}, w));
  }
  if (in.defined() && !empty) {
    together[1] = output_mask[1] && !native_weight && !weight_plan.tiled;
    together[0] = output_mask[0] && !native_input && w.defined() &&
                  !plan_conv(engine, problem, input_pass, tensor_facts(problem, grad, w)).tiled;
    together[2] = output_mask[2] && together[1];
  }
  Tensor grad_input, grad_weight, grad_bias;
  if (together[0] || together[1]) {
    std::vector<int64_t> output_padding(problem.dims.size(), 0);
    if (spec.transposed) {
      for (const auto d : irange(spec.dims))
        output_padding[d + (problem.lifted ? 1 : 0)] = params.output_padding[d];
    }
    const std::vector<int64_t> bias_size{grad.size(1)};
    std::tie(grad_input, grad_weight, grad_bias) = at::convolution_backward(
        grad, in, w.defined() ? w : weight_stand_in(problem, grad),
        together[2] ? at::OptionalIntArrayRef(bias_size) : std::nullopt, values(problem, &ConvDim::stride),
        values(problem, &ConvDim::pad_before), values(problem, &ConvDim::dilation), spec.transposed,
        output_padding, problem.groups, together);
    TilePlan whole;
    whole.batch_step = problem.batch;
    whole.pieces.assign(problem.dims.size(), 1);
    for (const ConvPass pass : {input_pass, ConvPass::kWeight}) {
      if (!together[pass == ConvPass::kWeight]) continue;
      PathRecorder recorder(problem, pass, whole);
      recorder.tile(true);
      recorder.finish();
    }
    if (together[0]) grad_input = lift.undo(grad_input.contiguous(tensor_facts(problem, grad, w).format));
    if (together[1] && problem.lifted) grad_weight = grad_weight.squeeze(2);
  }
  if (output_mask[0] && !together[0]) {
    grad_input = lift.undo(compute_grid(engine, problem, input_pass, grad, w, std::nullopt, bits));
  }
  if (output_mask[1] && !together[1]) {
    if (empty) {
      grad_weight = at::zeros(problem.weight_sizes(), grad.options());
    } else if (native_weight) {
      grad_weight = engine.native_weight(problem, big, small, bits);
    } else {
      grad_weight = tile_weight(engine, problem, weight_plan, big, small).to(grad.scalar_type());
    }
    if (problem.lifted) grad_weight = grad_weight.squeeze(2);
  }
  if (output_mask[2] && !together[2]) {
    std::vector<int64_t> dims{0};
    for (const auto d : irange<int64_t>(2, grad.dim())) dims.push_back(d);
    grad_bias = bits.defined() ? engine.native_bias(grad, bits) : at::sum(grad, dims);
  }
  if (output_mask[1]) grad_weight = grad_weight.contiguous(weight_format(weight));
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

ConvGrads conv_backward(const ConvEngine& engine, const ConvSpec& spec, const Tensor& grad_output,
                        const OptionalTensor& input, const OptionalTensor& weight,
                        c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                        std::array<bool, 3> output_mask, const Tensor& bits) {
  ConvParams params = check_params(spec, spec.backward_name());
  check_backward_tensors(params, grad_output, input, weight, input_size, weight_size, output_mask);
  params.op = spec.name();
  const BelowAutograd guard;
  const Lift lift{grad_output.dim() == spec.dims + 2, spec.dims == 1};
  auto batched_size = C10_AS_INTARRAYREF_SLOW(input_size).vec();
  if (!lift.batched) batched_size.insert(batched_size.begin(), 1);
  const auto weight_sizes = C10_AS_INTARRAYREF_SLOW(weight_size).vec();
  ConvGrads grads;
  with_more_tiles(make_problem(params, batched_size, weight_sizes), [&](const ConvProblem& problem) {
    grads = gradients(engine, spec, params, problem, lift, grad_output, input, weight, output_mask, bits);
  });
  return grads;
}

}  // namespace patchconv
