// The tiles that the weight's gradient multiplies: channels of both grids at the positions of a segment, in
// shared memory, one row of channels per position or column. Rows come in pieces of 16 bytes, by asynchronous
// copies if channels are contiguous and aligned, else element by element through registers.
#pragma once

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kTileChannels = 64;
constexpr int kSegmentPlaces = 32;
constexpr int kMostTaps = 3;
constexpr int kTilePitch = kTileChannels + 8;  // so that consecutive rows lie in different banks
// Rows of a segment: first those of the small grid, then those of the big one.
constexpr int kMostRows = kSegmentPlaces * (1 + kMostTaps);

// What a row of a tile holds: the column is relative to the segment's first, in its own grid.
struct TileRow {
  int line, column;
};

// What a block computes: which channels of its group, and how many taps of a row. In shared memory, since
// registers are few.
struct WeightPart {
  int64_t part;
  int group, output, source;
  int tap[3];
  int taps;
  int begin[3], end[3];      // positions where the taps read more than zeros
  int origin[3];             // coordinate that the first tap reads at the first position
  int64_t small, big;        // offset of the first channel
  int small_left, big_left;  // channels from there on
  TileRow rows[kMostRows];
};
static_assert(sizeof(WeightPart) % 16 == 0);

PATCHCONV_DEVICE void describe(const ConvCall& call, const ConvWeightPlan& plan, WeightPart& mine) {
  int64_t rest = block_x();
  const auto next = [&](int64_t count) {
    const int64_t number = rest % count;
    rest /= count;
    return static_cast<int>(number);
  };
  mine.tap[2] = next(plan.tap_groups) * plan.taps;
  mine.tap[1] = next(call.lines[1].taps);
  mine.tap[0] = next(call.lines[0].taps);
  mine.source = next((call.sources + kTileChannels - 1) / kTileChannels) * kTileChannels;
  mine.output = next((call.outputs + kTileChannels - 1) / kTileChannels) * kTileChannels;
  mine.group = next(call.groups);
  mine.part = rest;
  mine.small = (int64_t{mine.group} * call.outputs + mine.output) * call.target.channel;
  mine.big = (int64_t{mine.group} * call.sources + mine.source) * call.source.channel;
  mine.small_left = call.outputs - mine.output;
  mine.big_left = call.sources - mine.source;
  const int left = call.lines[2].taps - mine.tap[2];
  mine.taps = left < plan.taps ? left : plan.taps;
  for (int d = 0; d < 3; ++d) {
    const ConvLine& line = call.lines[d];
    mine.origin[d] = static_cast<int>(line.coordinate(0, mine.tap[d]));
    mine.begin[d] = 0;
    mine.end[d] = static_cast<int>(line.count);
    if (call.mode != PaddingMode::kZeros) continue;
    const int step = static_cast<int>(line.step);
    const int before = -static_cast<int>(line.coordinate(0, mine.tap[d] + (d == 2 ? mine.taps - 1 : 0)));
    const int inside = static_cast<int>(line.source) - mine.origin[d];
    if (before > 0) mine.begin[d] = (before + step - 1) / step;
    if (inside < line.count * line.step) mine.end[d] = inside > 0 ? (inside + step - 1) / step : 0;
  }
}

// 32 positions of the small grid, from a row and column on.
struct Segment {
  int64_t image;
  int depth, row, column;

  // Whether it is in another plane than before.
  PATCHCONV_DEVICE bool advance(const WeightPart& mine, int columns_log2) {
    column += 1 << columns_log2;
    if (column < mine.end[2]) return false;
    column = mine.begin[2];
    row += kSegmentPlaces >> columns_log2;
    if (row < mine.end[1]) return false;
    row = mine.begin[1];
    if (++depth < mine.end[0]) return true;
    depth = mine.begin[0];
    ++image;
    return true;
  }
};

// The segments of a block's part: how many, and the first.
PATCHCONV_DEVICE int64_t segments_of(const ConvCall& call, const ConvWeightPlan& plan, const WeightPart& mine,
                                     Segment& first) {
  const int sizes[3] = {1, kSegmentPlaces >> plan.columns_log2, 1 << plan.columns_log2};
  int64_t counts[3], all = call.images;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const int places = mine.end[d] - mine.begin[d];
    counts[d] = places > 0 ? (places + sizes[d] - 1) / sizes[d] : 0;
    all *= counts[d];
  }
  if (all == 0) return 0;
  int64_t index = all * mine.part / plan.parts;
  const int64_t count = all * (mine.part + 1) / plan.parts - index;
  const auto next = [&](int d) {
    const int64_t number = index % counts[d];
    index /= counts[d];
    return mine.begin[d] + static_cast<int>(number) * sizes[d];
  };
  first.column = next(2);
  first.row = next(1);
  first.depth = next(0);
  first.image = index;
  return count;
}

