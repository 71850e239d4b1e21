// How an operation on a grid is cut into tiles: the automatic choice and the checks of an explicit one.
//
// A plan cuts the grid that is written (a forward pass and a weight gradient walk over the small grid, an
// input gradient over the big one). Images of a batch are separated first, since that costs no halo; then the
// dimensions are cut in order, rows before columns, into as few pieces as keep a tile's transient memory
// under a limit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// Which grid the tiles partition.
enum class CutGrid { kSmall, kBig };

// Transient bytes of a tile: per image and coordinate of each grid (zero where a tile is a view of its
// tensor), and once for every tile in flight.
struct TileCost {
  int64_t big_bytes = 0;
  int64_t small_bytes = 0;
  int64_t fixed_bytes = 0;
};

enum class PlanReason {
  kFits,      // one call needs no more than the limit
  kAsked,     // explicit splits
  kPadding,   // stock PyTorch would make a padded copy for this padding, or computes it wrongly
  kFaster,    // one call fits, but tiles are known to be much faster
  kTooLarge,  // one call would need more than the limit
  kNoGain,    // so would tiles, and nearly as much
  kEmpty,     // nothing to compute
};

struct TilePlan {
  bool tiled = false;           // false: one call of the stock operator
  int64_t batch_step = 0;       // images per tile
  std::vector<int64_t> pieces;  // per spatial dimension
  int64_t in_flight = 1;        // tiles computed at the same time
  int64_t tile_bytes = 0;       // transient memory of the tiles in flight, estimated
  int64_t whole_bytes = 0;      // transient memory of one call for everything, estimated
  double halo_percent = 0;      // coordinates read more than once, in percent of the grid that is read
  PlanReason reason = PlanReason::kFits;
  bool clamped = false;  // more pieces were asked for than there are coordinates

  int64_t tiles_per_image() const;
  // One sentence for users.
  std::string explanation(int64_t limit) const;
};

struct PlanRequest {
  std::vector<ConvDim> dims;
  CutGrid grid = CutGrid::kSmall;
  int64_t batch = 0;
  TileCost cost;
  int64_t whole_bytes = 0;      // what one stock call would need
  bool stock_is_slow = false;   // tiles are known to be much faster than one stock call
  bool must_tile = false;       // stock could serve this only with a padded copy of the whole input
  std::vector<int64_t> splits;  // empty: automatic; else one entry per dimension, each at least 1
  int64_t limit = 0;            // bytes
  int64_t preferred_bytes = 0;  // more bytes in flight are slower (caches); 0: no preference
  bool copies = false;          // tiles are copied anyway, so that cutting columns costs nothing more
  int64_t threads = 1;          // that may each compute a tile
};

TilePlan make_plan(const PlanRequest& request);

// The range of the cut grid that is partitioned along one dimension.
Range cut_extent(const ConvDim& dim, CutGrid grid);

// 67108864 -> "64 MiB".
std::string format_bytes(int64_t bytes);

}  // namespace patchconv
