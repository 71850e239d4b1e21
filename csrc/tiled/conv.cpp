#include "tiled/conv.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <functional>

namespace patchconv {

using at::Tensor;
using c10::irange;
using OptionalTensor = std::optional<Tensor>;

namespace {

// Stock operators called from a kernel must neither record gradients nor be cast by an enclosing autocast.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast{c10::autocast_dispatch_keyset};
};

std::vector<int64_t> values(const ConvProblem& problem, int64_t ConvDim::* member) {
  std::vector<int64_t> list;
  for (const ConvDim& d : problem.dims) list.push_back(d.*member);
  return list;
}

std::vector<int64_t> no_output_padding(const ConvProblem& problem) {
  return std::vector<int64_t>(problem.dims.size(), 0);
}

const char* pass_name(const ConvProblem& problem, ConvPass pass) {
  if (pass == ConvPass::kWeight) return "wgrad";
  return (pass == ConvPass::kBig) == problem.transposed ? "fprop" : "dgrad";
}

// Keeps count of what a pass did; written down when the pass is over.
class PathRecorder {
 public:
  PathRecorder(const ConvProblem& problem, ConvPass pass, const TilePlan& plan) {
    record_.op = problem.op;
    record_.pass = pass_name(problem, pass);
    record_.tiled = plan.tiled;
    record_.batch_step = plan.batch_step;
    const size_t first = problem.lifted ? 1 : 0;
    record_.dims = static_cast<int>(plan.pieces.size() - first);
    std::copy(plan.pieces.begin() + first, plan.pieces.end(), record_.pieces.begin());
  }
  void tile(bool view) {
    ++record_.tiles;
    record_.views += view;
  }
  void finish() { record_path(record_); }

