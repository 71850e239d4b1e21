// What a block of the halo kernel (conv_tiles.cu) computes: how warps share its tile, which part of the
// result it is, and the order in which it adds up.
#pragma once

#include "cuda/kernels/conv_halo.cuh"
#include "cuda/kernels/conv_store.cuh"

namespace patchconv::kernels {

constexpr int kPlaces = 256;  // per tile
constexpr int kStages = 4;    // of weights

// How warps share a tile: each computes kWarpPlaces places for 64 outputs. If kSplit, weights are split into
// two numbers of tf32, of which the lower ones lie in a plane of their own.
template <int kDown, int kAcross, bool kSplit = false>
struct Warps {
  static constexpr int kThreads = kDown * kAcross * kWarp;
  static constexpr int kWarpPlaces = kPlaces / kDown;
  static constexpr int kOutputs = kAcross * kStageOutputs;
  static constexpr int kMatrices = kWarpPlaces / 16;
  static constexpr int kPlaneOfWeights = kOutputs * kChunkBytes;
  static constexpr int kStageOfWeights = (kSplit ? 2 : 1) * kPlaneOfWeights;
  // A round of copies is one piece by each thread.
  static constexpr int kRoundPlaces = kThreads / kChunkPieces;
  static constexpr int kWeightRounds = kOutputs / kRoundPlaces;
  static constexpr int kUsualRounds = 64 / kRoundPlaces;  // of a halo tile, per step
};

using Wide = Warps<4, 2>;
using Narrow = Warps<4, 1>;
using Strict = Warps<8, 1, true>;

static_assert(Wide::kRoundPlaces * kChunkBytes % kSwizzleBytes == 0, "halo tiles begin where swizzled() may");

inline bool is_wide(bool strict, int outputs) { return !strict && outputs > kStageOutputs; }

inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kWordBytes = 4;

// Places of a halo tile that it has room for: whole rounds of copies of any shape.
inline int64_t roomy(int64_t rows, int64_t columns) {
  return round_up(rows * columns, Wide::kRoundPlaces) * Wide::kRoundPlaces;
}

// The fewest taps that a halo tile serves.
inline int fewest_taps(const ConvTilePlan& plan, const ConvLine& y, const ConvLine& x) {
  const int rest = y.taps % plan.tap_rows;
  return (rest > 0 ? rest : plan.tap_rows) * x.taps;
}

// What is known of a launch before it starts. Distances are in bytes.
struct Tiling {
  ConvTilePlan plan;
  int64_t down, across;          // tiles
  uint32_t per_column;           // 2^32 / plan.columns, rounded up
  uint32_t per_image, per_halo;  // see quotient(): rows of an image, of outputs and of the halo tile
  int tap_groups;                // groups of rows of taps
  int chunks;                    // of channels
  int output_tiles;              // of a group
  int steps;                     // of the sum: a tap of a chunk each
  // In shared memory: halo tiles, from `weights` on weights, from `words` on a word of bits for each place of
  // a tile, and from `table` on a number for each place.
  int halo_bytes, weights, words, table;
  // What the table counts, in pieces or, if a tile is gathered, in elements, from an image, row or column of
  // the source to the next one.
  int image_entry, row_entry, column_entry;
  bool gather_table;         // a tile that is gathered has a table
  bool bits_in_words;        // the source has bits, and those of a place's chunk lie in one word
  int rounds;                // of copies that fill a halo tile
  int share;                 // of them per step: fills the next tile in time
  bool late;                 // the last share belongs to the last step before the tile is needed
  int tap_across, tap_down;  // in a halo tile, from a tap to the next one, and from a row's last one
  int64_t weight_across, weight_down;  // the same in the weight
  int64_t weight_round;                // between a thread's copies
};

PATCHCONV_DEVICE int rows_of(const ConvCall& call, const Tiling& tiling, int tap_group) {
  const int rest = call.lines[1].taps - tap_group * tiling.plan.tap_rows;
  return rest < tiling.plan.tap_rows ? rest : tiling.plan.tap_rows;
}

// A tile of the sum: the taps of a group of rows, for one chunk. Copies of tiles and of weights, and
// products, follow the same order at different times.
struct Part {
  int slice = 0, tap_group = 0, chunk = 0;
};

// Whether only the chunk is another one.
PATCHCONV_DEVICE bool next_part(const Tiling& tiling, Part& part) {
  if (++part.chunk < tiling.chunks) return true;
  part.chunk = 0;
  if (++part.tap_group < tiling.tap_groups) return false;
  part.tap_group = 0;
  ++part.slice;
  return false;
}

// What a block computes: a tile of one slice, and some outputs of one group. The tile is of one image, or of
// several ones whose rows are numbered one after the other.
struct Work {
  int64_t image;  // the first one
  int images;     // from there on, if not very many
  int64_t slice;
  int row,
      column;  // where the tile begins, among the outputs of the lines; row 0 if it is of several images,
  int first;   // and this is its first row from there on
  int group, output;  // the first output in its group
};

// n / d for a divisor that the launch knows, 0 if that gives 0 as the inverse. For n * d < 2^31.
inline uint32_t inverse_of(int64_t d) { return static_cast<uint32_t>((int64_t{1} << 31) / d + 1); }
PATCHCONV_DEVICE int quotient(int n, uint32_t inverse) {
  return static_cast<int>(multiply_high(static_cast<uint32_t>(n) << 1, inverse));
}

template <typename Shape>
PATCHCONV_DEVICE Work work_of(const ConvCall& call, const Tiling& tiling) {
  Work work;
  int64_t rest = block_x();
  const int columns = 1 << tiling.plan.columns_log2;
  work.column = static_cast<int>(rest % tiling.across) * columns;
  rest /= tiling.across;
  const int64_t row = rest % tiling.down * (kPlaces / columns);
  rest /= tiling.down;
  work.slice = rest % call.lines[0].count;
  if (tiling.plan.image_rows > 0) {
    work.image = row / call.lines[1].count;
    work.row = 0;
    work.first = static_cast<int>(row % call.lines[1].count);
  } else {
    work.image = rest / call.lines[0].count;
    work.row = static_cast<int>(row);
    work.first = 0;
  }
  const int64_t images = call.images - work.image;
  work.images = static_cast<int>(images < kPlaces ? images : kPlaces);
  work.group = block_y() / tiling.output_tiles;
  work.output = (block_y() - work.group * tiling.output_tiles) * Shape::kOutputs;
  return work;
}

// Where the halo tile of a part lies in the source.
template <typename T>
PATCHCONV_DEVICE Halo halo_of(const ConvCall& call, const Tiling& tiling, const Work& work,
                              const Part& part) {
  Halo halo;
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const int64_t iz = source_index(call.mode, z.coordinate(work.slice, part.slice), z.source);
  const int first = part.chunk * kChunkOf<T>;
  halo.channels = iz < 0 ? 0 : call.sources - first;
  halo.base = work.image * call.source.image + iz * call.source.place[0] +
              (int64_t{work.group} * call.sources + first) * call.source.channel;
  halo.row = static_cast<int>(y.coordinate(work.row, part.tap_group * tiling.plan.tap_rows));
  halo.column = static_cast<int>(x.coordinate(work.column, 0));
  return halo;
}

// Where a place of a halo tile lies: in which image from the tile's first one on, and where there in the
// source. Negative coordinates for zeros.
struct Spot {
  int image, y, x;
};

PATCHCONV_DEVICE Spot spot_of(const ConvCall& call, const Tiling& tiling, const Work& work, const Halo& halo,
                              int place) {
  const auto row = static_cast<int>(multiply_high(static_cast<uint32_t>(place), tiling.per_column));
  const int x = halo.column + place - row * tiling.plan.columns;
  const int from_first = work.first * tiling.plan.row_pitch + row;
  Spot spot;
  spot.image = quotient(from_first, tiling.per_halo);
  const int y = halo.row + (from_first - spot.image * tiling.plan.image_rows) * tiling.plan.row_step;
  const bool there = row < tiling.plan.rows && spot.image < work.images;
  spot.y = there ? source_of(call.mode, call.lines[1], y) : -1;
  spot.x = source_of(call.mode, call.lines[2], x);
  return spot;
}

// Offset of a channel there, counted from the halo's base; negative for zeros.
PATCHCONV_DEVICE int64_t spot_offset(const ConvCall& call, const Halo& halo, const Spot& spot, int channel) {
  if (spot.y < 0 || spot.x < 0 || channel >= halo.channels) return -1;
  return halo.base + spot.image * call.source.image + spot.y * call.source.place[1] +
         spot.x * call.source.place[2] + channel * call.source.channel;
}

// Offset of a tile's position in the result; negative if it lies outside.
PATCHCONV_DEVICE int64_t target_of(const ConvCall& call, const Tiling& tiling, const Work& work, int place) {
  const int row = work.first + (place >> tiling.plan.columns_log2), image = quotient(row, tiling.per_image);
  const int y = work.row + row - image * static_cast<int>(call.lines[1].count);
  const int x = work.column + (place & ((1 << tiling.plan.columns_log2) - 1));
  if (y >= call.lines[1].count || x >= call.lines[2].count || image >= work.images) return -1;
  return (work.image + image) * call.target.image + call.lines[0].target(work.slice) * call.target.place[0] +
         call.lines[1].target(y) * call.target.place[1] + call.lines[2].target(x) * call.target.place[2];
}

}  // namespace patchconv::kernels
