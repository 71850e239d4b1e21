// What a block of the halo kernel (conv_tiles.cu) does, step by step: which part of the result it computes,
// the copies of the source and of the weights, and the products of one tap.
#pragma once

#include "cuda/kernels/conv_halo.cuh"
#include "cuda/kernels/conv_store.cuh"

namespace patchconv::kernels {

constexpr int kPlaces = 256;  // per tile
constexpr int kStages = 4;    // of weights

// How warps share a tile: each computes kWarpPlaces places for 64 outputs.
template <int kDown, int kAcross>
struct Warps {
  static constexpr int kThreads = kDown * kAcross * kWarp;
  static constexpr int kWarpPlaces = kPlaces / kDown;
  static constexpr int kOutputs = kAcross * kStageOutputs;
  static constexpr int kMatrices = kWarpPlaces / 16;
  static constexpr int kStageOfWeights = kOutputs * kChunkBytes;
};

struct Tiling {
  ConvTilePlan plan;
  int64_t down, across;  // tiles
  uint32_t per_column;   // 2^32 / plan.columns, rounded up
  int tap_groups;        // groups of rows of taps
  int chunks;            // of channels
  int output_tiles;      // of a group
  bool channels_last;    // pieces of the source can be copied as they are
};

// A step of the sum: one tap for one chunk.
struct Step {
  int slice = 0, tap_group = 0, chunk = 0, r = 0, s = 0;
};

PATCHCONV_DEVICE int rows_of(const ConvCall& call, const Tiling& tiling, const Step& step) {
  const int rest = call.lines[1].taps - step.tap_group * tiling.plan.tap_rows;
  return rest < tiling.plan.tap_rows ? rest : tiling.plan.tap_rows;
}

PATCHCONV_DEVICE void next_tile(const Tiling& tiling, Step& step) {
  step.r = step.s = 0;
  if (++step.chunk < tiling.chunks) return;
  step.chunk = 0;
  if (++step.tap_group < tiling.tap_groups) return;
  step.tap_group = 0;
  ++step.slice;
}

PATCHCONV_DEVICE void next_tap(const ConvCall& call, const Tiling& tiling, Step& step) {
  if (++step.s < call.lines[2].taps) return;
  step.s = 0;
  if (++step.r < rows_of(call, tiling, step)) return;
  next_tile(tiling, step);
}

// What a block computes: a tile of one image and slice, and some outputs of one group.
struct Work {
  int64_t image;
  int64_t slice;
  int row, column;    // the tile's first place, among the outputs of the lines
  int group, output;  // the first output in its group
};

template <typename Shape>
PATCHCONV_DEVICE Work work_of(const ConvCall& call, const Tiling& tiling) {
  Work work;
  int64_t rest = block_x();
  const int columns = 1 << tiling.plan.columns_log2;
  work.column = static_cast<int>(rest % tiling.across) * columns;
  rest /= tiling.across;
  work.row = static_cast<int>(rest % tiling.down) * (kPlaces / columns);
  rest /= tiling.down;
  work.slice = rest % call.lines[0].count;
  work.image = rest / call.lines[0].count;
  work.group = block_y() / tiling.output_tiles;
  work.output = (block_y() - work.group * tiling.output_tiles) * Shape::kOutputs;
  return work;
}

template <typename T>
PATCHCONV_DEVICE Halo halo_of(const ConvCall& call, const Tiling& tiling, const Work& work,
                              const Step& step) {
  Halo halo;
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const int64_t iz = source_index(call.mode, z.coordinate(work.slice, step.slice), z.source);
  const int first = step.chunk * kChunkOf<T>;
  halo.channels = iz < 0 ? 0 : call.sources - first;
  halo.base = work.image * call.source.image + iz * call.source.place[0] +
              (int64_t{work.group} * call.sources + first) * call.source.channel;
  halo.row = static_cast<int>(y.coordinate(work.row, step.tap_group * tiling.plan.tap_rows));
  halo.column = static_cast<int>(x.coordinate(work.column, 0));
  return halo;
}

// Piece `number` of a halo tile.
struct PieceOfHalo {
  int place, piece;
  int64_t offset;  // in the source, negative for zeros
};

template <typename T>
PATCHCONV_DEVICE PieceOfHalo piece_of_halo(const ConvCall& call, const Tiling& tiling, const Halo& halo,
                                           int number) {
  const int place = number / kChunkPieces, piece = number % kChunkPieces;
  const int y = static_cast<int>(multiply_high(static_cast<uint32_t>(place), tiling.per_column));
  const int x = place - y * tiling.plan.columns;
  return {place, piece, halo_offset(call, halo, y * tiling.plan.row_step, x, piece * kPieceOf<T>)};
}

// Starts the copies of this thread's pieces of a halo tile; channels are contiguous.
template <typename T, typename Shape>
PATCHCONV_DEVICE void copy_halo(const ConvCall& call, const Tiling& tiling, const Halo& halo, char* tile) {
  const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
  const T* source = static_cast<const T*>(call.source.data);
  for (int number = thread_index(); number < pieces; number += Shape::kThreads) {
    const auto [place, piece, offset] = piece_of_halo<T>(call, tiling, halo, number);
    const int bytes = (halo.channels - piece * kPieceOf<T>)*static_cast<int>(sizeof(T));
    copy_async(tile + piece_at(place, piece), offset < 0 ? source : source + offset,
               offset < 0   ? 0
               : bytes < 16 ? bytes
                            : 16);
  }
}

// Applies the bits to the same pieces, once they have arrived.
template <typename T, typename Shape>
PATCHCONV_DEVICE void mask_halo(const ConvCall& call, const Tiling& tiling, const Halo& halo, char* tile) {
  const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
  for (int number = thread_index(); number < pieces; number += Shape::kThreads) {
    const auto [place, piece, offset] = piece_of_halo<T>(call, tiling, halo, number);
    if (offset >= 0) mask_piece<T>(tile + piece_at(place, piece), call.source.bits, offset);
  }
}

// Loads pieces [begin, end) of this thread's share of a halo tile, element by element.
template <typename T, typename Shape>
PATCHCONV_DEVICE void gather_halo(const ConvCall& call, const Tiling& tiling, const Halo& halo, char* tile,
                                  int begin, int end) {
  const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
  // Neighbouring threads take neighbouring positions, not pieces: such sources are contiguous along
  // positions.
  const int places = tiling.plan.rows * tiling.plan.columns;
  for (int mine = begin; mine < end; ++mine) {
    const int number = thread_index() + mine * Shape::kThreads;
    if (number >= pieces) return;
    const int piece = number / places, place = number - piece * places;
    const auto at = piece_of_halo<T>(call, tiling, halo, place * kChunkPieces + piece);
    store_whole(tile + piece_at(place, piece),
                gathered_piece<T>(call.source, at.offset, halo.channels - piece * kPieceOf<T>));
  }
}

template <typename T, typename Shape>
PATCHCONV_DEVICE void copy_weights(const ConvCall& call, const Tiling& tiling, const Work& work,
                                   const Step& step, char* stage) {
  const int first = step.chunk * kChunkOf<T>;
  const int64_t tap = call.lines[0].tap(step.slice) * call.weight.tap[0] +
                      call.lines[1].tap(step.tap_group * tiling.plan.tap_rows + step.r) * call.weight.tap[1] +
                      call.lines[2].tap(step.s) * call.weight.tap[2];
  const T* weight = static_cast<const T*>(call.weight.data) + work.group * call.weight.group + tap + first;
#pragma unroll
  for (int number = thread_index(); number < Shape::kOutputs * kChunkPieces; number += Shape::kThreads) {
    const int row = number / kChunkPieces, piece = number % kChunkPieces;
    const int output = work.output + row;
    const int bytes = (call.sources - first - piece * kPieceOf<T>)*static_cast<int>(sizeof(T));
    const bool there = output < call.outputs && bytes > 0;
    copy_async(stage + piece_at(row, piece),
               there ? weight + output * call.weight.output + piece * kPieceOf<T> : call.weight.data,
               there ? bytes < 16 ? bytes : 16 : 0);
  }
}

// Multiplies one tap: the rows of the halo tile at each lane's positions times the stage's weights.
template <typename T, bool kStrict, typename Shape>
PATCHCONV_DEVICE void multiply_tap(float (&sums)[Shape::kMatrices][8][4], const char* tile,
                                   const int (&places)[Shape::kMatrices], int shift, const char* weights) {
  const int lane = lane_index();
  const int a_piece = lane / 16, b_piece = lane / 8 % 2;
  const int b_row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int half = 0; half < kChunkPieces; half += 2) {
    uint32_t a[Shape::kMatrices][4], a_low[kStrict ? Shape::kMatrices : 1][4];
#pragma unroll
    for (int m = 0; m < Shape::kMatrices; ++m) {
      load_matrices<false>(a[m], tile + piece_at(places[m] + shift, half + a_piece));
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kStrict) {
            split_tf32(a[m][i], a[m][i], a_low[m][i]);
          } else {
            a[m][i] = to_tf32(bits_float(a[m][i]));
          }
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t both[4], both_low[4];
      load_matrices<false>(both, weights + piece_at(pair * 16 + b_row, half + b_piece));
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kStrict) {
            split_tf32(both[i], both[i], both_low[i]);
          } else {
            both[i] = to_tf32(bits_float(both[i]));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b[2] = {both[2 * n], both[2 * n + 1]};
#pragma unroll
        for (int m = 0; m < Shape::kMatrices; ++m) {
          if constexpr (kStrict) {
            const uint32_t b_low[2] = {both_low[2 * n], both_low[2 * n + 1]};
            multiply_matrices(T(), sums[m][2 * pair + n], a_low[m], b);
            multiply_matrices(T(), sums[m][2 * pair + n], a[m], b_low);
          }
          multiply_matrices(T(), sums[m][2 * pair + n], a[m], b);
        }
      }
    }
  }
}

// Offset of a tile's position in the result; negative if it lies outside.
PATCHCONV_DEVICE int64_t target_of(const ConvCall& call, const Tiling& tiling, const Work& work, int place) {
  const int64_t y = work.row + (place >> tiling.plan.columns_log2);
  const int64_t x = work.column + (place & ((1 << tiling.plan.columns_log2) - 1));
  if (y >= call.lines[1].count || x >= call.lines[2].count) return -1;
  return work.image * call.target.image + call.lines[0].target(work.slice) * call.target.place[0] +
         call.lines[1].target(y) * call.target.place[1] + call.lines[2].target(x) * call.target.place[2];
}

}  // namespace patchconv::kernels
