// The geometry of a convolution along one spatial dimension, and of pieces of it.
//
// A convolution relates two grids: the big one (a convolution's input, a transposed convolution's output) and
// the small one (the other). Small coordinate p meets big coordinate i at tap r when
//     i = p * stride + r * dilation - pad_before.
// Forward, both gradients and the transposed operators are all questions about this one relation, so
// everything that cuts a grid into pieces asks here which part of the other grid a piece needs. Nothing here
// knows of tensors.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace patchconv {

// What lies outside the big grid.
enum class PaddingMode { kZeros, kReflect, kReplicate, kCircular };

// Returns false when `name` is none of torch's four padding modes.
bool parse_padding_mode(std::string_view name, PaddingMode* mode);
const char* padding_mode_name(PaddingMode mode);

// A half-open range of coordinates. It may reach outside the grid: that part is padding.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
};

Range intersect(Range a, Range b);

// Cuts [0, size) into `pieces` ranges whose sizes differ by at most one.
Range piece_of(int64_t size, int64_t pieces, int64_t index);

// One spatial dimension. Sizes and coordinates in elements.
struct ConvDim {
  int64_t big = 0;
  int64_t small = 0;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t pad_before = 0;
  int64_t pad_after = 0;

  // Extent of the kernel with its holes.
  int64_t reach() const { return (kernel - 1) * dilation + 1; }

  // Big coordinates that a range of small ones reads. Not clipped: the part outside [0, big) is padding.
  Range big_range(Range small_range) const;

  // Small coordinates that touch a range of big ones, clipped to [0, small). Possibly empty.
  Range small_range(Range big_range) const;

  // Size of the small grid that the other members give: torch's formula. Zero or less means the kernel does
  // not fit.
  int64_t small_size() const { return (big + pad_before + pad_after - reach()) / stride + 1; }

  // Whether some small coordinate meets padding with every tap.
  bool reads_only_padding() const;
};

// The big coordinate whose value stands at coordinate `i`, which may lie in the padding; -1 where the value
// is zero. Padding is at most as wide as its mode allows (checked by the operators), so that one reflection
// or one turn is enough.
template <typename Int>
constexpr Int source_index(PaddingMode mode, Int i, Int size) {
  if (i >= 0 && i < size) return i;
  if (mode == PaddingMode::kReflect) return i < 0 ? -i : 2 * (size - 1) - i;
  if (mode == PaddingMode::kReplicate) return i < 0 ? 0 : size - 1;
  if (mode == PaddingMode::kCircular) return i < 0 ? i + size : i - size;
  return -1;
}

// source_index over a range.
std::vector<int64_t> source_indices(PaddingMode mode, Range range, int64_t size);

// Where the values of `range`, a part of the big grid, stand in the padded grid: in `range` itself and in
// what padding shows of it. Stretches that touch `range` are joined to it unless that would make it longer by
// more than half; none of the others is longer than `range`.
std::vector<Range> shown_at(PaddingMode mode, Range range, const ConvDim& dim);

}  // namespace patchconv
