// Sums over taps along one dimension: what every pass of a convolution that writes a grid is made of.
//
// A convolution's output is one such line a dimension. The way back, from the small grid to the big one
// (core/geometry.h), is one for every residue of the stride: the big coordinates of one residue meet the same
// taps, at small coordinates that follow each other, so each residue is a convolution of stride 1 with some
// of the taps. Nothing here knows of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// Output u of [0, count) is the sum over j of [0, taps) of the weight's tap tap_first + j * tap_step times
// the value at coordinate(u, j), and lies at target(u) of the grid that is written. Distances are not
// negative.
struct ConvLine {
  int64_t source = 1;  // size of the grid that is read
  int64_t count = 1;
  int64_t step = 1;      // in the grid that is read, between outputs
  int64_t first = 0;     // coordinate(0, 0): may lie in the padding
  int64_t distance = 1;  // between taps
  int64_t out_first = 0, out_step = 1;
  int taps = 1, tap_first = 0, tap_step = 1;

  constexpr int64_t coordinate(int64_t u, int64_t j) const { return u * step + first + j * distance; }
  constexpr int64_t target(int64_t u) const { return out_first + u * out_step; }
  constexpr int tap(int j) const { return tap_first + j * tap_step; }
  // The largest coordinate that any output asks for.
  constexpr int64_t last() const { return coordinate(count - 1, taps > 0 ? taps - 1 : 0); }

  // The outputs that lie in a range of the grid that is written.
  ConvLine cut(Range range) const;
};

// The small grid from the big one.
ConvLine small_line(const ConvDim& dim);

// The big grid from the small one: a line for every residue, also those that no tap meets (taps is 0). What
// lies outside the small grid counts as zero.
std::vector<ConvLine> big_lines(const ConvDim& dim);

}  // namespace patchconv
