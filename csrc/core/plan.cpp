#include "core/plan.h"

#include <algorithm>
#include <cstdio>

namespace patchconv {

namespace {

// What make_plan() is asked.
struct Request {
  const ConvProblem& problem;
  ConvPass pass;
  const StockCall& stock;
  const TileCost& tile;
  int64_t limit;
};

// Size of the largest piece and, for it, the number of coordinates touched on the other grid.
struct Extent {
  int64_t big = 0;
  int64_t small = 0;
};

Extent largest_tile(const ConvDim& dim, ConvPass pass, int64_t pieces) {
  const int64_t total = cut_extent(dim, pass).size();
  const int64_t length = (total + pieces - 1) / pieces;
  if (pass != ConvPass::kBig) return {(length - 1) * dim.stride + dim.reach(), length};
  // A transposed tile is computed from whole kernels and cropped: count what is computed.
  const int64_t small = std::min(dim.small, (length + dim.reach() - 2) / dim.stride + 1);
  return {(small - 1) * dim.stride + dim.reach(), small};
}

int64_t tile_bytes(const Request& request, const std::vector<int64_t>& pieces) {
  int64_t big = 1;
  int64_t small = 1;
  for (size_t d = 0; d < pieces.size(); ++d) {
    const Extent extent = largest_tile(request.problem.dims[d], request.pass, pieces[d]);
    big *= extent.big;
    small *= extent.small;
  }
  return big * request.tile.big_bytes + small * request.tile.small_bytes;
}

double halo_percent(const Request& request, const std::vector<int64_t>& pieces) {
  double ratio = 1;
  for (size_t d = 0; d < pieces.size(); ++d) {
    const ConvDim& dim = request.problem.dims[d];
    const Range extent = cut_extent(dim, request.pass);
    auto touched = [&](Range range) {
      return request.pass != ConvPass::kBig ? intersect(dim.big_range(range), {0, dim.big}).size()
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
int64_t most_pieces(const ConvDim& dim, ConvPass pass, int64_t times) {
  const int64_t total = cut_extent(dim, pass).size();
  if (dim.dilation == 1 || dim.kernel == 1) return total;
  // A piece of L small coordinates reads (L - 1) * stride + reach of L * stride, one of L big ones about
  // L + reach - 1 of L, both divided by the stride.
  const int64_t step = pass != ConvPass::kBig ? dim.stride : 1;
  const int64_t more = std::max<int64_t>(dim.reach() - step, 0);
  const int64_t length = std::max<int64_t>(more / (step * (times * dim.kernel - 1)), 1);
  return std::max<int64_t>(total / length, 1);
}

// Cuts the dimensions in order into the fewest pieces whose tiles take at most `target` bytes. False if none
// do. times: as of most_pieces.
bool cut_in_order(const Request& request, int64_t target, int64_t times, std::vector<int64_t>* pieces) {
  for (size_t d = 0; d < pieces->size(); ++d) {
    if (tile_bytes(request, *pieces) <= target) return true;
    int64_t low = (*pieces)[d];
    int64_t high = std::max(low, most_pieces(request.problem.dims[d], request.pass, times));
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
bool cut(const Request& request, int64_t target, int64_t times, std::vector<int64_t>* pieces) {
  constexpr int64_t kShortestRow = 128;  // elements; shorter runs of memory copy slowly
  constexpr double kWorthwhile = 0.7;
  const std::vector<int64_t> start = *pieces;
  if (!cut_in_order(request, target, times, pieces)) return false;
  double least = halo_percent(request, *pieces);
  const int64_t columns = cut_extent(request.problem.dims.back(), request.pass).size();
  for (int64_t c = 2; request.tile.copies && least > 10 && columns / c >= kShortestRow; c *= 2) {
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
void cut_automatically(const Request& request, TilePlan* plan) {
  const std::vector<int64_t> whole(plan->pieces.size(), 1);
  for (const int64_t flight : {request.tile.threads, int64_t{1}}) {
    // The cost of a tile that does not depend on its size (layouts of the weight) must leave most of the
    // limit to the tiles. A tile is not cut further for that cost alone: it always gets a quarter of the
    // limit.
    const int64_t fixed = flight * request.tile.fixed_bytes;
    if (flight > 1 && fixed > request.limit / 4) continue;
    int64_t budget = std::max(request.limit - fixed, request.limit / 4);
    if (request.tile.preferred_bytes > 0) budget = std::min(budget, request.tile.preferred_bytes);
    const int64_t target = budget / flight;
    const int64_t image = std::max<int64_t>(1, tile_bytes(request, whole));
    plan->in_flight = flight;
    plan->pieces = whole;
    plan->batch_step = 1;
    if (image <= target && (request.problem.batch >= flight || !request.problem.splits.empty())) {
      plan->batch_step =
          std::clamp<int64_t>(target / image, 1, (request.problem.batch + flight - 1) / flight);
      return;
    }
    if (!request.problem.splits.empty()) continue;
    if (request.problem.batch < flight && image <= target) {
      // Few small images: enough pieces for every thread.
      const int64_t rows = most_pieces(request.problem.dims[0], request.pass, kOften);
      plan->pieces[0] = std::min(rows, (flight + request.problem.batch - 1) / request.problem.batch);
      return;
    }
    if (cut(request, target, kSeldom, &plan->pieces)) return;
  }
  if (!request.problem.splits.empty()) return;
  // Only kernels with holes come here with pieces that could be smaller. The limit is worth more to them than
  // the bytes that are preferred.
  const int64_t target = std::max(request.limit - request.tile.fixed_bytes, request.limit / 4);
  plan->pieces = whole;
  if (cut(request, target, kSeldom, &plan->pieces)) return;
  std::vector<int64_t> smaller = whole;
  const bool kept = cut(request, target, kOften, &smaller);
  const int64_t fixed = request.tile.fixed_bytes;
  if (kept || tile_bytes(request, plan->pieces) + fixed > 2 * (tile_bytes(request, smaller) + fixed)) {
    plan->pieces = smaller;
  }
}

// Whether tiles of so many bytes keep the limit no more than one call does, and save less than a quarter of
// its workspace. Asked of kernels with holes alone, whose tiles read much. Not of the big grid: an input
// gradient is cut as the convolution that it is of the other grid (find_route), which is asked then.
bool gain_nothing(const Request& request, int64_t tile) {
  const bool holes = std::any_of(request.problem.dims.begin(), request.problem.dims.end(),
                                 [](const ConvDim& d) { return d.dilation > 1 && d.kernel > 1; });
  return holes && request.pass != ConvPass::kBig && !request.stock.is_slow && tile > request.limit &&
         tile >= request.stock.bytes / 4 * 3;
}

}  // namespace

Range cut_extent(const ConvDim& dim, ConvPass pass) {
  return {0, pass == ConvPass::kBig ? dim.big : dim.small};
}

int64_t TilePlan::tiles_per_image() const {
  int64_t count = 1;
  for (int64_t p : pieces) count *= p;
  return count;
}

TilePlan make_plan(const ConvProblem& problem, ConvPass pass, const StockCall& stock, const TileCost& tile,
                   int64_t limit) {
  const Request request{problem, pass, stock, tile, limit};
  TilePlan plan;
  const size_t count = problem.dims.size();
  plan.batch_step = problem.batch;
  plan.pieces.assign(count, 1);
  plan.whole_bytes = stock.bytes;

  std::vector<int64_t> extent(count);
  for (size_t d = 0; d < count; ++d) {
    extent[d] = cut_extent(problem.dims[d], pass).size();
  }

  if (problem.batch == 0 || std::any_of(extent.begin(), extent.end(), [](int64_t e) { return e <= 0; })) {
    plan.reason = PlanReason::kEmpty;
    return plan;
  }
  const bool asked = !problem.unsplit();
  if (asked) {
    plan.tiled = true;
    plan.reason = PlanReason::kAsked;
    plan.batch_step = 1;
    for (size_t d = 0; d < count; ++d) {
      plan.pieces[d] = std::min(problem.splits[d], extent[d]);
      plan.clamped |= plan.pieces[d] < problem.splits[d];
    }
  } else if (stock.serves && (!problem.splits.empty() || (stock.bytes <= limit && !stock.is_slow))) {
    plan.reason = problem.splits.empty() ? PlanReason::kFits : PlanReason::kAsked;
    plan.tile_bytes = stock.bytes;
    return plan;
  } else {
    plan.tiled = true;
    if (!problem.splits.empty()) {
      plan.reason = PlanReason::kAsked;
    } else if (!stock.serves) {
      plan.reason = PlanReason::kPadding;
    } else {
      plan.reason = stock.bytes <= limit ? PlanReason::kFaster : PlanReason::kTooLarge;
    }
    cut_automatically(request, &plan);
  }
  const int64_t each = plan.batch_step * tile_bytes(request, plan.pieces) + tile.fixed_bytes;
  if (plan.reason == PlanReason::kTooLarge && gain_nothing(request, each)) {
    TilePlan whole;
    whole.batch_step = problem.batch;
    whole.pieces.assign(count, 1);
    whole.tile_bytes = whole.whole_bytes = stock.bytes;
    whole.reason = PlanReason::kNoGain;
    return whole;
  }
  if (asked) plan.in_flight = tile.threads * each <= limit ? tile.threads : 1;
  const int64_t tiles = (problem.batch + plan.batch_step - 1) / plan.batch_step * plan.tiles_per_image();
  plan.in_flight = std::min(plan.in_flight, tiles);
  plan.tile_bytes = plan.in_flight * each;
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
