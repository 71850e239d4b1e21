// Pooling windows, the maximum of a window, and the input position that an offset in a window stands for.
//
// Windows are regular (kernel, stride, padding, dilation) or adaptive: output o covers the coordinates from
// floor(o * in / out) to ceil((o + 1) * in / out). The position of a maximum is stored as an offset: its
// index among all taps of its window in row-major order, taps in the padding included. There are always three
// dimensions; a pooling of fewer has leading ones of size one. Nothing here knows of tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// One window along one dimension.
struct PoolWindow {
  int64_t start = 0;  // coordinate of its first tap; negative in the padding
  int64_t taps = 1;
  int64_t dilation = 1;
  // The taps that lie inside the input. With dilation there may be none; the range then begins at the first
  // tap behind the leading padding.
  Range inside{0, 1};

  int64_t coordinate(int64_t tap) const { return start + tap * dilation; }
};

struct PoolDim {
  int64_t in = 1;
  int64_t out = 1;
  bool adaptive = false;
  int64_t kernel = 1;  // adaptive: taps of the largest window; the others have as many or one less
  int64_t stride = 1;  // from here on: regular windows only
  int64_t padding = 0;
  int64_t dilation = 1;

  // Adaptive windows of equal size are regular windows.
  static PoolDim adaptive_to(int64_t in, int64_t out) {
    if (out == 0) return {in, out};
    if (in % out == 0) return {in, out, false, in / out, in / out};
    PoolDim dim{in, out, true};
    for (int64_t o = 0; o < out; ++o) dim.kernel = std::max(dim.kernel, dim.taps(o));
    return dim;
  }

  // The coordinate of the first tap, and (end) one past the last. Both may lie in the padding.
  int64_t start(int64_t o) const { return adaptive ? o * in / out : o * stride - padding; }
  int64_t taps(int64_t o) const { return adaptive ? ((o + 1) * in + out - 1) / out - start(o) : kernel; }
  int64_t end(int64_t o) const { return start(o) + (taps(o) - 1) * dilation + 1; }

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

  // Whether some window has no tap inside the input.
  bool has_empty_window() const {
    auto empty_in = [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        if (window(o).inside.empty()) return true;
      }
      return false;
    };
    const Range good = interior();
    return good.empty() ? empty_in(0, out) : empty_in(0, good.begin) || empty_in(good.end, out);
  }
};

// A pooling of tensors laid out as (outer, depth, height, width, inner). For contiguous tensors outer counts
// planes and inner is 1; in channels-last formats outer counts images and inner channels.
struct Pool {
  std::array<PoolDim, 3> dims;
  int64_t outer = 0, inner = 1;