 private:
  PathRecord record_;
};

// Calls visit(region) for every tile of the cut grid, image by image or several at once.
void for_each_tile(const ConvProblem& problem, ConvPass pass, const TilePlan& plan,
                   const std::function<void(const Region&)>& visit) {
  const CutGrid grid = pass == ConvPass::kBig ? CutGrid::kBig : CutGrid::kSmall;
  const bool cut_padding = problem.mode != PaddingMode::kZeros;
  const size_t count = problem.dims.size();
  for (int64_t n = 0; n < problem.batch; n += plan.batch_step) {
    Region region;
    region.batch = {n, std::min(n + plan.batch_step, problem.batch)};
    region.ranges.resize(count);
    for (int64_t index = 0; index < plan.tiles_per_image(); ++index) {
      int64_t rest = index;
      for (size_t d = count; d-- > 0;) {
        const Range extent = cut_extent(problem.dims[d], grid, cut_padding);
        const Range piece = piece_of(extent.size(), plan.pieces[d], rest % plan.pieces[d]);
        rest /= plan.pieces[d];
        region.ranges[d] = {extent.begin + piece.begin, extent.begin + piece.end};
      }
      visit(region);
    }
  }
}

// The part of the big grid that a tile of the small one reads: as a view of the tensor with zero padding left
// to the stock operator where that is possible without a copy, else as a copy that holds its padding.
struct BigTile {
  Tensor tensor;
  std::vector<int64_t> padding;
  bool view = false;
};

BigTile load_big(const ConvEngine& engine, const ConvProblem& problem, const Tensor& big,
                 const Region& small_region, const TileStyle& style) {
  BigTile tile;
  tile.padding.assign(problem.dims.size(), 0);
  Region region{small_region.batch, {}};
  for (const auto d : irange(problem.dims.size())) {
    const ConvDim& dim = problem.dims[d];
    Range range = dim.big_range(small_region.ranges[d]);
    const Range inside = intersect(range, {0, dim.big});
    const int64_t before = inside.begin - range.begin;
    if (problem.mode == PaddingMode::kZeros && !inside.empty() && before == range.end - inside.end &&
        before <= style.max_padding) {
      tile.padding[d] = before;
      range = inside;
    }
    region.ranges.push_back(range);
  }
  const bool within = std::all_of(region.ranges.begin(), region.ranges.end(), [&](const Range& r) {
    return r.begin >= 0 && r.end <= problem.dims[&r - region.ranges.data()].big;
  });
  if (within && big.scalar_type() == style.dtype) {
    Tensor view = big.narrow(0, region.batch.begin, region.batch.size());
    for (const auto d : irange(region.ranges.size())) {
      view = view.narrow(2 + d, region.ranges[d].begin, region.ranges[d].size());
    }
    if (view.is_contiguous(style.format)) {
      tile.tensor = std::move(view);
      tile.view = true;
      return tile;
    }
  }
  tile.tensor = engine.load(big, region, problem.mode, style);
  return tile;
}

// A tile of the small grid: always inside it.
Tensor load_small(const ConvEngine& engine, const Tensor& small, const Region& region,
                  const TileStyle& style) {
  if (small.scalar_type() == style.dtype) {
    Tensor view = small.narrow(0, region.batch.begin, region.batch.size());
    for (const auto d : irange(region.ranges.size())) {
      view = view.narrow(2 + d, region.ranges[d].begin, region.ranges[d].size());
    }
    if (view.is_contiguous(style.format)) return view;
  }
  return engine.load(small, region, PaddingMode::kZeros, style);
}

OptionalTensor cast(const OptionalTensor& tensor, at::ScalarType dtype) {
  return tensor.has_value() && tensor->defined() ? OptionalTensor(tensor->to(dtype)) : std::nullopt;
}

Tensor bias_shaped(const Tensor& bias, int64_t dimensions) {
  std::vector<int64_t> shape(dimensions, 1);
  shape[1] = -1;
  return bias.view(shape);
}

Tensor allocate(at::IntArrayRef sizes, const Tensor& like, at::MemoryFormat format) {
  return at::empty(sizes, like.options().memory_format(format));
}

void tile_small(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan, const Tensor& big,
                const Tensor& weight, const OptionalTensor& bias, const Tensor& small) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kSmall, big.scalar_type());
  const Tensor tile_weight = weight.to(style.dtype);
  const OptionalTensor tile_bias = cast(bias, style.dtype);
  const auto stride = values(problem, &ConvDim::stride);
  const auto dilation = values(problem, &ConvDim::dilation);
  const auto output_padding = no_output_padding(problem);
  PathRecorder recorder(problem, ConvPass::kSmall, plan);
  for_each_tile(problem, ConvPass::kSmall, plan, [&](const Region& region) {
    const BigTile tile = load_big(engine, problem, big, region, style);
    recorder.tile(tile.view);
    Tensor target = small.narrow(0, region.batch.begin, region.batch.size());
    for (const auto d : irange(region.ranges.size())) {
      target = target.narrow(2 + d, region.ranges[d].begin, region.ranges[d].size());
    }
    if (engine.convolve_into(tile.tensor, tile_weight, tile_bias, problem, tile.padding, target)) return;
    engine.store(at::convolution(tile.tensor, tile_weight, tile_bias, stride, tile.padding, dilation,
                                 /*transposed=*/false, output_padding, problem.groups),
                 region, small);
  });
  recorder.finish();
}