// Sizes of tiles and of each thread's share, by type.
template <typename T>
struct WeightTile {
  static constexpr int kCount = 16 / sizeof(T);
  static constexpr int kPieces = kTileChannels / kCount;  // per row
  static constexpr int kThreads = sizeof(T) == 4 ? 256 : 128;
  static constexpr int kMostPieces = kMostRows * kPieces / kThreads;  // per thread
  static constexpr int kSmallPieces = kSegmentPlaces * kPieces / kThreads;
  static constexpr int kStages = sizeof(T) == 4 ? 2 : 4;
  static constexpr int kGatherStages = 2;
  using Piece = Vec<T, kCount>;

  // Blocks per multiprocessor that the registers allow.
  static constexpr int resident(bool strict, bool async) {
    if (sizeof(T) == 4) return strict ? 1 : 2;
    return async ? 3 : 2;
  }
  static int shared_bytes(const ConvWeightPlan& plan, bool async) {
    const int stages = async ? kStages : kGatherStages;
    return static_cast<int>(sizeof(WeightPart) +
                            stages * rows(plan) * kTilePitch * static_cast<int>(sizeof(T)));
  }
  static constexpr PATCHCONV_DEVICE int rows(const ConvWeightPlan& plan) {
    return kSegmentPlaces + (kSegmentPlaces >> plan.columns_log2) * plan.run_columns;
  }
};

// Writes to `to` what each row of a block's tiles holds.
PATCHCONV_DEVICE void write_rows(const ConvWeightPlan& plan, int64_t step, int rows, int threads,
                                 TileRow* to) {
  for (int row = thread_index(); row < rows; row += threads) {
    if (row < kSegmentPlaces) {
      to[row] = {row >> plan.columns_log2, row & ((1 << plan.columns_log2) - 1)};
      continue;
    }
    const int line = (row - kSegmentPlaces) / plan.run_columns;
    const int number = row - kSegmentPlaces - line * plan.run_columns;
    int first = 0;
#pragma unroll
    for (int run = 0; run < kMostTaps; ++run) {
      if (run < plan.runs && number >= plan.run_begin[run]) {
        first = plan.run_first[run] + (number - plan.run_begin[run]) * static_cast<int>(step);
      }
    }
    to[row] = {line, first};
  }
}

// Loads segments into tiles.
template <typename T>
class TileLoader {
  using Tile = WeightTile<T>;
  using Piece = typename Tile::Piece;

 public:
  PATCHCONV_DEVICE TileLoader(const ConvCall& call, const WeightPart& mine, int count)
      : call_(call), mine_(mine), count_(count), linear_(is_linear(call)) {}

  // Where this thread's pieces of a plane of both grids begin.
  struct Plane {
    const T *small, *big;
    int small_filled, big_filled;  // bytes of a piece that exist
  };

  PATCHCONV_DEVICE Plane plane(const Segment& at) const {
    const ConvTensor &small = call_.target, &big = call_.source;
    const ConvLine& z = call_.lines[0];
    const int iz = source_at(z, mine_.origin[0] + at.depth * static_cast<int>(z.step));
    const Source first = source(small, mine_.small + at.image * small.image + at.depth * small.place[0],
                                copied_piece(), mine_.small_left);
    const Source other = source(big, mine_.big + at.image * big.image + iz * big.place[0], copied_piece(),
                                iz >= 0 ? mine_.big_left : 0);
    return {first.data + first.offset, other.data + other.offset, first.filled * kBytes,
            other.filled * kBytes};
  }

  // Starts the copies of a segment in this plane.
  PATCHCONV_DEVICE void copy(const Segment& at, const Plane& plane, T* to) const {
    if (linear_) return copy_linear(at, plane, to);
    for (int i = 0; copied_row(i) < count_; ++i) {
      const Source from = source(at, copied_row(i), copied_piece());
      copy_async(piece_at(to, copied_row(i), copied_piece()), from.data + (from.filled > 0 ? from.offset : 0),
                 from.filled * static_cast<int>(sizeof(T)));
    }
  }