  // One entry per spatial dimension; an empty `kernel` means adaptive windows.
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

// Bytes of an offset if the largest window has this many positions. Offsets of 1 and 2 bytes are unsigned, of
// 4 signed.
inline int64_t offset_bytes(int64_t positions) { return positions <= 256 ? 1 : positions <= 65536 ? 2 : 4; }

// Row `number` of the output: its position, and its windows along depth and height.
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

// Calls visit(tap, position in the plane) for a window's taps inside the input, in scan order.
template <typename Visit>
[[gnu::always_inline]] inline void each_tap(const Pool& pool, const PoolRow& row, const PoolWindow& column,
                                            Visit visit) {
  for (int64_t d = row.depth.inside.begin; d < row.depth.inside.end; ++d) {
    for (int64_t h = row.height.inside.begin; h < row.height.inside.end; ++h) {
      const int64_t line = row.depth.coordinate(d) * pool.height().in + row.height.coordinate(h);
      for (int64_t w = column.inside.begin; w < column.inside.end; ++w) {
        visit((d * row.height.taps + h) * column.taps + w, line * pool.width().in + column.coordinate(w));
      }
    }
  }
}

// How values compare. A value wins if its key is greater than the best so far or if it is NaN. So of equal
// maxima the first is kept, and of several NaN the last, as in stock PyTorch. Once a NaN has won, `settle`
// gives a key that only another NaN beats.
template <typename T>
struct PoolOrder {
  using Raw = T;
  using Key = T;
  static Raw lowest() { return -std::numeric_limits<T>::infinity(); }
  static Key key(Raw value) { return value; }
  static bool is_nan(Raw value) { return value != value; }
  static Key settle(Key key, bool) { return key; }
  template <typename V>
  static V choose(bool first, V a, V b) {
    return first ? a : b;
  }
};

// Half types, told apart by the bits of their infinity, compare as 16-bit integers; the two zeros are equal.
// choose() has no branch: compilers do not always vectorise a loop with a condition.
template <int16_t kInfinity>
struct HalfPoolOrder {
  using Raw = uint16_t;
  using Key = int16_t;
  static Raw lowest() { return 0x8000 | kInfinity; }
  static Key key(Raw value) {
    const Key sign = static_cast<Key>(value) >> 15;
    return static_cast<Key>(((value & 0x7fff) ^ sign) - sign);
  }
  static bool is_nan(Raw value) { return static_cast<Key>(value & 0x7fff) > kInfinity; }
  static Key settle(Key key, bool nan) { return choose<Key>(nan, 0x7fff, key); }
  template <typename V>
  static V choose(bool first, V a, V b) {
    return b ^ ((a ^ b) & static_cast<V>(-static_cast<V>(first)));
  }
};

// The maximum of one window of a plane, and its offset.
template <typename Order>
struct PoolMaximum {
  typename Order::Raw value = Order::lowest();
  int64_t offset = 0;

  [[gnu::always_inline]] PoolMaximum(const Pool& pool, const PoolRow& row, const PoolWindow& column,
                                     const typename Order::Raw* plane)
      : offset(row.first_tap(column)) {
    typename Order::Key best = Order::key(value);
    each_tap(pool, row, column, [&](int64_t tap, int64_t position) __attribute__((always_inline)) {
      const auto candidate = plane[position];
      const bool nan = Order::is_nan(candidate);
      const bool wins = (Order::key(candidate) > best) | nan;
      best = wins ? Order::settle(Order::key(candidate), nan) : best;
      offset = wins ? tap : offset;
      value = wins ? candidate : value;
    });
  }
};

// The same for several windows side by side, in loops that compilers vectorise. Taps are as wide as the
// values where they fit.
template <typename Order, typename Tap, int64_t kLanes>
struct PoolMaxima {
  using Raw = typename Order::Raw;
  using Key = typename Order::Key;
  static constexpr bool kKeyIsValue = std::is_same_v<Raw, Key>;

  Key best[kLanes];
  Raw value[kKeyIsValue ? 1 : kLanes];
  Tap offsets[kLanes];

  // `column` is the window of the first lane. In `plane`, lanes are `stride` elements apart and positions
  // `inner`.
  [[gnu::always_inline]] void scan(const Pool& pool, const PoolRow& row, const PoolWindow& column,
                                   const Raw* plane, int64_t inner, int64_t stride, int64_t lanes) {
    for (int64_t l = 0; l < lanes; ++l) {
      best[l] = Order::key(Order::lowest());
      offsets[l] = static_cast<Tap>(row.first_tap(column));
      if constexpr (!kKeyIsValue) value[l] = Order::lowest();
    }
    each_tap(pool, row, column, [&](int64_t number, int64_t position) __attribute__((always_inline)) {
      const Raw* in = plane + position * inner;
      const Tap tap = static_cast<Tap>(number);
      for (int64_t l = 0; l < lanes; ++l) {
        const Raw candidate = in[l * stride];
        const Key key = Order::key(candidate);
        const bool nan = Order::is_nan(candidate);
        const bool wins = (key > best[l]) | nan;
        best[l] = Order::choose(wins, Order::settle(key, nan), best[l]);
        offsets[l] = Order::choose(wins, tap, offsets[l]);
        if constexpr (!kKeyIsValue) value[l] = Order::choose(wins, candidate, value[l]);
      }
    });
  }