void tile_big(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan, const Tensor& small,
              const Tensor& weight, const OptionalTensor& bias, const Tensor& big) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kBig, small.scalar_type());
  const Tensor tile_weight = weight.to(style.dtype);
  const OptionalTensor tile_bias = cast(bias, style.dtype);
  const auto stride = values(problem, &ConvDim::stride);
  const auto dilation = values(problem, &ConvDim::dilation);
  const auto output_padding = no_output_padding(problem);
  const bool folding = problem.mode != PaddingMode::kZeros;
  if (folding) big.zero_();
  PathRecorder recorder(problem, ConvPass::kBig, plan);
  for_each_tile(problem, ConvPass::kBig, plan, [&](const Region& region) {
    const size_t count = problem.dims.size();
    Region source{region.batch, {}};
    Region computed = region;  // what of the region the kernels reach
    std::vector<int64_t> crop(count);
    std::vector<int64_t> skip(count);
    for (const auto d : irange(count)) {
      const ConvDim& dim = problem.dims[d];
      source.ranges.push_back(dim.small_range(region.ranges[d]));
      const Range reached = dim.big_range(source.ranges[d]);
      computed.ranges[d] = intersect(region.ranges[d], reached);
      // Stock's padding crops both ends alike; what remains at the front is skipped when storing.
      crop[d] = std::max<int64_t>(0, std::min(computed.ranges[d].begin - reached.begin, reached.end - computed.ranges[d].end));
      skip[d] = computed.ranges[d].begin - reached.begin - crop[d];
    }
    const bool nothing =
        std::any_of(computed.ranges.begin(), computed.ranges.end(), [](const Range& r) { return r.empty(); });
    if (!folding && (nothing || computed.sizes(1) != region.sizes(1))) {
      // Coordinates between or behind the kernels' reach.
      Tensor rest = big.narrow(0, region.batch.begin, region.batch.size());
      for (const auto d : irange(count)) {
        rest = rest.narrow(2 + d, region.ranges[d].begin, region.ranges[d].size());
      }
      if (tile_bias.has_value()) {
        rest.copy_(bias_shaped(*tile_bias, rest.dim()).expand_as(rest));
      } else {
        rest.zero_();
      }
    }
    recorder.tile(false);
    if (nothing) return;
    Tensor tile = at::convolution(load_small(engine, small, source, style), tile_weight, tile_bias, stride,
                                  crop, dilation, /*transposed=*/true, output_padding, problem.groups);
    for (const auto d : irange(count)) tile = tile.narrow(2 + d, skip[d], computed.ranges[d].size());
    if (folding) {
      engine.fold(tile, computed, problem.mode, big);
    } else {
      engine.store(tile, computed, big);
    }
  });
  recorder.finish();
}

// Stock computes a weight gradient only in company of a weight. Its values are not read, so one element
// stands for all of them on devices that leave it alone, and the copy that others make is as small as the
// result.
Tensor weight_gradient(const ConvProblem& problem, const Tensor& big, const Tensor& small,
                       at::IntArrayRef padding) {
  const Tensor stand_in = at::empty({1}, big.options()).expand(problem.weight_sizes());
  return std::get<1>(at::convolution_backward(
      small, big, stand_in, at::OptionalIntArrayRef(), values(problem, &ConvDim::stride), padding,
      values(problem, &ConvDim::dilation), /*transposed=*/false, no_output_padding(problem), problem.groups,
      {false, true, false}));
}

Tensor tile_weight(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan,
                   const Tensor& big, const Tensor& small) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kWeight, big.scalar_type());
  Tensor sum;
  PathRecorder recorder(problem, ConvPass::kWeight, plan);
  for_each_tile(problem, ConvPass::kWeight, plan, [&](const Region& region) {
    const BigTile tile = load_big(engine, problem, big, region, style);
    recorder.tile(tile.view);
    Tensor part =
        weight_gradient(problem, tile.tensor, load_small(engine, small, region, style), tile.padding);
    if (sum.defined()) {
      sum.add_(part);
    } else {
      sum = std::move(part);
    }
  });
  recorder.finish();
  return sum;
}

// Batched 2-D or 3-D views of an operator's tensors, and the way back.
struct Lift {
  bool batched;
  bool lifted;

  Tensor operator()(const Tensor& tensor) const {
    Tensor view = batched ? tensor : tensor.unsqueeze(0);
    return lifted ? view.unsqueeze(2) : view;
  }
  Tensor weight(const Tensor& tensor) const { return lifted ? tensor.unsqueeze(2) : tensor; }
  Tensor undo(const Tensor& tensor) const {
    Tensor view = lifted ? tensor.squeeze(2) : tensor;
    return batched ? view : view.squeeze(0);
  }
};