  // Loads the bits of the small grid's pieces that this thread copies, while other segments are multiplied.
  PATCHCONV_DEVICE void load_marks(const Segment& at, uint8_t (&marks)[Tile::kSmallPieces]) const {
#pragma unroll
    for (int i = 0; i < Tile::kSmallPieces; ++i) {
      const Source from = source(at, copied_row(i), copied_piece());
      marks[i] = from.bits != nullptr && from.filled > 0 ? from.bits[from.offset / 8] : 0xff;
    }
  }

  // Zeros the elements whose bit is 0, in what this thread copied.
  PATCHCONV_DEVICE void drop_masked(const Segment& at, const uint8_t (&marks)[Tile::kSmallPieces],
                                    T* to) const {
#pragma unroll
    for (int i = 0; i < Tile::kSmallPieces; ++i) {
      drop(source(at, copied_row(i), copied_piece()), marks[i], piece_at(to, copied_row(i), copied_piece()));
    }
    if (call_.source.bits == nullptr) return;
    for (int i = Tile::kSmallPieces; copied_row(i) < count_; ++i) {
      const Source from = source(at, copied_row(i), copied_piece());
      if (from.filled > 0) {
        drop(from, from.bits[from.offset / 8], piece_at(to, copied_row(i), copied_piece()));
      }
    }
  }