  const Raw* values() const {
    if constexpr (kKeyIsValue) {
      return best;
    } else {
      return value;
    }
  }
};

// How an offset is turned into a position of the input.
enum class Follow {
  kPlain,   // by the table; one channel, regular windows
  kTable,   // by the table
  kDivide,  // by division: windows of more than 256 positions, or some without a tap inside the input
};

inline Follow follow_offsets(const Pool& pool) {
  if (pool.positions() > 256 || pool.has_empty_window()) return Follow::kDivide;
  return pool.inner == 1 && !pool.width().adaptive ? Follow::kPlain : Follow::kTable;
}

// For windows of at most 256 positions: the distance from a window's first tap to the tap that an offset
// stands for.
struct PoolTable {
  struct Column {
    int64_t start = 0, taps = 0;
  };
  // By how many lines, and how many taps per line, a window has fewer than the largest one; then by offset.
  std::array<std::array<std::array<int64_t, 256>, 2>, 2> ways{};
  std::vector<Column> columns;

  PoolTable(const Pool& pool, Follow follow) {
    if (follow == Follow::kDivide) return;
    const PoolDim& height = pool.height();
    const PoolDim& width = pool.width();
    for (int64_t fewer_lines = 0; fewer_lines < 2; ++fewer_lines) {
      for (int64_t fewer_taps = 0; fewer_taps < 2; ++fewer_taps) {
        int64_t* way = ways[fewer_lines][fewer_taps].data();
        for (int64_t d = 0; d < pool.depth().kernel; ++d) {
          for (int64_t h = 0; h < height.kernel - fewer_lines; ++h) {
            for (int64_t w = 0; w < width.kernel - fewer_taps; ++w) {
              *way++ = (d * pool.depth().dilation * height.in + h * height.dilation) * width.in +
                       w * width.dilation;
            }
          }
        }
      }
    }
    if (follow == Follow::kPlain) return;
    for (int64_t w = 0; w < width.out; ++w) columns.push_back({width.start(w), width.taps(w)});
  }
};

// Calls visit(element, position, place, inside) for the maxima of one row, channels [c0, c1): `position` is
// the flat index in the plane, `place` the index in (plane, inner), `inside` whether the position lies in the
// input.
template <Follow kFollow, typename Offset, typename Visit>
inline void each_maximum(const Pool& pool, const PoolTable& table, int64_t number, int64_t c0, int64_t c1,
                         const Offset* offsets, Visit visit) {
  const PoolRow row(pool, number);
  const PoolDim& width = pool.width();
  const int64_t line = (row.depth.start * pool.height().in + row.height.start) * width.in;
  const auto& ways = table.ways[kFollow == Follow::kDivide ? 0 : pool.height().kernel - row.height.taps];
  int64_t first = number * width.out * pool.inner;
  if constexpr (kFollow == Follow::kPlain) {
    for (int64_t w = 0; w < width.out; ++w, ++first) {
      const int64_t position = line + w * width.stride - width.padding + ways[0][offsets[first]];
      visit(first, position, position, true);
    }
  } else if constexpr (kFollow == Follow::kTable) {
    for (const PoolTable::Column& column : table.columns) {
      const int64_t* way = ways[width.kernel - column.taps].data();
      for (int64_t c = c0; c < c1; ++c) {
        const int64_t position = line + column.start + way[offsets[first + c]];
        visit(first + c, position, position * pool.inner + c, true);
      }
      first += pool.inner;
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
        const int64_t position = (z * pool.height().in + y) * width.in + x;
        visit(first + c, position, position * pool.inner + c, inside);
      }
    }
  }
}

}  // namespace patchconv
