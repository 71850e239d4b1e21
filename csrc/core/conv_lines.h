// Sums over taps along one dimension. Every pass of a convolution that writes a grid is made of them.
//
// A convolution's output is one such line per dimension. In the other direction, from the small grid to the
// big one (core/geometry.h), there is one line per residue of the stride: big coordinates of one residue use
// the same taps, at consecutive small coordinates. So each residue is a convolution of stride 1 with some of
// the taps. Nothing here knows of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// Output u of [0, count) is the sum over j of [0, taps) of the weight's tap(j) times the value at
// coordinate(u, j). It is written to target(u). Distances are not negative.
struct ConvLine {
  int64_t source = 1;  // size of the grid that is read
  int64_t count = 1;
  int64_t step = 1;      // between outputs, in the grid that is read
  int64_t first = 0;     // coordinate(0, 0); may lie in the padding
  int64_t distance = 1;  // between taps, in the grid that is read
  int64_t out_first = 0, out_step = 1;
  int taps = 1, tap_first = 0, tap_step = 1;

  constexpr int64_t coordinate(int64_t u, int64_t j) const { return u * step + first + j * distance; }
  constexpr int64_t target(int64_t u) const { return out_first + u * out_step; }
  constexpr int tap(int j) const { return tap_first + j * tap_step; }
  // The largest coordinate that any output asks for.
  constexpr int64_t last() const { return coordinate(count - 1, taps > 0 ? taps - 1 : 0); }

  // The part of the line whose outputs lie in a range of the grid that is written.
  ConvLine cut(Range range) const;
};

// The line that computes the small grid from the big one.
ConvLine small_line(const ConvDim& dim);

// The lines that compute the big grid from the small one: one per residue, also for residues that no tap
// reaches (taps is 0). Outside the small grid, values count as zero.
std::vector<ConvLine> big_lines(const ConvDim& dim);

}  // namespace patchconv