  // Loads this thread's pieces of a segment element by element.
  PATCHCONV_DEVICE void load(const Segment& at, Piece (&held)[Tile::kMostPieces]) const {
#pragma unroll
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      const int index = i * Tile::kThreads + thread_index();
      if (index >= count_ * Tile::kPieces) break;
      const int piece = index / count_;
      const Source from = source(at, index - piece * count_, piece);
#pragma unroll
      for (int c = 0; c < Tile::kCount; ++c) {
        const int64_t offset = from.offset + c * from.channel;
        T value{};
        if (c < from.filled) {
          value = from.data[offset];
          if (from.bits != nullptr && !bit_at(from.bits, offset)) value = T{};
        }
        held[i].at[c] = value;
      }
    }
  }

  PATCHCONV_DEVICE void store(const Piece (&held)[Tile::kMostPieces], T* to) const {
#pragma unroll
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      const int index = i * Tile::kThreads + thread_index();
      if (index >= count_ * Tile::kPieces) break;
      const int piece = index / count_;
      *piece_at(to, index - piece * count_, piece) = held[i];
    }
  }

 private:
  struct Source {
    const T* data;
    const uint8_t* bits;
    int64_t offset, channel;
    int filled;  // elements that exist
  };

  static constexpr int kBytes = sizeof(T);
  static constexpr int kRowsAtOnce = Tile::kThreads / Tile::kPieces;  // that all threads copy

  // The row, and the piece in it, of the i-th piece that this thread copies.
  PATCHCONV_DEVICE static int copied_row(int i) { return thread_index() / Tile::kPieces + i * kRowsAtOnce; }
  PATCHCONV_DEVICE static int copied_piece() { return thread_index() % Tile::kPieces; }
  PATCHCONV_DEVICE static Piece* piece_at(T* tile, int row, int piece) {
    return reinterpret_cast<Piece*>(tile + row * kTilePitch + piece * Tile::kCount);
  }

  // Whether the bytes from a place to another are a sum of multiples, of numbers of 32 bits, of lines and
  // columns.
  PATCHCONV_DEVICE static bool is_linear(const ConvCall& call) {
    const auto narrow = [](int64_t stride) { return stride * kBytes == static_cast<int>(stride * kBytes); };
    return call.mode == PaddingMode::kZeros && narrow(call.target.place[1]) && narrow(call.target.place[2]) &&
           narrow(call.source.place[1]) && narrow(call.source.place[2]);
  }

  // So many lines and columns from there. What is there is not read if it is outside.
  PATCHCONV_DEVICE static const T* moved(const T* from, const ConvTensor& tensor, int lines, int columns) {
    const int line = static_cast<int>(tensor.place[1]) * kBytes,
              column = static_cast<int>(tensor.place[2]) * kBytes;
    const uint64_t bytes = reinterpret_cast<uint64_t>(from) + static_cast<uint64_t>(int64_t{lines} * line) +
                           static_cast<uint64_t>(int64_t{columns} * column);
    return reinterpret_cast<const T*>(bytes);
  }

  PATCHCONV_DEVICE void copy_linear(const Segment& at, const Plane& plane, T* to) const {
    const ConvLine &y = call_.lines[1], &x = call_.lines[2];
    const int lines = static_cast<int>(y.count) - at.row, columns = static_cast<int>(x.count) - at.column;
    const TileRow* place = mine_.rows + copied_row(0);
    to += copied_row(0) * kTilePitch + copied_piece() * Tile::kCount;
    const T* const small = moved(plane.small, call_.target, at.row, at.column);
#pragma unroll
    for (int i = 0; i < Tile::kSmallPieces; ++i) {
      const TileRow row = place[i * kRowsAtOnce];
      copy_async(to + i * kRowsAtOnce * kTilePitch, moved(small, call_.target, row.line, row.column),
                 row.line < lines && row.column < columns ? plane.small_filled : 0);
    }
    const int step = static_cast<int>(y.step);
    const int top = mine_.origin[1] + at.row * step;
    const int left = mine_.origin[2] + at.column * static_cast<int>(x.step);
    const T* const big = moved(plane.big, call_.source, top, left);
    const auto height = static_cast<uint32_t>(y.source), width = static_cast<uint32_t>(x.source);
    const int right = static_cast<int>(x.last()) - left;
    for (int i = Tile::kSmallPieces; copied_row(i) < count_; ++i) {
      const TileRow row = place[i * kRowsAtOnce];
      const int line = row.line * step;
      const bool inside = row.line < lines && row.column <= right &&
                          static_cast<uint32_t>(top + line) < height &&
                          static_cast<uint32_t>(left + row.column) < width;
      copy_async(to + i * kRowsAtOnce * kTilePitch, moved(big, call_.source, line, row.column),
                 inside ? plane.big_filled : 0);
    }
  }

  // `marks`: the byte that holds the first element's bit.
  PATCHCONV_DEVICE static void drop(const Source& from, int marks, Piece* to) {
    Piece values = *to;
#pragma unroll
    for (int i = 0; i < Tile::kCount; ++i) {
      if ((marks >> (from.offset % 8 + i) & 1) == 0) values.at[i] = T{};
    }
    *to = values;
  }

  PATCHCONV_DEVICE static Source source(const ConvTensor& tensor, int64_t offset, int piece, int left) {
    left -= piece * Tile::kCount;
    if (left > Tile::kCount) left = Tile::kCount;
    return {static_cast<const T*>(tensor.data), tensor.bits, offset + piece * Tile::kCount * tensor.channel,
            tensor.channel, left < 0 ? 0 : left};
  }

  // Where a piece of a row comes from.
  PATCHCONV_DEVICE Source source(const Segment& at, int row, int piece) const {
    const TileRow place = mine_.rows[row];
    const ConvLine &z = call_.lines[0], &y = call_.lines[1], &x = call_.lines[2];
    const int p = at.row + place.line;
    if (row < kSegmentPlaces) {
      const ConvTensor& small = call_.target;
      const int q = at.column + place.column;
      const int64_t offset = mine_.small + at.image * small.image + at.depth * small.place[0] +
                             p * small.place[1] + q * small.place[2];
      return source(small, offset, piece, p < y.count && q < x.count ? mine_.small_left : 0);
    }
    const ConvTensor& big = call_.source;
    const int column = mine_.origin[2] + at.column * static_cast<int>(x.step) + place.column;
    const int iz = source_at(z, mine_.origin[0] + at.depth * static_cast<int>(z.step));
    const int iy = p < y.count ? source_at(y, mine_.origin[1] + p * static_cast<int>(y.step)) : -1;
    const int ix = column <= x.last() ? source_at(x, column) : -1;
    const int64_t offset =
        mine_.big + at.image * big.image + iz * big.place[0] + iy * big.place[1] + ix * big.place[2];
    return source(big, offset, piece, iz >= 0 && iy >= 0 && ix >= 0 ? mine_.big_left : 0);
  }

  PATCHCONV_DEVICE int source_at(const ConvLine& line, int i) const {
    return source_index(call_.mode, i, static_cast<int>(line.source));
  }

  const ConvCall& call_;
  const WeightPart& mine_;
  int count_;  // rows of a segment
  bool linear_;
};

}  // namespace patchconv::kernels
