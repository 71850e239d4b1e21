#include "core/plan.h"

#include <algorithm>
#include <cstdio>

namespace patchconv {

namespace {

// Size of the largest piece and, for it, the number of coordinates touched on the other grid.
struct Extent {
  int64_t big = 0;
  int64_t small = 0;
};

Extent largest_tile(const ConvDim& dim, CutGrid grid, bool cut_padding, int64_t pieces) {
  const int64_t total = cut_extent(dim, grid, cut_padding).size();
  const int64_t length = (total + pieces - 1) / pieces;
  if (grid == CutGrid::kSmall) return {(length - 1) * dim.stride + dim.reach(), length};
  // A transposed tile is computed from whole kernels and cropped: count what is computed.
  const int64_t small = std::min(dim.small, (length + dim.reach() - 2) / dim.stride + 1);
  return {(small - 1) * dim.stride + dim.reach(), small};
}

int64_t tile_bytes(const PlanRequest& request, const std::vector<int64_t>& pieces) {
  int64_t big = 1;
  int64_t small = 1;
  for (size_t d = 0; d < pieces.size(); ++d) {
    const Extent extent = largest_tile(request.dims[d], request.grid, request.cut_padding, pieces[d]);
    big *= extent.big;
    small *= extent.small;
  }
  return big * request.cost.big_bytes + small * request.cost.small_bytes;
}

double halo_percent(const PlanRequest& request, const std::vector<int64_t>& pieces) {
  double ratio = 1;
  for (size_t d = 0; d < pieces.size(); ++d) {
    const ConvDim& dim = request.dims[d];
    const Range extent = cut_extent(dim, request.grid, request.cut_padding);
    auto touched = [&](Range range) {
      return request.grid == CutGrid::kSmall ? intersect(dim.big_range(range), {0, dim.big}).size()
                                             : dim.small_range(range).size();
    };
    int64_t sum = 0;
    for (int64_t i = 0; i < pieces[d]; ++i) {
      const Range piece = piece_of(extent.size(), pieces[d], i);
      sum += touched({extent.begin + piece.begin, extent.begin + piece.end});
    }
    const int64_t whole = touched(extent);
    if (whole > 0) ratio *= static_cast<double>(sum) / static_cast<double>(whole);
  }
  // Pieces that skip coordinates (stride beyond the kernel) read less than the whole range spans, not more.
  return std::max(0.0, (ratio - 1) * 100);
}

}  // namespace

Range cut_extent(const ConvDim& dim, CutGrid grid, bool cut_padding) {
  if (grid == CutGrid::kSmall) return {0, dim.small};
  return cut_padding ? Range{-dim.pad_before, dim.big + dim.pad_after} : Range{0, dim.big};
}

int64_t TilePlan::tiles_per_image() const {
  int64_t count = 1;
  for (int64_t p : pieces) count *= p;
  return count;
}

TilePlan make_plan(const PlanRequest& request) {
  TilePlan plan;
  const size_t count = request.dims.size();
  plan.batch_step = request.batch;
  plan.pieces.assign(count, 1);
  plan.whole_bytes = request.whole_bytes;

  std::vector<int64_t> extent(count);
  for (size_t d = 0; d < count; ++d) {
    extent[d] = cut_extent(request.dims[d], request.grid, request.cut_padding).size();
  }

  const bool asked =
      std::any_of(request.splits.begin(), request.splits.end(), [](int64_t s) { return s > 1; });
  if (asked) {
    plan.tiled = true;
    plan.reason = PlanReason::kAsked;
    plan.batch_step = 1;
    for (size_t d = 0; d < count; ++d) {
      plan.pieces[d] = std::min(request.splits[d], extent[d]);
      plan.clamped |= plan.pieces[d] < request.splits[d];
    }
  } else if (!request.must_tile &&
             (!request.splits.empty() || (request.whole_bytes <= request.limit && !request.stock_is_slow))) {
    plan.reason = request.splits.empty() ? PlanReason::kFits : PlanReason::kAsked;
    plan.tile_bytes = request.whole_bytes;
    return plan;
  } else {
    plan.tiled = true;
    if (!request.splits.empty()) {
      plan.reason = PlanReason::kAsked;
    } else if (request.must_tile) {
      plan.reason = PlanReason::kPadding;
    } else {
      plan.reason = request.whole_bytes <= request.limit ? PlanReason::kFaster : PlanReason::kTooLarge;
    }
    const int64_t target =
        request.preferred_bytes > 0 ? std::min(request.limit, request.preferred_bytes) : request.limit;
    const int64_t image = tile_bytes(request, plan.pieces);
    if (image <= target || !request.splits.empty()) {
      plan.batch_step = std::clamp<int64_t>(image > 0 ? target / image : request.batch, 1, request.batch);
    } else {
      plan.batch_step = 1;
      for (size_t d = 0; d < count && tile_bytes(request, plan.pieces) > target; ++d) {
        // The fewest pieces that fit: tile_bytes falls as the number of pieces grows.
        int64_t low = 1;
        int64_t high = extent[d];
        while (low < high) {
          plan.pieces[d] = low + (high - low) / 2;
          if (tile_bytes(request, plan.pieces) <= target) {
            high = plan.pieces[d];
          } else {
            low = plan.pieces[d] + 1;
          }
        }
        plan.pieces[d] = low;
      }
    }
  }
  plan.tile_bytes = plan.batch_step * tile_bytes(request, plan.pieces);
  plan.halo_percent = halo_percent(request, plan.pieces);
  return plan;
}

std::string TilePlan::explanation(int64_t limit) const {
  std::string text;
  switch (reason) {
    case PlanReason::kFits:
      text = "one call needs about " + format_bytes(whole_bytes) + " of workspace, within the limit of " +
             format_bytes(limit);
      break;
    case PlanReason::kAsked:
      text = "splits were given";
      break;
    case PlanReason::kPadding:
      text =
          "the padding is made by the geometry, tile by tile, in place of a padded copy of the whole input";
      break;
    case PlanReason::kFaster:
      text = "one call would fit, but stock is slow with padding this wide: tiles bring their padding with them";
      break;
    case PlanReason::kTooLarge:
      text = "one call would need about " + format_bytes(whole_bytes) +
             " of workspace, more than the limit of " + format_bytes(limit);
      break;
  }
  if (clamped) text += "; more splits than coordinates were asked for, so each coordinate is one tile";
  if (tile_bytes > limit) text += "; a tile needs more than the limit";
  return text;
}

std::string format_bytes(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, value == static_cast<int64_t>(value) ? "%.0f %s" : "%.1f %s", value,
                units[unit]);
  return text;
}

}  // namespace patchconv
