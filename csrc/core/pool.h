// The windows of a pooling, and which place of the input an offset in one of them means.
//
// Windows are regular (kernel, stride, padding, dilation) or adaptive: output o covers the coordinates from
// floor(o * in / out) to ceil((o + 1) * in / out). Where a maximum lies is told by its offset: its position
// among all taps of its window, row-major, taps in the padding included. Three dimensions always; leading
// ones that a pooling lacks have size one. Nothing here knows of tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "core/geometry.h"

namespace patchconv {

// One window along one dimension.
struct PoolWindow {
  int64_t start = 0;  // coordinate of its first tap; negative in the padding
  int64_t taps = 1;
  int64_t dilation = 1;
  // The taps that lie inside the input. With dilation there may be none: it then begins at the first tap
  // behind the padding before the input.
  Range inside{0, 1};

  int64_t coordinate(int64_t tap) const { return start + tap * dilation; }
};

struct PoolDim {
  int64_t in = 1;
  int64_t out = 1;
  bool adaptive = false;
  int64_t kernel = 1;  // adaptive: the most taps of any window; the others have as many or one less
  int64_t stride = 1;  // this and the rest: regular windows only
  int64_t padding = 0;
  int64_t dilation = 1;

  // Adaptive windows of one size that follow each other are regular ones.
  static PoolDim adaptive_to(int64_t in, int64_t out) {
    if (out == 0) return {in, out};
    if (in % out == 0) return {in, out, false, in / out, in / out};
    PoolDim dim{in, out, true};
    for (int64_t o = 0; o < out; ++o) dim.kernel = std::max(dim.kernel, dim.taps(o));
    return dim;
  }

  int64_t start(int64_t o) const { return adaptive ? o * in / out : o * stride - padding; }
  int64_t taps(int64_t o) const { return adaptive ? ((o + 1) * in + out - 1) / out - start(o) : kernel; }

  PoolWindow window(int64_t o) const {
    const int64_t first = start(o);
    const int64_t count = taps(o);
    if (first >= 0 && first + (count - 1) * dilation < in) return {first, count, dilation, {0, count}};
    const int64_t begin = first < 0 ? (dilation - 1 - first) / dilation : 0;
    const int64_t end = first < in ? (in - first + dilation - 1) / dilation : 0;
    return {first, count, dilation, {begin, std::min(end, count)}};
  }

  // Extent of a regular window with its holes.
  int64_t reach() const { return (kernel - 1) * dilation + 1; }

  // The outputs whose windows lie inside the input, `stride` apart.
  Range interior() const {
    if (adaptive || in < reach()) return {};
    return intersect({(padding + stride - 1) / stride, (in - reach() + padding) / stride + 1}, {0, out});
  }

  // Whether no coordinate belongs to two windows.
  bool disjoint() const { return !adaptive && (stride >= reach() || out <= 1); }

  bool has_empty_window() const {
    for (int64_t o = 0; o < out; ++o) {
      if (window(o).inside.empty()) return true;
    }
    return false;
  }
};

// The windows of output 0, 1, 2... without a division each.
class PoolWalk {
 public:
  explicit PoolWalk(const PoolDim& dim)
      : step_(dim.adaptive ? dim.in / dim.out : dim.stride),
        rest_(dim.adaptive ? dim.in % dim.out : 0),
        out_(dim.out),
        fixed_taps_(dim.adaptive ? 0 : dim.kernel),
        start_(dim.adaptive ? 0 : -dim.padding) {}

  int64_t start() const { return start_; }
  int64_t taps() const {
    const int64_t rest = fraction_ + rest_;
    return fixed_taps_ > 0 ? fixed_taps_ : step_ + (rest > 0) + (rest > out_);
  }
  void next() {
    start_ += step_;
    fraction_ += rest_;
    if (fraction_ >= out_) {
      fraction_ -= out_;
      ++start_;
    }
  }

 private:
  int64_t step_, rest_, out_, fixed_taps_, start_;
  int64_t fraction_ = 0;  // of start, in units of 1 / out
};

// A pooling of tensors laid out as (outer, depth, height, width, inner): planes and 1 where they are
// contiguous, images and channels in channels-last formats.
struct Pool {
  std::array<PoolDim, 3> dims;
  int64_t outer = 0, inner = 1;

  // Sizes of the spatial dimensions; an empty `kernel` asks for adaptive windows.
  Pool(std::span<const int64_t> in, std::span<const int64_t> out, std::span<const int64_t> kernel,
       std::span<const int64_t> stride, std::span<const int64_t> padding, std::span<const int64_t> dilation) {
    for (size_t i = 0, d = dims.size() - in.size(); i < in.size(); ++i, ++d) {
      dims[d] = kernel.empty() ? PoolDim::adaptive_to(in[i], out[i])
                               : PoolDim{in[i], out[i], false, kernel[i], stride[i], padding[i], dilation[i]};
    }
  }

  const PoolDim& depth() const { return dims[0]; }
  const PoolDim& height() const { return dims[1]; }
  const PoolDim& width() const { return dims[2]; }