at::MemoryFormat result_format(const ConvProblem& problem, const Tensor& tensor,
                               const OptionalTensor& weight) {
  return problem.lifted ? at::MemoryFormat::Contiguous
                        : output_format(tensor, weight.has_value() ? *weight : Tensor());
}

// Stock makes a dense copy of a tensor that is not dense in the layout it computes in.
int64_t copied_bytes(const Tensor& tensor, at::MemoryFormat format) {
  return tensor.is_contiguous(format) ? 0 : static_cast<int64_t>(tensor.numel() * tensor.element_size());
}

// One pass that writes a grid, along its plan, into a new tensor.
Tensor compute_grid(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass, const Tensor& source,
                    const Tensor& weight, const OptionalTensor& bias) {
  const bool to_big = pass == ConvPass::kBig;
  const auto sizes = to_big ? problem.big_sizes(problem.batch) : problem.small_sizes(problem.batch);
  const auto format = result_format(problem, source, weight);
  if (source.numel() == 0 || std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    Tensor result = allocate(sizes, source, format).zero_();
    if (bias.has_value() && bias->defined()) result.add_(bias_shaped(*bias, result.dim()));
    return result;
  }
  const TilePlan plan =
      plan_conv(engine, problem, pass, source.scalar_type(), format, copied_bytes(source, format));
  if (plan.tiled) {
    const Tensor result = allocate(sizes, source, format);
    (to_big ? tile_big : tile_small)(engine, problem, plan, source, weight, bias, result);
    return result;
  }
  auto output_padding = no_output_padding(problem);
  if (to_big) {
    for (const auto d : irange(problem.dims.size())) {
      const ConvDim& dim = problem.dims[d];
      output_padding[d] = dim.big - dim.big_range({0, dim.small}).size() + dim.pad_before + dim.pad_after;
    }
  }
  PathRecorder recorder(problem, pass, plan);
  recorder.tile(true);
  Tensor result = at::convolution(source, weight, bias, values(problem, &ConvDim::stride),
                                  values(problem, &ConvDim::pad_before), values(problem, &ConvDim::dilation),
                                  to_big, output_padding, problem.groups);
  recorder.finish();
  return result.contiguous(format);
}

}  // namespace

Tensor conv_forward(const ConvEngine& engine, const ConvSpec& spec, const Tensor& input, const Tensor& weight,
                    const OptionalTensor& bias) {
  const ConvParams params = check_params(spec, spec.name());
  check_sizes(params, input.sizes(), weight.sizes());
  check_forward_tensors(params, input, weight, bias);
  const BelowAutograd guard;
  const Lift lift{input.dim() == spec.dims + 2, spec.dims == 1};
  const Tensor batched = lift.batched ? input : input.unsqueeze(0);
  const ConvProblem problem = make_problem(params, batched.sizes(), weight.sizes());
  return lift.undo(compute_grid(engine, problem, spec.transposed ? ConvPass::kBig : ConvPass::kSmall,
                                lift(input), lift.weight(weight), bias));
}

