#include "tiled/conv.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "ops/activation.h"
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

// The gradients of one call.
class Gradients {
 public:
  Gradients(const ConvEngine& engine, const ConvProblem& problem, const Lift& lift,
            const ConvBackwardArgs& args)
      : engine_(engine),
        problem_(problem),
        lift_(lift),
        want_(args.output_mask),
        input_pass_(problem.transposed ? ConvPass::kSmall : ConvPass::kBig),
        grad_(lift(args.grad_output)),
        input_(given(args.input) ? lift(*args.input) : Tensor()),
        weight_(given(args.weight) ? lift.weight(*args.weight) : Tensor()),
        bits_(args.bits) {
    const auto input_sizes =
        problem.transposed ? problem.small_sizes(problem.batch) : problem.big_sizes(problem.batch);
    empty_ = grad_.numel() == 0 || c10::multiply_integers(input_sizes) == 0;
    native_ = {native(0, input_pass_), native(1, ConvPass::kWeight)};
    const bool all_native = (want_[0] || want_[1]) && (native_[0] || !want_[0]) && (native_[1] || !want_[1]);
    if (bits_.defined() && !all_native) {
      grad_ = lift(masked_grad(args));
      bits_ = Tensor();
    }
  }

  ConvGrads compute() {
    choose();
    if (together_[0] || together_[1]) stock_call();
    if (want_[0] && !together_[0])
      grads_[0] = compute_grid(engine_, problem_, input_pass_, grad_, weight_, std::nullopt, bits_);
    if (want_[1] && !together_[1]) grads_[1] = weight_gradient();
    if (want_[2] && !together_[2]) {
      std::vector<int64_t> dims{0};
      for (const auto d : irange<int64_t>(2, grad_.dim())) dims.push_back(d);
      grads_[2] = bits_.defined() ? engine_.native_bias(grad_, bits_) : at::sum(grad_, dims);
    }
    if (want_[0]) grads_[0] = lift_.undo(grads_[0]);
    if (want_[1]) {
      if (problem_.lifted) grads_[1] = grads_[1].squeeze(2);
      const auto format = problem_.lifted ? at::MemoryFormat::Contiguous : weight_format(weight_);
      grads_[1] = grads_[1].contiguous(format);
    }
    return {grads_[0], grads_[1], grads_[2]};
  }

 private:
  TensorFacts facts(size_t gradient) const {
    if (gradient == 0) return tensor_facts(problem_, grad_, weight_);
    return tensor_facts(problem_, {input_, grad_}, weight_);
  }

  bool native(size_t gradient, ConvPass pass) const {
    if (!want_[gradient] || empty_) return false;
    const TensorFacts of = facts(gradient);
    return static_cast<bool>(engine_.native_kernel(problem_, pass, of.dtype, of.format));
  }

  // The gradients that one stock call computes within the limit. That call needs all tensors.
  void choose() {
    if (empty_) return;
    if (want_[1] && !native_[1]) {
      weight_plan_ = plan_conv(engine_, problem_, ConvPass::kWeight, facts(1));
      together_[1] = !weight_plan_.tiled;
    }
    if (want_[0] && !native_[0] && input_.defined() && weight_.defined())
      together_[0] = !plan_conv(engine_, problem_, input_pass_, facts(0)).tiled;
    together_[2] = want_[2] && together_[1];
  }

  void stock_call() {
    std::vector<int64_t> output_padding(problem_.dims.size(), 0);
    if (problem_.transposed)
      output_padding.assign(problem_.output_padding.begin(), problem_.output_padding.end());
    const std::vector<int64_t> bias_size{grad_.size(1)};
    std::tie(grads_[0], grads_[1], grads_[2]) = at::convolution_backward(
        grad_, input_, weight_.defined() ? weight_ : weight_stand_in(problem_, grad_),
        together_[2] ? at::OptionalIntArrayRef(bias_size) : std::nullopt, values(problem_, &ConvDim::stride),
        values(problem_, &ConvDim::pad_before), values(problem_, &ConvDim::dilation), problem_.transposed,
        output_padding, problem_.groups, together_);
    TilePlan whole;
    whole.batch_step = problem_.batch;
    whole.pieces.assign(problem_.dims.size(), 1);
    for (const ConvPass pass : {input_pass_, ConvPass::kWeight}) {
      if (!together_[pass == ConvPass::kWeight]) continue;
      PathRecorder recorder(problem_, pass, whole);
      recorder.tile(true);
      recorder.finish();
    }
    if (together_[0]) grads_[0] = grads_[0].contiguous(facts(0).format);
  }

  Tensor weight_gradient() const {
    if (empty_) return at::zeros(problem_.weight_sizes(), grad_.options());
    const Tensor& big = problem_.transposed ? grad_ : input_;
    const Tensor& small = problem_.transposed ? input_ : grad_;
    if (native_[1]) return engine_.native_weight(problem_, big, small, bits_);
    return tile_weight(engine_, problem_, weight_plan_, big, small).to(grad_.scalar_type());
  }

