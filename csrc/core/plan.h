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

#include "core/conv.h"

namespace patchconv {

// What tiles take in the form that a device wants. Bytes are transient, those of a grid per image and
// coordinate (zero where a tile is a view of its tensor).
struct TileCost {
  int64_t big_bytes = 0;
  int64_t small_bytes = 0;
  int64_t fixed_bytes = 0;      // once for every tile in flight
  int64_t preferred_bytes = 0;  // more bytes in flight are slower (caches); 0: no preference
  int64_t threads = 1;          // that may each compute a tile
  bool copies = false;          // tiles are copied anyway, so that cutting columns costs nothing more
};

// What one stock call for the whole problem would be.
struct StockCall {
  int64_t bytes = 0;     // of transient memory
  bool serves = true;    // false: only with a padded copy of the whole input, or with wrong numbers
  bool is_slow = false;  // tiles are known to be much faster
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

// `limit`: bytes that automatic splits may take. An explicit split is as the problem says.
TilePlan make_plan(const ConvProblem& problem, ConvPass pass, const StockCall& stock, const TileCost& tile,
                   int64_t limit);

// The range of the cut grid that is partitioned along one dimension: of the big grid, or of the small one,
// over which a weight gradient walks too.
Range cut_extent(const ConvDim& dim, ConvPass pass);

// 67108864 -> "64 MiB".
std::string format_bytes(int64_t bytes);

}  // namespace patchconv
