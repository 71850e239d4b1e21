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

Extent largest_tile(const ConvDim& dim, CutGrid grid, int64_t pieces) {
  const int64_t total = cut_extent(dim, grid).size();
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
    const Extent extent = largest_tile(request.dims[d], request.grid, pieces[d]);
    big *= extent.big;
    small *= extent.small;
  }
  return big * request.cost.big_bytes + small * request.cost.small_bytes;
}

double halo_percent(const PlanRequest& request, const std::vector<int64_t>& pieces) {
  double ratio = 1;
  for (size_t d = 0; d < pieces.size(); ++d) {
    const ConvDim& dim = request.dims[d];
    const Range extent = cut_extent(dim, request.grid);
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
  // With a stride beyond the kernel, pieces skip coordinates and read less than the whole range.
  return std::max(0.0, (ratio - 1) * 100);
}

// How often pieces may read a coordinate, in units of the kernel's taps: where that is enough to keep the
// limit, and where it is not.
constexpr int64_t kSeldom = 1;
constexpr int64_t kOften = 4;

// The most pieces that read a coordinate, on average, at most `times` as often as the kernel has taps. Fewer
// than one a coordinate only where a kernel has holes: a small tile would read much that it has no tap for.
int64_t most_pieces(const ConvDim& dim, CutGrid grid, int64_t times) {
  const int64_t total = cut_extent(dim, grid).size();
  if (dim.dilation == 1 || dim.kernel == 1) return total;
  // A piece of L small coordinates reads (L - 1) * stride + reach of L * stride, one of L big ones about
  // L + reach - 1 of L, both divided by the stride.
  const int64_t step = grid == CutGrid::kSmall ? dim.stride : 1;
  const int64_t more = std::max<int64_t>(dim.reach() - step, 0);
  const int64_t length = std::max<int64_t>(more / (step * (times * dim.kernel - 1)), 1);
  return std::max<int64_t>(total / length, 1);
}

// Cuts the dimensions in order into the fewest pieces whose tiles take at most `target` bytes. False if none
// do. times: as of most_pieces.
bool cut_in_order(const PlanRequest& request, int64_t target, int64_t times, std::vector<int64_t>* pieces) {
  for (size_t d = 0; d < pieces->size(); ++d) {
    if (tile_bytes(request, *pieces) <= target) return true;
    int64_t low = (*pieces)[d];
    int64_t high = std::max(low, most_pieces(request.dims[d], request.grid, times));
    while (low < high) {  // tile_bytes falls as the number of pieces grows
      (*pieces)[d] = low + (high - low) / 2;
      if (tile_bytes(request, *pieces) <= target) {
        high = (*pieces)[d];
      } else {
        low = (*pieces)[d] + 1;
      }
    }
    (*pieces)[d] = std::max((*pieces)[d], low);
  }
  return tile_bytes(request, *pieces) <= target;
}

// The same, but wide grids are cut into columns too where strips would be so low that they read mostly halo.
bool cut(const PlanRequest& request, int64_t target, int64_t times, std::vector<int64_t>* pieces) {
  constexpr int64_t kShortestRow = 128;  // elements; shorter runs of memory copy slowly
  constexpr double kWorthwhile = 0.7;
  const std::vector<int64_t> start = *pieces;
  if (!cut_in_order(request, target, times, pieces)) return false;
  double least = halo_percent(request, *pieces);
  const int64_t columns = cut_extent(request.dims.back(), request.grid).size();
  for (int64_t c = 2; request.copies && least > 10 && columns / c >= kShortestRow; c *= 2) {
    std::vector<int64_t> candidate = start;
    candidate.back() = c;
    if (!cut_in_order(request, target, times, &candidate)) continue;
    const double halo = halo_percent(request, candidate);
    if (halo < kWorthwhile * least) {
      least = halo;
      *pieces = candidate;
    }
  }
  return true;
}

// Whole images where they fit, else pieces of single images. There are as many tiles in flight as threads if
// these fit together, else one.
void cut_automatically(const PlanRequest& request, TilePlan* plan) {
  const std::vector<int64_t> whole(plan->pieces.size(), 1);
  for (const int64_t flight : {request.threads, int64_t{1}}) {
    // The cost of a tile that does not depend on its size (layouts of the weight) must leave most of the
    // limit to the tiles. A tile is not cut further for that cost alone: it always gets a quarter of the
    // limit.
    const int64_t fixed = flight * request.cost.fixed_bytes;
    if (flight > 1 && fixed > request.limit / 4) continue;
    int64_t budget = std::max(request.limit - fixed, request.limit / 4);
    if (request.preferred_bytes > 0) budget = std::min(budget, request.preferred_bytes);
    const int64_t target = budget / flight;
    const int64_t image = std::max<int64_t>(1, tile_bytes(request, whole));
    plan->in_flight = flight;
    plan->pieces = whole;
    plan->batch_step = 1;
    if (image <= target && (request.batch >= flight || !request.splits.empty())) {
      plan->batch_step = std::clamp<int64_t>(target / image, 1, (request.batch + flight - 1) / flight);
      return;
    }
    if (!request.splits.empty()) continue;
    if (request.batch < flight && image <= target) {
      // Few small images: enough pieces for every thread.
      const int64_t rows = most_pieces(request.dims[0], request.grid, kOften);
      plan->pieces[0] = std::min(rows, (flight + request.batch - 1) / request.batch);
      return;
    }
    if (cut(request, target, kSeldom, &plan->pieces)) return;
  }
  if (!request.splits.empty()) return;
  // Only kernels with holes come here with pieces that could be smaller. The limit is worth more to them than
  // the bytes that are preferred.
  const int64_t target = std::max(request.limit - request.cost.fixed_bytes, request.limit / 4);
  plan->pieces = whole;
  if (cut(request, target, kSeldom, &plan->pieces)) return;
  std::vector<int64_t> smaller = whole;
  const bool kept = cut(request, target, kOften, &smaller);
  const int64_t fixed = request.cost.fixed_bytes;
  if (kept || tile_bytes(request, plan->pieces) + fixed > 2 * (tile_bytes(request, smaller) + fixed)) {
    plan->pieces = smaller;
  }
}

// Whether tiles of so many bytes keep the limit no more than one call does, and save less than a quarter of
// its workspace. Asked of kernels with holes alone, whose tiles read much. Not of the big grid: an input
// gradient is cut as the convolution that it is of the other grid (find_route), which is asked then.
bool gain_nothing(const PlanRequest& request, int64_t tile) {
  const bool holes = std::any_of(request.dims.begin(), request.dims.end(),
                                 [](const ConvDim& d) { return d.dilation > 1 && d.kernel > 1; });
  return holes && request.grid == CutGrid::kSmall && !request.stock_is_slow && tile > request.limit &&
         tile >= request.whole_bytes / 4 * 3;
}

}  // namespace