  const ConvEngine& engine_;
  const ConvProblem& problem_;
  const Lift& lift_;
  const std::array<bool, 3> want_;
  const ConvPass input_pass_;
  Tensor grad_, input_, weight_, bits_;
  bool empty_ = false;
  std::array<bool, 2> native_ = {false, false};  // by this project's kernels
  std::array<bool, 3> together_ = {false, false, false};
  TilePlan weight_plan_;
  std::array<Tensor, 3> grads_;
};

}  // namespace

Tensor conv_forward(const ConvEngine& engine, const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                    const OptionalTensor& bias) {
  check_sizes(spec, input.sizes(), weight.sizes());
  check_forward_tensors(spec, input, weight, bias);
  const auto dims = static_cast<int64_t>(spec.dims.size());
  const auto spatial = input.sizes().slice(input.dim() - dims);
  TORCH_CHECK_VALUE(std::find(spatial.begin(), spatial.end(), 0) == spatial.end(), spec.op,
                    ": expected every spatial size of input to be at least 1, got input of shape ",
                    input.sizes());
  const BelowAutograd guard;
  const Lift lift{input.dim() == dims + 2, dims == 1};
  const ConvProblem whole(spec, lift.batched_sizes(input.sizes()), weight.sizes().vec());
  Tensor result;
  with_more_tiles(whole, [&](const ConvProblem& problem) {
    result = compute_grid(engine, problem, spec.transposed ? ConvPass::kBig : ConvPass::kSmall, lift(input),
                          lift.weight(weight), bias);
  });
  return lift.undo(result);
}

ConvGrads conv_backward(const ConvEngine& engine, const ConvSpec& spec, const ConvBackwardArgs& args) {
  check_backward(spec, args);
  const Tensor& grad = args.grad_output;
  TORCH_CHECK(
      !args.bits.defined() || (grad.is_non_overlapping_and_dense() && args.bits.scalar_type() == at::kByte &&
                               args.bits.is_contiguous() && args.bits.device() == grad.device() &&
                               args.bits.numel() == mask_bytes(grad.numel())),
      "_convolution_backward: expected a dense grad_output and a bit for each element");
  const BelowAutograd guard;
  const auto dims = static_cast<int64_t>(spec.dims.size());
  const Lift lift{grad.dim() == dims + 2, dims == 1};
  const ConvProblem whole(spec, lift.batched_sizes(C10_AS_INTARRAYREF_SLOW(args.input_size)),
                          C10_AS_INTARRAYREF_SLOW(args.weight_size).vec());
  ConvGrads grads;
  with_more_tiles(
      whole, [&](const ConvProblem& problem) { grads = Gradients(engine, problem, lift, args).compute(); });
  return grads;
}

FusedResult conv_fused(const ConvEngine& engine, const ConvSpec& spec, const Tensor& input,
                       const Tensor& weight, const OptionalTensor& bias, const FusedParts& parts) {
  const auto sizes = check_sizes<int64_t>(spec, input.sizes(), weight.sizes());
  check_forward_tensors(spec, input, weight, bias);
  check_fused(parts, input, c10::fromIntArrayRefSlow(sizes));
  const BelowAutograd guard;
  const Lift lift{input.dim() == 4, /*lifted=*/false};
  const Tensor x = lift(input);
  const ConvProblem problem(spec, x.sizes().vec(), weight.sizes().vec());
  const TensorFacts facts = tensor_facts(problem, x, weight);
  const bool masked = parts.mask && parts.relu;
  Tensor bits = no_bits(input);
  const bool empty = x.numel() == 0 || c10::multiply_integers(sizes) == 0;
  if (!empty && engine.native_kernel(problem, ConvPass::kSmall, facts.dtype, facts.format)) {
    const Tensor y = allocate(problem.small_sizes(problem.batch), x, facts.format);
    Epilogue epilogue{bias, parts.scale, std::nullopt, parts.relu};
    if (given(parts.residual)) epilogue.residual = lift(*parts.residual);
    const bool writes_bits = masked && engine.native_bits(problem, ConvPass::kSmall, y);
    if (writes_bits) {
      epilogue.bits = bits = at::empty({mask_bytes(y.numel())}, x.options().dtype(at::kByte));
    }
    engine.native_grid(problem, ConvPass::kSmall, x, Tensor(), weight, epilogue, y);
    if (masked && !writes_bits) bits = mask_pack(y, Mask::kRelu, 0, 0);
    return {lift.undo(y), bits};
  }
  Tensor y = conv_forward(engine, spec, input, weight, given(parts.scale) ? std::nullopt : bias);
  if (given(parts.scale)) {
    // As for gradients: half precision is computed in float32 and rounded once.
    const auto by_channel = [](const Tensor& vector) { return vector.view({-1, 1, 1}); };
    const bool reduced = at::isReducedFloatingType(y.scalar_type());
    const Tensor z = reduced ? y.to(at::kFloat) : y;
    z.mul_(by_channel(*parts.scale));
    if (given(bias)) z.add_(by_channel(*bias));
    if (reduced) y.copy_(z);
  }
  if (given(parts.residual)) y.add_(*parts.residual);
  if (masked) bits = mask_forward_(y, Mask::kRelu, 0, 0);
  if (parts.relu && !masked) y.relu_();
  return {y, bits};
}

}  // namespace patchconv
