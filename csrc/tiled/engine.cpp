#include "tiled/engine.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <map>
#include <string>

#include "tiled/passes.h"

namespace patchconv {

using at::Tensor;
using c10::irange;

Tensor Region::view(const Tensor& tensor) const {
  Tensor part = tensor.narrow(0, batch.begin, batch.size());
  for (const auto d : irange(ranges.size())) part = part.narrow(2 + d, ranges[d].begin, ranges[d].size());
  return part;
}

Tensor TileStyle::apply(const Tensor& tensor) const {
  return tensor.to(tensor.options().dtype(dtype), /*non_blocking=*/false, /*copy=*/false, format)
      .contiguous(format);
}

std::vector<int64_t> Region::sizes(int64_t channels) const {
  std::vector<int64_t> sizes{batch.size(), channels};
  for (const Range& range : ranges) sizes.push_back(range.size());
  return sizes;
}

void ConvEngine::parallel(int64_t count, const std::function<void(int64_t, int64_t)>& range) const {
  range(0, count);
}

bool ConvEngine::stock_fails(const ConvProblem&, ConvPass, at::ScalarType, at::MemoryFormat) const {
  return false;
}

bool ConvEngine::stock_is_slow(const ConvProblem&, ConvPass, at::ScalarType) const { return false; }

Tensor ConvEngine::load(const Tensor& source, const Region& region, PaddingMode mode,
                        const TileStyle& style) const {
  Tensor tile = source.narrow(0, region.batch.begin, region.batch.size());
  std::vector<int64_t> zeros;  // constant_pad_nd wants the last dimension first
  for (const auto d : irange(region.ranges.size())) {
    const Range range = region.ranges[d];
    const int64_t size = source.size(2 + d);
    const Range inside = intersect(range, {0, size});
    int64_t before = 0;
    int64_t after = 0;
    if (inside.size() == range.size()) {
      tile = tile.narrow(2 + d, range.begin, range.size());
    } else if (mode == PaddingMode::kZeros) {
      if (inside.empty()) return at::zeros(region.sizes(source.size(1)), source.options().dtype(style.dtype));
      tile = tile.narrow(2 + d, inside.begin, inside.size());
      before = inside.begin - range.begin;
      after = range.end - inside.end;
    } else {
      const auto indices = source_indices(mode, range, size);
      tile = tile.index_select(2 + d, at::tensor(indices, at::kLong).to(source.device()));
    }
    zeros.insert(zeros.begin(), {before, after});
  }
  if (std::any_of(zeros.begin(), zeros.end(), [](int64_t z) { return z != 0; })) {
    tile = at::constant_pad_nd(tile, zeros);
  }
  return style.apply(tile);
}

void ConvEngine::store(const Tensor& tile, const Region& region, const Tensor& target) const {
  region.view(target).copy_(tile);
}

bool ConvEngine::convolve_into(const Tensor&, const Tensor&, const std::optional<Tensor>&, const ConvProblem&,
                               at::IntArrayRef, const Tensor&) const {
  return false;
}

Tensor ConvEngine::convolve(const Tensor& tile, const Tensor& weight, const std::optional<Tensor>& bias,
                            const ConvProblem& problem, at::IntArrayRef padding) const {
  return at::convolution(tile, weight, bias, values(problem, &ConvDim::stride), padding,
                         values(problem, &ConvDim::dilation), /*transposed=*/false,
                         std::vector<int64_t>(problem.dims.size(), 0), problem.groups);
}

void ConvEngine::correlate(const Tensor& big, const Tensor& small, const ConvProblem& problem,
                           at::IntArrayRef padding, const Tensor& sum) const {
  sum.add_(std::get<1>(at::convolution_backward(
      small, big, weight_stand_in(problem, big), at::OptionalIntArrayRef(), values(problem, &ConvDim::stride),
      padding, values(problem, &ConvDim::dilation), /*transposed=*/false,
      std::vector<int64_t>(problem.dims.size(), 0), problem.groups, {false, true, false})));
}

bool ConvEngine::prefers_convolution() const { return false; }

NativeKernel ConvEngine::native_kernel(const ConvProblem&, ConvPass, at::ScalarType, at::MemoryFormat) const {
  return {};
}

bool ConvEngine::native_bits(const ConvProblem&, ConvPass, const Tensor&) const { return false; }

void ConvEngine::native_grid(const ConvProblem&, ConvPass, const Tensor&, const Tensor&, const Tensor&,
                             const Epilogue&, const Tensor&) const {
  TORCH_INTERNAL_ASSERT(false, "a device without kernels of its own");
}

Tensor ConvEngine::native_weight(const ConvProblem&, const Tensor&, const Tensor&, const Tensor&) const {
  TORCH_INTERNAL_ASSERT(false, "a device without kernels of its own");
}

Tensor ConvEngine::native_bias(const Tensor&, const Tensor&) const {
  TORCH_INTERNAL_ASSERT(false, "a device without kernels of its own");
}

Tensor weight_stand_in(const ConvProblem& problem, const Tensor& like) {
  return at::empty(problem.weight_sizes(), like.options());
}

namespace {

std::map<std::string, const ConvEngine*>& engines() {
  static std::map<std::string, const ConvEngine*> map;
  return map;
}

}  // namespace

RegisterEngine::RegisterEngine(const char* device, const ConvEngine& engine) { engines()[device] = &engine; }

const ConvEngine* find_engine(const std::string& device) {
  const auto entry = engines().find(device);
  return entry == engines().end() ? nullptr : entry->second;
}

TilePlan plan_conv(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass,
                   const TensorFacts& facts) {
  const auto [dtype, format, copied_bytes, exact_bytes] = facts;
  const int64_t limit = workspace_limit();
  const bool automatic = problem.splits.empty();
  StockCall stock;
  stock.serves = problem.stock_serves() && !engine.stock_fails(problem, pass, dtype, format);
  stock.bytes =
      engine.stock_bytes(problem, pass, dtype, format, exact_bytes ? 0 : limit - copied_bytes) + copied_bytes;
  stock.is_slow = automatic && engine.stock_is_slow(problem, pass, dtype);
  TileCost tile;
  if (!stock.serves || !problem.unsplit() || stock.is_slow || stock.bytes > limit) {
    tile = engine.tile_style(problem, pass, dtype).cost;
    if (problem.gather.has_value()) {  // which takes a second buffer
      (pass == ConvPass::kBig ? tile.big_bytes : tile.small_bytes) *= 2;
    }
  }
  return make_plan(problem, pass, stock, tile, limit);
}

}  // namespace patchconv