ConvGrads conv_backward(const ConvEngine& engine, const ConvSpec& spec, const Tensor& grad_output,
                        const OptionalTensor& input, const OptionalTensor& weight,
                        c10::SymIntArrayRef input_size, c10::SymIntArrayRef weight_size,
                        std::array<bool, 3> output_mask) {
  ConvParams params = check_params(spec, spec.backward_name());
  check_backward_tensors(params, grad_output, input, weight, input_size, weight_size, output_mask);
  params.op = spec.name();
  const BelowAutograd guard;
  const Lift lift{grad_output.dim() == spec.dims + 2, spec.dims == 1};
  auto batched_size = C10_AS_INTARRAYREF_SLOW(input_size).vec();
  if (!lift.batched) batched_size.insert(batched_size.begin(), 1);
  const auto weight_sizes = C10_AS_INTARRAYREF_SLOW(weight_size).vec();
  const ConvProblem problem = make_problem(params, batched_size, weight_sizes);

  const Tensor grad = lift(grad_output);
  const Tensor in = input.has_value() && input->defined() ? lift(*input) : Tensor();
  const Tensor w = weight.has_value() && weight->defined() ? lift.weight(*weight) : Tensor();
  const ConvPass input_pass = spec.transposed ? ConvPass::kSmall : ConvPass::kBig;
  const Tensor& big = spec.transposed ? grad : in;
  const Tensor& small = spec.transposed ? in : grad;
  const bool empty = grad.numel() == 0 || c10::multiply_integers(batched_size) == 0;

  // The gradients that one stock call computes within the limit; it wants all tensors, so both must be saved.
  std::array<bool, 3> together = {false, false, false};
  TilePlan weight_plan;
  if (output_mask[1] && !empty) {
    const auto format = result_format(problem, in, w);
    weight_plan = plan_conv(engine, problem, ConvPass::kWeight, grad.scalar_type(), format,
                            copied_bytes(in, format) + copied_bytes(grad, format));
  }
  if (in.defined() && w.defined() && !empty) {
    together[1] = output_mask[1] && !weight_plan.tiled;
    together[0] = output_mask[0] &&
                  !plan_conv(engine, problem, input_pass, grad.scalar_type(), result_format(problem, grad, w),
                             copied_bytes(grad, result_format(problem, grad, w)))
                       .tiled;
    together[2] = output_mask[2] && together[1];
  }
  Tensor grad_input, grad_weight, grad_bias;
  if (together[0] || together[1]) {
    auto output_padding = no_output_padding(problem);
    if (spec.transposed) {
      for (const auto d : irange(spec.dims))
        output_padding[d + (problem.lifted ? 1 : 0)] = params.output_padding[d];
    }
    const std::vector<int64_t> bias_size{grad.size(1)};
    std::tie(grad_input, grad_weight, grad_bias) = at::convolution_backward(
        grad, in, w, together[2] ? at::OptionalIntArrayRef(bias_size) : std::nullopt,
        values(problem, &ConvDim::stride), values(problem, &ConvDim::pad_before),
        values(problem, &ConvDim::dilation), spec.transposed, output_padding, problem.groups, together);
    TilePlan whole;
    whole.batch_step = problem.batch;
    whole.pieces.assign(problem.dims.size(), 1);
    for (const ConvPass pass : {input_pass, ConvPass::kWeight}) {
      if (!together[pass == ConvPass::kWeight]) continue;
      PathRecorder recorder(problem, pass, whole);
      recorder.tile(true);
      recorder.finish();
    }
    if (together[0]) grad_input = lift.undo(grad_input.contiguous(result_format(problem, grad, w)));
    if (together[1] && problem.lifted) grad_weight = grad_weight.squeeze(2);
  }
  if (output_mask[0] && !together[0]) {
    grad_input = lift.undo(compute_grid(engine, problem, input_pass, grad, w, std::nullopt));
  }
  if (output_mask[1] && !together[1]) {
    if (empty) {
      grad_weight = at::zeros(problem.weight_sizes(), grad.options());
    } else if (weight_plan.tiled) {
      grad_weight = tile_weight(engine, problem, weight_plan, big, small).to(grad.scalar_type());
    } else {
      PathRecorder recorder(problem, ConvPass::kWeight, weight_plan);
      recorder.tile(true);
      grad_weight = weight_gradient(problem, big, small, values(problem, &ConvDim::pad_before));
      recorder.finish();
    }
    if (problem.lifted) grad_weight = grad_weight.squeeze(2);
  }
  if (output_mask[2] && !together[2]) {
    std::vector<int64_t> dims{0};
    for (const auto d : irange<int64_t>(2, grad.dim())) dims.push_back(d);
    grad_bias = at::sum(grad, dims);
  }
  if (output_mask[1]) grad_weight = grad_weight.contiguous(weight_format(weight));
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace patchconv
