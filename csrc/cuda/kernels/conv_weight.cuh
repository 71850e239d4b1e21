// The tiles that the weight's gradient multiplies: channels of both grids at the positions of a segment, in
// shared memory, one row of channels per position or column. Rows come in pieces of 16 bytes, by asynchronous
// copies if channels are contiguous and aligned, else element by element through registers.
#pragma once

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kTileChannels = 64;
constexpr int kSegmentPlaces = 32;
constexpr int kMostTaps = 3;
constexpr int kMostStages = 4;
constexpr int kTilePitch = kTileChannels + 8;  // so that consecutive rows lie in different banks
// Rows of a segment: first those of the small grid, then those of the big one.
constexpr int kMostRows = kSegmentPlaces * (1 + kMostTaps);

// What a row of a tile holds: the column is relative to the segment's first, in its own grid. A row that
// holds nothing is at the line kNowhere.
struct TileRow {
  int line, column;
};
constexpr int kNowhere = 1 << 29;

// 32 positions of the small grid, from a row and column on.
struct Segment {
  int64_t image;
  int depth, row, column;
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
  // Of a row: bytes from the segment's first place, if they are a sum (Loads::kSums).
  uint32_t offsets[kMostRows];
  Segment segments[kMostStages];  // in the tiles of each stage
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

// How pieces come into a tile: element by element, by asynchronous copies, or by such copies where all
// addresses are sums (ConvWeightPlan) and no bits drop elements.
enum class Loads { kElements, kPieces, kSums };

// Sizes of tiles and of each thread's share, by type.
template <typename T>
struct WeightTile {
  static constexpr int kCount = 16 / sizeof(T);
  static constexpr int kPieces = kTileChannels / kCount;  // per row
  static constexpr int kThreads = sizeof(T) == 4 ? 256 : 128;
  static constexpr int kMostPieces = kMostRows * kPieces / kThreads;  // per thread
  static constexpr int kSmallPieces = kSegmentPlaces * kPieces / kThreads;
  static constexpr int kRowsAtOnce = kThreads / kPieces;  // that all threads copy
  static constexpr int kStages = sizeof(T) == 4 ? 2 : kMostStages;
  static constexpr int kGatherStages = 2;
  using Piece = Vec<T, kCount>;

  // Blocks per multiprocessor that the registers allow.
  static constexpr int resident(bool strict, Loads loads) {
    const int most = sizeof(T) == 4 ? (strict ? 1 : 2) : 3;
    return loads == Loads::kElements && most > 1 ? most - 1 : most;
  }
  static int shared_bytes(const ConvWeightPlan& plan, Loads loads) {
    const int stages = loads == Loads::kElements ? kGatherStages : kStages;
    return static_cast<int>(sizeof(WeightPart) +
                            stages * rows(plan) * kTilePitch * static_cast<int>(sizeof(T)));
  }
  // Of a tile: a multiple of those that are copied at once.
  static constexpr PATCHCONV_DEVICE int rows(const ConvWeightPlan& plan) {
    const int used = kSegmentPlaces + (kSegmentPlaces >> plan.columns_log2) * plan.run_columns;
    return (used + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
  }
};

// Writes what each row of a block's tiles holds.
PATCHCONV_DEVICE void write_rows(const ConvCall& call, const ConvWeightPlan& plan, int rows, int threads,
                                 int bytes, WeightPart& to) {
  const int step = static_cast<int>(call.lines[2].step);
  for (int row = thread_index(); row < rows; row += threads) {
    const bool small = row < kSegmentPlaces;
    const int number = row - kSegmentPlaces;
    TileRow found = {number / plan.run_columns, 0};
    const int in_line = number - found.line * plan.run_columns;
    if (small) {
      found = {row >> plan.columns_log2, row & ((1 << plan.columns_log2) - 1)};
    } else if (found.line >= kSegmentPlaces >> plan.columns_log2) {
      found = {kNowhere, 0};
    } else {
#pragma unroll
      for (int run = 0; run < kMostTaps; ++run) {
        if (run >= plan.runs || in_line < plan.run_begin[run]) continue;
        found.column = plan.run_first[run] + (in_line - plan.run_begin[run]) * step;
      }
    }
    to.rows[row] = found;
    const ConvTensor& grid = small ? call.target : call.source;
    const int64_t lines = small ? found.line : found.line * call.lines[1].step;
    const bool nowhere = found.line == kNowhere;
    to.offsets[row] =
        nowhere ? 0 : static_cast<uint32_t>((lines * grid.place[1] + found.column * grid.place[2]) * bytes);
  }
}

// Loads segments into tiles.
template <typename T, Loads kLoads>
class TileLoader {
  using Tile = WeightTile<T>;
  using Piece = typename Tile::Piece;

