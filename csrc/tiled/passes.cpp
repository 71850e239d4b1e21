// The three passes, tile by tile.
#include "tiled/passes.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "ops/conv_checks.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

const char* pass_name(const ConvProblem& problem, ConvPass pass) {
  if (pass == ConvPass::kWeight) return "wgrad";
  return (pass == ConvPass::kBig) == problem.transposed ? "fprop" : "dgrad";
}

// Calls visit(region, slot) for every tile of the cut grid; the tiles of one slot run one after another on
// one thread.
void for_each_tile(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass, const TilePlan& plan,
                   const std::function<void(const Region&, int64_t)>& visit) {
  const size_t count = problem.dims.size();
  const int64_t per_image = plan.tiles_per_image();
  const int64_t steps = (problem.batch + plan.batch_step - 1) / plan.batch_step;
  const int64_t total = steps * per_image;
  const int64_t slots = plan.in_flight;
  engine.parallel(slots, [&](int64_t first, int64_t last) {
    const BelowAutograd guard;  // other threads start without it
    for (int64_t slot = first; slot < last; ++slot) {
      const Range tiles = piece_of(total, slots, slot);
      for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const int64_t n = tile / per_image * plan.batch_step;
        Region region;
        region.batch = {n, std::min(n + plan.batch_step, problem.batch)};
        region.ranges.resize(count);
        int64_t rest = tile % per_image;
        for (size_t d = count; d-- > 0;) {
          region.ranges[d] =
              piece_of(cut_extent(problem.dims[d], pass).size(), plan.pieces[d], rest % plan.pieces[d]);
          rest /= plan.pieces[d];
        }
        visit(region, slot);
      }
    }
  });
}

// The part of the big grid that a tile of the small one reads. Where no copy is needed it is a view, and zero
// padding is left to the stock operator; else it is a copy that includes its padding.
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
    Tensor view = region.view(big);
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
    Tensor view = region.view(small);
    if (view.is_contiguous(style.format)) return view;
  }
  return engine.load(small, region, PaddingMode::kZeros, style);
}

// The regions of the padded grid that the tile of a gradient gathers from: the tile's own, and its copies in
// the padding.
std::vector<Region> gathered_regions(const ConvProblem::Gather& gather, const Region& region) {
  std::vector<Region> regions{{region.batch, {}}};
  for (const auto d : irange(gather.dims.size())) {
    std::vector<Region> longer;
    for (const Range place : shown_at(gather.mode, region.ranges[d], gather.dims[d])) {
      for (Region part : regions) {
        part.ranges.push_back(place);
        longer.push_back(std::move(part));
      }
    }
    regions = std::move(longer);
  }
  return regions;
}

// Adds `part`, computed over `from`, to the tile `sum` of `region`. What lies in the padding is added to
// where its values come from. Begins with dimension `d`; in those before it, `from` lies inside the tile
// already.
void add_gathered(const ConvProblem::Gather& gather, const Tensor& part, Region from, const Region& region,
                  size_t d, const Tensor& sum) {
  if (d == from.ranges.size()) {
    for (const auto i : irange(d)) {
      from.ranges[i] = {from.ranges[i].begin - region.ranges[i].begin,
                        from.ranges[i].end - region.ranges[i].begin};
    }
    from.batch = {0, sum.size(0)};
    from.view(sum).add_(part);
    return;
  }
  const Range range = from.ranges[d];
  const int64_t size = gather.dims[d].big;
  const auto axis = static_cast<int64_t>(2 + d);
  for (const Range stretch : {intersect(range, {-gather.dims[d].pad_before, 0}), intersect(range, {0, size}),
                              intersect(range, {size, size + gather.dims[d].pad_after})}) {
    if (stretch.empty()) continue;
    Tensor piece = part.narrow(axis, stretch.begin - range.begin, stretch.size());
    from.ranges[d] = stretch;
    if (stretch.begin < 0 || stretch.end > size) {
      auto indices = source_indices(gather.mode, stretch, size);
      const auto [first, last] = std::minmax_element(indices.begin(), indices.end());
      from.ranges[d] = {*first, *last + 1};
      for (int64_t& index : indices) index -= from.ranges[d].begin;
      auto sizes = piece.sizes().vec();
      sizes[axis] = from.ranges[d].size();
      piece = at::zeros(sizes, piece.options())
                  .index_add_(axis, at::tensor(indices, at::kLong).to(piece.device()), piece);
    }
    add_gathered(gather, piece, from, region, d + 1, sum);
  }
}

// A tile of a gradient that gathers. compute(part, &covered) returns the gradient of a region of the padded
// grid, as far as any kernel reaches it: undefined where none does. Half precision is added up in float32.
Tensor gather_tile(const ConvProblem& problem, const Region& region, int64_t channels, const Tensor& like,
                   const TileStyle& style, const std::function<Tensor(const Region&, Region*)>& compute) {
  const auto options = like.options().dtype(at::toOpMathType(style.dtype)).memory_format(style.format);
  const Tensor sum = at::empty(region.sizes(channels), options).zero_();
  for (const Region& part : gathered_regions(*problem.gather, region)) {
    Region covered = part;
    const Tensor tile = compute(part, &covered);
    if (tile.defined()) add_gathered(*problem.gather, tile.to(sum.scalar_type()), covered, region, 0, sum);
  }
  return sum;
}