  int64_t plane() const { return depth().in * height().in * width().in; }
  int64_t rows_per_plane() const { return depth().out * height().out; }
  int64_t rows() const { return outer * rows_per_plane(); }
  int64_t positions() const { return depth().kernel * height().kernel * width().kernel; }
  bool disjoint() const { return depth().disjoint() && height().disjoint() && width().disjoint(); }
  bool has_empty_window() const {
    return depth().has_empty_window() || height().has_empty_window() || width().has_empty_window();
  }
};

// Bytes of an offset where the largest window has this many positions: unsigned, then signed where it
// takes 4.
inline int64_t offset_bytes(int64_t positions) { return positions <= 256 ? 1 : positions <= 65536 ? 2 : 4; }

// Row number `number` of the output: where it lies, and its windows but for the width.
struct PoolRow {
  int64_t number, outer;
  PoolWindow depth, height;

  PoolRow(const Pool& pool, int64_t row)
      : number(row),
        outer(row / pool.rows_per_plane()),
        depth(pool.depth().window(row / pool.height().out % pool.depth().out)),
        height(pool.height().window(row % pool.height().out)) {}

  int64_t first_tap(const PoolWindow& width) const {
    return (depth.inside.begin * height.taps + height.inside.begin) * width.taps + width.inside.begin;
  }
};

// Ways from a window's start to its taps, for windows of at most 256 positions that all lie where some tap
// meets the input.
class PoolTable {
 public:
  PoolTable() = default;  // none
  explicit PoolTable(const Pool& pool) : height_(pool.height().kernel), width_(pool.width().kernel) {
    for (int64_t lines = std::max<int64_t>(1, height_ - 1); lines <= height_; ++lines) {
      for (int64_t taps = std::max<int64_t>(1, width_ - 1); taps <= width_; ++taps) {
        int64_t* way = ways_[height_ - lines][width_ - taps].data();
        for (int64_t d = 0; d < pool.depth().kernel; ++d) {
          for (int64_t h = 0; h < lines; ++h) {
            for (int64_t w = 0; w < taps; ++w) {
              *way++ = (d * pool.depth().dilation * pool.height().in + h * pool.height().dilation) *
                           pool.width().in +
                       w * pool.width().dilation;
            }
          }
        }
      }
    }
  }

  // For windows of so many lines and taps a line, by offset.
  const int64_t* ways(int64_t lines, int64_t taps) const {
    return ways_[height_ - lines][width_ - taps].data();
  }

 private:
  int64_t height_ = 0, width_ = 0;
  std::array<std::array<std::array<int64_t, 256>, 2>, 2> ways_{};
};

// How offsets are followed.
enum class Follow {
  kPlain,   // one channel, regular windows: the table
  kTable,   // the table
  kDivide,  // windows of more positions, or some that meet nothing but padding
};

// Calls visit(element, position in the plane, channel, inside) for channels [c0, c1) of one row's maxima.
template <Follow kFollow, typename Offset, typename Visit>
inline void each_maximum(const Pool& pool, const PoolTable& table, int64_t number, int64_t c0, int64_t c1,
                         const Offset* offsets, Visit visit) {
  const PoolRow row(pool, number);
  const PoolDim& width = pool.width();
  const int64_t line = (row.depth.start * pool.height().in + row.height.start) * width.in;
  int64_t first = number * width.out * pool.inner;
  if constexpr (kFollow == Follow::kPlain) {
    const int64_t* ways = table.ways(row.height.taps, width.kernel);
    for (int64_t w = 0; w < width.out; ++w, ++first) {
      visit(first, line + w * width.stride - width.padding + ways[offsets[first]], 0, true);
    }
  } else if constexpr (kFollow == Follow::kTable) {
    PoolWalk column(width);
    for (int64_t w = 0; w < width.out; ++w, column.next(), first += pool.inner) {
      const int64_t* ways = table.ways(row.height.taps, column.taps());
      const int64_t start = line + column.start();
      for (int64_t c = c0; c < c1; ++c) visit(first + c, start + ways[offsets[first + c]], c, true);
    }
  } else {
    for (int64_t w = 0; w < width.out; ++w, first += pool.inner) {
      const PoolWindow column = width.window(w);
      const auto taps = static_cast<uint32_t>(column.taps);
      const auto lines = static_cast<uint32_t>(row.height.taps);
      for (int64_t c = c0; c < c1; ++c) {
        const auto offset = static_cast<uint32_t>(offsets[first + c]);
        const int64_t x = column.coordinate(offset % taps);
        const int64_t y = row.height.coordinate(offset / taps % lines);
        const int64_t z = row.depth.coordinate(offset / taps / lines);
        const bool inside =
            x >= 0 && x < width.in && y >= 0 && y < pool.height().in && z >= 0 && z < pool.depth().in;
        visit(first + c, (z * pool.height().in + y) * width.in + x, c, inside);
      }
    }
  }
}

}  // namespace patchconv