 public:
  PATCHCONV_DEVICE TileLoader(const ConvCall& call, const ConvWeightPlan& plan, const WeightPart& mine,
                              const Segment& first)
      : call_(call), plan_(plan), mine_(mine), count_(Tile::rows(plan)), at_(first) {}

  // Finds where this thread's pieces of the first segment are. Before the first copy.
  PATCHCONV_DEVICE void begin_copies() {
    if (kLoads != Loads::kSums) return;
    plane_ = plane();
    lines_ = pieces_of_lines();
    columns_ = pieces_of_columns();
  }

  // The segment that is loaded next.
  PATCHCONV_DEVICE const Segment& next() const { return at_; }

  // Starts the copies of the next segment.
  PATCHCONV_DEVICE void copy(T* to) {
    if constexpr (kLoads == Loads::kSums) {
      copy_sums(to);
      const int row = at_.row, column = at_.column;
      if (advance()) plane_ = plane();
      if (at_.row != row) lines_ = pieces_of_lines();
      if (at_.column != column) columns_ = pieces_of_columns();
    } else {
      for (int i = 0; copied_row(i) < count_; ++i) {
        const Source from = source(at_, copied_row(i), copied_piece());
        copy_async(piece_at(to, copied_row(i), copied_piece()),
                   from.data + (from.filled > 0 ? from.offset : 0),
                   from.filled * static_cast<int>(sizeof(T)));
      }
      advance();
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

  // Loads this thread's pieces of the next segment element by element.
  PATCHCONV_DEVICE void load(Piece (&held)[Tile::kMostPieces]) {
#pragma unroll
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      const int index = i * Tile::kThreads + thread_index();
      if (index >= count_ * Tile::kPieces) break;
      const int piece = index / count_;
      const Source from = source(at_, index - piece * count_, piece);
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
    advance();
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

  // Where this thread's pieces of a plane of both grids begin, and a bit for each that there is in it.
  struct Plane {
    const T *small, *big;
    uint32_t pieces;
  };

  PATCHCONV_DEVICE Plane plane() const {
    const ConvTensor &small = call_.target, &big = call_.source;
    const int iz =
        source_at(call_.lines[0], mine_.origin[0] + at_.depth * static_cast<int>(call_.lines[0].step));
    const int64_t channel = copied_piece() * Tile::kCount;
    const bool in_small = channel < mine_.small_left, in_big = iz >= 0 && channel < mine_.big_left;
    return {static_cast<const T*>(small.data) + mine_.small + at_.image * small.image +
                at_.depth * small.place[0] + channel,
            static_cast<const T*>(big.data) + mine_.big + at_.image * big.image + iz * big.place[0] + channel,
            (in_small ? kSmall : 0) | (in_big ? kAll & ~kSmall : 0)};
  }

  // Whether the next segment is in another plane now.
  PATCHCONV_DEVICE bool advance() {
    at_.column += 1 << plan_.columns_log2;
    if (at_.column < mine_.end[2]) return false;
    at_.column = mine_.begin[2];
    at_.row += kSegmentPlaces >> plan_.columns_log2;
    if (at_.row < mine_.end[1]) return false;
    at_.row = mine_.begin[1];
    if (++at_.depth < mine_.end[0]) return true;
    at_.depth = mine_.begin[0];
    ++at_.image;
    return true;
  }

  static constexpr int kBytes = sizeof(T);
  static constexpr int kRowsAtOnce = Tile::kRowsAtOnce;
  static constexpr uint32_t kAll = (1u << Tile::kMostPieces) - 1, kSmall = (1u << Tile::kSmallPieces) - 1;

  // The row, and the piece in it, of the i-th piece that this thread copies.
  PATCHCONV_DEVICE static int copied_row(int i) { return thread_index() / Tile::kPieces + i * kRowsAtOnce; }
  PATCHCONV_DEVICE static int copied_piece() { return thread_index() % Tile::kPieces; }
  PATCHCONV_DEVICE static Piece* piece_at(T* tile, int row, int piece) {
    return reinterpret_cast<Piece*>(tile + row * kTilePitch + piece * Tile::kCount);
  }

  // So many lines and columns from there. What is there is not read if it is outside.
  PATCHCONV_DEVICE static const T* moved(const T* from, const ConvTensor& tensor, int lines, int columns) {
    const int line = static_cast<int>(tensor.place[1]) * kBytes,
              column = static_cast<int>(tensor.place[2]) * kBytes;
    return moved(moved(from, int64_t{lines} * line), int64_t{columns} * column);
  }
  PATCHCONV_DEVICE static const T* moved(const T* from, int64_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<uint64_t>(from) + static_cast<uint64_t>(bytes));
  }

  // A bit for each piece that this thread copies: whether its line is in the images, or its column.
  PATCHCONV_DEVICE uint32_t pieces_of_lines() const {
    const ConvLine& y = call_.lines[1];
    const int lines = static_cast<int>(y.count) - at_.row, step = static_cast<int>(y.step);
    const int high = kSegmentPlaces >> plan_.columns_log2, top = mine_.origin[1] + at_.row * step;
    const int height = static_cast<int>(y.source);
    if (high <= lines && top >= 0 && top + (high - 1) * step < height) return kAll;
    uint32_t inside = 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      if (i * kRowsAtOnce >= count_) break;
      const int line = mine_.rows[copied_row(i)].line;
      if (line >= lines) continue;
      if (i < Tile::kSmallPieces ||
          static_cast<uint32_t>(top + line * step) < static_cast<uint32_t>(height)) {
        inside |= 1u << i;
      }
    }
    return inside;
  }
  PATCHCONV_DEVICE uint32_t pieces_of_columns() const {
    const ConvLine& x = call_.lines[2];
    const int columns = static_cast<int>(x.count) - at_.column;
    const int left = mine_.origin[2] + at_.column * static_cast<int>(x.step),
              width = static_cast<int>(x.source);
    if (1 << plan_.columns_log2 <= columns && left >= 0 && left + plan_.reach < width) return kAll;
    const int right = static_cast<int>(x.last()) - left;
    uint32_t inside = 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      if (i * kRowsAtOnce >= count_) break;
      const int column = mine_.rows[copied_row(i)].column;
      const bool there = i < Tile::kSmallPieces ? column < columns
                                                : column <= right && static_cast<uint32_t>(left + column) <
                                                                         static_cast<uint32_t>(width);
      if (there) inside |= 1u << i;
    }
    return inside;
  }