OptionalTensor cast(const OptionalTensor& tensor, at::ScalarType dtype) {
  // Dense, since oneDNN ignores the stride of a vector.
  return given(tensor) ? OptionalTensor(tensor->to(dtype).contiguous()) : std::nullopt;
}

}  // namespace

std::vector<int64_t> values(const ConvProblem& problem, int64_t ConvDim::* member) {
  std::vector<int64_t> list;
  for (const ConvDim& d : problem.dims) list.push_back(d.*member);
  return list;
}

Tensor bias_shaped(const Tensor& bias, int64_t dimensions) {
  std::vector<int64_t> shape(dimensions, 1);
  shape[1] = -1;
  return bias.view(shape);
}

PathRecorder::PathRecorder(const ConvProblem& problem, ConvPass pass, const TilePlan& plan,
                           const char* kernel) {
  record_.op = problem.op;
  record_.pass = pass_name(problem, pass);
  record_.tiled = plan.tiled;
  record_.kernel = kernel;
  record_.batch_step = plan.batch_step;
  const size_t first = problem.lifted ? 1 : 0;
  record_.dims = static_cast<int>(plan.pieces.size() - first);
  std::copy(plan.pieces.begin() + first, plan.pieces.end(), record_.pieces.begin());
}

void PathRecorder::tile(bool view) {
  ++tiles_;
  if (view) ++views_;
}

void PathRecorder::finish() {
  record_.tiles = tiles_;
  record_.views = views_;
  record_path(record_);
}

std::vector<int64_t> Lift::batched_sizes(at::IntArrayRef sizes) const {
  auto all = sizes.vec();
  if (!batched) all.insert(all.begin(), 1);
  return all;
}

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

Route find_route(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass,
                 const TensorFacts& facts) {
  Route route{problem, pass, {}};
  if (pass == ConvPass::kBig && problem.mode != PaddingMode::kZeros) {
    route.problem.gather = ConvProblem::Gather{problem.mode, problem.dims};
  }
  route.plan = plan_conv(engine, route.problem, pass, facts);
  const bool unit_stride =
      std::all_of(problem.dims.begin(), problem.dims.end(), [](const ConvDim& d) { return d.stride == 1; });
  if (!route.plan.tiled || pass != ConvPass::kBig || !unit_stride || !engine.prefers_convolution()) {
    return route;
  }
  // big[i] = sum over r of weight[r] * small[i + pad_before - r * dilation]: a convolution of the small grid
  // with the flipped kernel, padded by reach - 1 - pad_before (cropped, where that is negative).
  ConvProblem other = route.problem;
  other.mode = PaddingMode::kZeros;
  other.transposed = !problem.transposed;
  std::swap(other.big_channels, other.small_channels);
  for (ConvDim& d : other.dims) {
    std::swap(d.big, d.small);
    d.pad_before = d.reach() - 1 - d.pad_before;
    d.pad_after = d.small - 1 + d.reach() - d.big - d.pad_before;
  }
  const PlanReason reason = route.plan.reason;
  const int64_t whole = route.plan.whole_bytes;
  other.tiles_only = true;
  route = {other, ConvPass::kSmall, plan_conv(engine, other, ConvPass::kSmall, facts), true};
  route.plan.reason = reason;
  route.plan.whole_bytes = whole;
  return route;
}

Tensor flipped_weight(const ConvProblem& problem, const Tensor& weight) {
  auto sizes = weight.sizes().vec();
  const int64_t groups = problem.groups;
  sizes[0] /= groups;
  sizes.insert(sizes.begin(), groups);
  std::vector<int64_t> kernel_dims;
  for (const auto d : irange<int64_t>(2, weight.dim())) kernel_dims.push_back(d);
  Tensor turned = weight.reshape(sizes).transpose(1, 2);
  sizes = turned.sizes().vec();
  sizes[1] *= groups;
  sizes.erase(sizes.begin());
  return turned.reshape(sizes).flip(kernel_dims);
}

// The weight as the tiles' convolutions take it, copied at most once.
Tensor in_style(const Tensor& weight, const TileStyle& style) {
  return style.format == at::MemoryFormat::Contiguous ? weight.to(style.dtype) : style.apply(weight);
}