Range cut_extent(const ConvDim& dim, CutGrid grid) {
  return {0, grid == CutGrid::kSmall ? dim.small : dim.big};
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
    extent[d] = cut_extent(request.dims[d], request.grid).size();
  }

  if (request.batch == 0 || std::any_of(extent.begin(), extent.end(), [](int64_t e) { return e <= 0; })) {
    plan.reason = PlanReason::kEmpty;
    return plan;
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
    cut_automatically(request, &plan);
  }
  const int64_t tile = plan.batch_step * tile_bytes(request, plan.pieces) + request.cost.fixed_bytes;
  if (plan.reason == PlanReason::kTooLarge && gain_nothing(request, tile)) {
    TilePlan whole;
    whole.batch_step = request.batch;
    whole.pieces.assign(count, 1);
    whole.tile_bytes = whole.whole_bytes = request.whole_bytes;
    whole.reason = PlanReason::kNoGain;
    return whole;
  }
  if (asked) plan.in_flight = request.threads * tile <= request.limit ? request.threads : 1;
  const int64_t tiles = (request.batch + plan.batch_step - 1) / plan.batch_step * plan.tiles_per_image();
  plan.in_flight = std::min(plan.in_flight, tiles);
  plan.tile_bytes = plan.in_flight * tile;
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
      text = "padding is added tile by tile, in place of a padded copy of the whole input";
      break;
    case PlanReason::kFaster:
      text =
          "one call would fit, but stock PyTorch is slow with padding this wide, this precision or this size";
      break;
    case PlanReason::kTooLarge:
      text = "one call would need about " + format_bytes(whole_bytes) +
             " of workspace, more than the limit of " + format_bytes(limit);
      break;
    case PlanReason::kNoGain:
      text = "one call needs about " + format_bytes(whole_bytes) + " of workspace, more than the limit of " +
             format_bytes(limit) + ", and tiles would need nearly as much, since the kernel's holes are wide";
      break;
    case PlanReason::kEmpty:
      text = "there is nothing to compute";
      break;
  }
  if (clamped) text += "; more splits than coordinates were asked for, so each coordinate is one tile";
  if (tiled && tile_bytes > limit) text += "; a tile needs more than the limit";
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