  PATCHCONV_DEVICE void copy_sums(T* to) const {
    const uint32_t inside = plane_.pieces & lines_ & columns_;
    const T* const small = moved(plane_.small, call_.target, at_.row, at_.column);
    const T* const big =
        moved(plane_.big, call_.source, mine_.origin[1] + at_.row * static_cast<int>(call_.lines[1].step),
              mine_.origin[2] + at_.column * static_cast<int>(call_.lines[2].step));
    const uint32_t* const offsets = mine_.offsets + copied_row(0);
    to += copied_row(0) * kTilePitch + copied_piece() * Tile::kCount;
#pragma unroll
    for (int i = 0; i < Tile::kMostPieces; ++i) {
      // Each row of a segment reads a column of the big grid at least.
      if (i >= 2 * Tile::kSmallPieces && i * kRowsAtOnce >= count_) break;
      copy_async_where(to + i * kRowsAtOnce * kTilePitch,
                       moved(i < Tile::kSmallPieces ? small : big, offsets[i * kRowsAtOnce]),
                       inside & 1u << i);
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
  const ConvWeightPlan& plan_;
  const WeightPart& mine_;
  int count_;  // rows of a tile
  // The next segment, and where this thread's pieces of it are.
  Segment at_;
  Plane plane_{};
  uint32_t lines_ = 0, columns_ = 0;  // a bit for each: in the images
};

}  // namespace patchconv::kernels