void tile_small(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan, const Tensor& big,
                const Tensor& weight, const OptionalTensor& bias, const Tensor& small) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kSmall, big.scalar_type());
  const Tensor tile_weight = in_style(weight, style);
  const OptionalTensor tile_bias = cast(bias, style.dtype);
  PathRecorder recorder(problem, ConvPass::kSmall, plan);
  for_each_tile(engine, problem, ConvPass::kSmall, plan, [&](const Region& region, int64_t) {
    if (problem.gather.has_value()) {
      recorder.tile(false);
      const Tensor sum =
          gather_tile(problem, region, small.size(1), small, style, [&](const Region& part, Region*) {
            const BigTile tile = load_big(engine, problem, big, part, style);
            return engine.convolve(tile.tensor, tile_weight, tile_bias, problem, tile.padding);
          });
      return engine.store(sum, region, small);
    }
    const BigTile tile = load_big(engine, problem, big, region, style);
    recorder.tile(tile.view);
    if (engine.convolve_into(tile.tensor, tile_weight, tile_bias, problem, tile.padding, region.view(small)))
      return;
    engine.store(engine.convolve(tile.tensor, tile_weight, tile_bias, problem, tile.padding), region, small);
  });
  recorder.finish();
}

void tile_big(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan, const Tensor& small,
              const Tensor& weight, const OptionalTensor& bias, const Tensor& big) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kBig, small.scalar_type());
  const Tensor tile_weight = in_style(weight, style);
  const OptionalTensor tile_bias = cast(bias, style.dtype);
  const auto stride = values(problem, &ConvDim::stride);
  const auto dilation = values(problem, &ConvDim::dilation);
  const std::vector<int64_t> output_padding(problem.dims.size(), 0);
  // The values of a region of the big grid. `covered` is the part of it that the kernels reach.
  auto compute = [&](const Region& region, Region* covered) {
    const size_t count = problem.dims.size();
    Region source{region.batch, {}};
    std::vector<int64_t> crop(count);
    std::vector<int64_t> skip(count);
    *covered = region;
    for (const auto d : irange(count)) {
      const ConvDim& dim = problem.dims[d];
      source.ranges.push_back(dim.small_range(region.ranges[d]));
      const Range reached = dim.big_range(source.ranges[d]);
      const Range range = intersect(region.ranges[d], reached);
      if (range.empty()) return Tensor();
      // Stock's padding crops both ends by the same amount; the rest at the front is skipped below.
      crop[d] = std::max<int64_t>(0, std::min(range.begin - reached.begin, reached.end - range.end));
      skip[d] = range.begin - reached.begin - crop[d];
      covered->ranges[d] = range;
    }
    Tensor tile = at::convolution(load_small(engine, small, source, style), tile_weight, tile_bias, stride,
                                  crop, dilation, /*transposed=*/true, output_padding, problem.groups);
    for (const auto d : irange(count)) tile = tile.narrow(2 + d, skip[d], covered->ranges[d].size());
    return tile;
  };
  PathRecorder recorder(problem, ConvPass::kBig, plan);
  for_each_tile(engine, problem, ConvPass::kBig, plan, [&](const Region& region, int64_t) {
    recorder.tile(false);
    if (problem.gather.has_value()) {
      return engine.store(gather_tile(problem, region, big.size(1), big, style, compute), region, big);
    }
    Region covered;
    const Tensor tile = compute(region, &covered);
    if (!tile.defined() || covered.sizes(1) != region.sizes(1)) {
      // Coordinates that no kernel reaches.
      const Tensor rest = region.view(big);
      if (tile_bias.has_value()) {
        rest.copy_(bias_shaped(*tile_bias, rest.dim()).expand_as(rest));
      } else {
        rest.zero_();
      }
    }
    if (tile.defined()) engine.store(tile, covered, big);
  });
  recorder.finish();
}

Tensor tile_weight(const ConvEngine& engine, const ConvProblem& problem, const TilePlan& plan,
                   const Tensor& big, const Tensor& small) {
  const TileStyle style = engine.tile_style(problem, ConvPass::kWeight, big.scalar_type());
  // Kernel positions come first in memory, so that the values of one tap form a matrix.
  std::vector<int64_t> sizes = values(problem, &ConvDim::kernel);
  std::vector<int64_t> order;
  for (const auto d : irange(sizes.size() + 2)) order.push_back((d + sizes.size()) % (sizes.size() + 2));
  sizes.push_back(problem.small_channels);
  sizes.push_back(problem.big_channels / problem.groups);
  // One sum per slot, added up in order: the same plan gives the same bits.
  std::vector<Tensor> sums;
  for (int64_t slot = 0; slot < plan.in_flight; ++slot) {
    sums.push_back(at::zeros(sizes, big.options().dtype(style.dtype)).permute(order));
  }
  PathRecorder recorder(problem, ConvPass::kWeight, plan);
  for_each_tile(engine, problem, ConvPass::kWeight, plan, [&](const Region& region, int64_t slot) {
    const BigTile tile = load_big(engine, problem, big, region, style);
    recorder.tile(tile.view);
    engine.correlate(tile.tensor, load_small(engine, small, region, style), problem, tile.padding,
                     sums[slot]);
  });
  recorder.finish();
  for (size_t slot = 1; slot < sums.size(); ++slot) sums[0].add_(sums[slot]);
  return sums[0];
}

}  // namespace patchconv
