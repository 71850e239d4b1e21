// Moves tiles between a tensor of any strides and a dense buffer, and converts dtype and layout on the way:
// one pass over the data, in parallel, with no temporary. Padding comes from the index tables.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "tiled/engine.h"

namespace patchconv {

enum class TileMove {
  kLoad,   // tile = tensor, zero where an index is negative
  kStore,  // tensor = tile
};

// `tile` is dense in some memory format and has the region's sizes.
void move_tile(TileMove move, const at::Tensor& tensor, const Region& region, PaddingMode mode,
               const at::Tensor& tile);

}  // namespace patchconv
