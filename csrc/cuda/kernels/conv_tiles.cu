// Convolutions by tensor cores over halo tiles. A block computes 256 places of the result for 64 or 128
// outputs. For every chunk of 64 bytes of channels it holds the part of the source that those places need,
// with its halo, in shared memory and uses it for all taps, each a shift of the rows that matrices are loaded
// from; weights come tap by tap through a ring of stages, copied while the taps before are computed. Sources
// whose channels do not lie together are turned on their way into shared memory. Nothing is allocated; the
// result is written once. Sums are made in float32: tensor cores', which cut off what does not fit, and for
// strict float32 three products of tf32 numbers a tap, whose sums are added up with rounding.
#include <algorithm>

#include "cuda/kernels/conv_halo.cuh"
#include "cuda/kernels/conv_store.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kPlaces = 256;  // of a tile
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
  int tap_groups;        // of rows
  int chunks;            // of channels
  int output_tiles;      // of a group
  bool channels_last;    // pieces of the source can be copied as they are
};

// A step of the sum: one tap for one chunk.
struct Step {
  int slice = 0, tap_group = 0, chunk = 0, r = 0, s = 0;
};

PATCHCONV_DEVICE int rows_of(const ConvSums& call, const Tiling& tiling, const Step& step) {
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

PATCHCONV_DEVICE void next_tap(const ConvSums& call, const Tiling& tiling, Step& step) {
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
PATCHCONV_DEVICE Work work_of(const ConvSums& call, const Tiling& tiling) {
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
PATCHCONV_DEVICE Halo halo_of(const ConvSums& call, const Tiling& tiling, const Work& work,
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
PATCHCONV_DEVICE PieceOfHalo piece_of_halo(const ConvSums& call, const Tiling& tiling, const Halo& halo,
                                           int number) {
  const int place = number / kChunkPieces, piece = number % kChunkPieces;
  const int y = static_cast<int>(multiply_high(static_cast<uint32_t>(place), tiling.per_column));
  const int x = place - y * tiling.plan.columns;
  return {place, piece, halo_offset(call, halo, y * tiling.plan.row_step, x, piece * kPieceOf<T>)};
}

// Starts copies of a thread's pieces: all of them, channels together.
template <typename T, typename Shape>
PATCHCONV_DEVICE void copy_halo(const ConvSums& call, const Tiling& tiling, const Halo& halo, char* tile) {
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

// The same pieces, once they are there, as their bits say.
template <typename T, typename Shape>
PATCHCONV_DEVICE void mask_halo(const ConvSums& call, const Tiling& tiling, const Halo& halo, char* tile) {
  const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
  for (int number = thread_index(); number < pieces; number += Shape::kThreads) {
    const auto [place, piece, offset] = piece_of_halo<T>(call, tiling, halo, number);
    if (offset >= 0) mask_piece<T>(tile + piece_at(place, piece), call.source.bits, offset);
  }
}

// A thread's pieces [begin, end) of a halo tile, element by element.
template <typename T, typename Shape>
PATCHCONV_DEVICE void gather_halo(const ConvSums& call, const Tiling& tiling, const Halo& halo, char* tile,
                                  int begin, int end) {
  const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
  // Neighbouring threads take neighbouring places, not pieces: that is how such sources lie.
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
PATCHCONV_DEVICE void copy_weights(const ConvSums& call, const Tiling& tiling, const Work& work,
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

// One tap: rows of the halo tile, from each lane's places on, times the stage's weights.
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

// Offset of a tile's place in the result, negative outside of it.
PATCHCONV_DEVICE int64_t target_of(const ConvSums& call, const Tiling& tiling, const Work& work, int place) {
  const int64_t y = work.row + (place >> tiling.plan.columns_log2);
  const int64_t x = work.column + (place & ((1 << tiling.plan.columns_log2) - 1));
  if (y >= call.lines[1].count || x >= call.lines[2].count) return -1;
  return work.image * call.target.image + call.lines[0].target(work.slice) * call.target.place[0] +
         call.lines[1].target(y) * call.target.place[1] + call.lines[2].target(x) * call.target.place[2];
}

// Budget: 255 registers, 101376 bytes of shared memory, tensor cores.
template <typename T, bool kStrict, bool kGather, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) conv_tiles_kernel(ConvSums call, Tiling tiling) {
  char* halos = shared_memory<char>();
  const int halo_bytes = tiling.plan.rows * tiling.plan.columns * kChunkBytes;
  char* weights = halos + tiling.plan.buffers * halo_bytes;
  const Work work = work_of<Shape>(call, tiling);
  const int warp = thread_index() / kWarp, lane = lane_index();
  const int down = warp % (kPlaces / Shape::kWarpPlaces), across = warp / (kPlaces / Shape::kWarpPlaces);

  // The places whose rows a lane names, of each of its warp's matrices.
  int places[Shape::kMatrices];
#pragma unroll
  for (int m = 0; m < Shape::kMatrices; ++m) {
    const int place = down * Shape::kWarpPlaces + m * 16 + lane % 8 + lane / 8 % 2 * 8;
    const int y = place >> tiling.plan.columns_log2, x = place & ((1 << tiling.plan.columns_log2) - 1);
    places[m] = y * tiling.plan.row_pitch * tiling.plan.columns + x * static_cast<int>(call.lines[2].step);
  }
  float sums[Shape::kMatrices][8][4] = {};

  const int slices = call.lines[0].taps * (call.lines[1].taps > 0 && call.lines[2].taps > 0);
  const bool ahead_of_time = tiling.plan.buffers > 1;
  Step now, ahead;
  char* tile = halos;
  if (slices > 0) {
    const Halo halo = halo_of<T>(call, tiling, work, now);
    if constexpr (kGather) {
      gather_halo<T, Shape>(call, tiling, halo, tile, 0, 1 << 30);
    } else {
      copy_halo<T, Shape>(call, tiling, halo, tile);
    }
    for (int i = 0; i < kStages - 1; ++i) {
      if (ahead.slice < slices) {
        copy_weights<T, Shape>(call, tiling, work, ahead, weights + i * Shape::kStageOfWeights);
        next_tap(call, tiling, ahead);
      }
      commit_copies();
    }
  }
  int taps_before = kStages;
  for (int number = 0; now.slice < slices; ++number) {
    const bool fresh = now.r == 0 && now.s == 0;
    const int taps = rows_of(call, tiling, now) * call.lines[2].taps;
    if (fresh && number > 0 && !ahead_of_time) {
      block_barrier();  // everybody has left the tile
      const Halo halo = halo_of<T>(call, tiling, work, now);
      if constexpr (kGather) {
        gather_halo<T, Shape>(call, tiling, halo, tile, 0, 1 << 30);
      } else {
        copy_halo<T, Shape>(call, tiling, halo, tile);
        commit_copies();
      }
    }
    // A tile's copies belong to the same group as those of a tap that comes kStages - 1 later.
    if (fresh && (!ahead_of_time || taps_before < kStages - 1)) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<kStages - 2>();
    }
    if constexpr (!kGather) {
      if (fresh && call.source.bits != nullptr) {
        mask_halo<T, Shape>(call, tiling, halo_of<T>(call, tiling, work, now), tile);
      }
    }
    block_barrier();

    if (ahead.slice < slices) {
      copy_weights<T, Shape>(call, tiling, work, ahead,
                             weights + (number + kStages - 1) % kStages * Shape::kStageOfWeights);
      next_tap(call, tiling, ahead);
    }
    Step next = now;
    next_tile(tiling, next);
    const bool more = ahead_of_time && next.slice < slices;
    char* other = tile == halos ? halos + halo_bytes : halos;
    if constexpr (!kGather) {
      if (more && fresh) copy_halo<T, Shape>(call, tiling, halo_of<T>(call, tiling, work, next), other);
    }
    commit_copies();

    const int row = now.r * static_cast<int>(call.lines[1].distance);
    const int shift = row * tiling.plan.columns + now.s * static_cast<int>(call.lines[2].distance);
    const char* stage =
        weights + number % kStages * Shape::kStageOfWeights + across * kStageOutputs * kChunkBytes;
    if constexpr (kStrict) {
      float part[Shape::kMatrices][8][4] = {};
      multiply_tap<T, true, Shape>(part, tile, places, shift, stage);
#pragma unroll
      for (int m = 0; m < Shape::kMatrices; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] = add(sums[m][n][i], part[m][n][i]);
        }
      }
    } else {
      multiply_tap<T, false, Shape>(sums, tile, places, shift, stage);
    }

    if constexpr (kGather) {
      // The next tile, a share of it a tap: other blocks compute meanwhile.
      if (more) {
        const int pieces = tiling.plan.rows * tiling.plan.columns * kChunkPieces;
        const int each = (pieces + Shape::kThreads - 1) / Shape::kThreads;
        const int share = (each + taps - 1) / taps, begin = (now.r * call.lines[2].taps + now.s) * share;
        gather_halo<T, Shape>(call, tiling, halo_of<T>(call, tiling, work, next), other, begin,
                              begin + share);
      }
    }
    const int slice = now.slice, tap_group = now.tap_group, chunk = now.chunk;
    next_tap(call, tiling, now);
    if (now.slice != slice || now.tap_group != tap_group || now.chunk != chunk) {
      taps_before = taps;
      if (ahead_of_time) tile = other;
    }
  }

  wait_for_copies<0>();
  block_barrier();
  float* stage = shared_memory<float>() + warp * kStagePlaces * kStagePitch;
#pragma unroll
  for (int round = 0; round < Shape::kMatrices / 2; ++round) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) stage_sums(stage, m * 16, n * 8, sums[2 * round + m][n]);
    }
    warp_barrier();
    const int first = down * Shape::kWarpPlaces + round * kStagePlaces;
    store_stage<T>(call, stage, work.group, work.output + across * kStageOutputs,
                   [&](int i) { return target_of(call, tiling, work, first + i); });
    warp_barrier();
  }
}

using Wide = Warps<4, 2>;
using Narrow = Warps<4, 1>;
using Strict = Warps<8, 1>;

bool wide(bool strict, int outputs) { return !strict && outputs > kStageOutputs; }

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T, bool kStrict, typename Shape>
void start(const ConvTilePlan& plan, const ConvSums& call, Stream stream) {
  const int64_t columns = int64_t{1} << plan.columns_log2;
  Tiling tiling;
  tiling.plan = plan;
  tiling.down = round_up(call.lines[1].count, kPlaces / columns);
  tiling.across = round_up(call.lines[2].count, columns);
  tiling.per_column = static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(plan.columns) + 1);
  tiling.tap_groups = static_cast<int>(round_up(call.lines[1].taps, plan.tap_rows));
  tiling.chunks = static_cast<int>(round_up(call.sources, kChunkOf<T>));
  tiling.output_tiles = static_cast<int>(round_up(call.outputs, Shape::kOutputs));
  const Grid grid{call.images * call.lines[0].count * tiling.down * tiling.across,
                  call.groups * tiling.output_tiles};
  const ConvTensor& source = call.source;
  const bool together = source.channel == 1 && aligned_to_pieces(source.data) &&
                        source.image % kPieceOf<T> == 0 && source.place[0] % kPieceOf<T> == 0 &&
                        source.place[1] % kPieceOf<T> == 0 && source.place[2] % kPieceOf<T> == 0 &&
                        (call.groups == 1 || call.sources % kPieceOf<T> == 0);
  launch(together ? conv_tiles_kernel<T, kStrict, false, Shape> : conv_tiles_kernel<T, kStrict, true, Shape>,
         grid, Shape::kThreads, plan.shared_bytes, stream, call, tiling);
}

int piece_of(Type type) { return type == Type::kFloat ? 4 : 8; }

}  // namespace

ConvTilePlan plan_conv_tiles(Type type, bool strict, const ConvLine (&lines)[3], int outputs,
                             int shared_limit) {
  ConvTilePlan best;
  if (type == Type::kDouble) return best;
  const ConvLine &y = lines[1], &x = lines[2];
  for (const ConvLine& line : lines) {  // coordinates in a tile, and shifts, are of 32 bits
    if (line.source >= 1 << 30 || line.count >= 1 << 30 || line.last() >= 1 << 30) return best;
    if (line.step >= 1 << 15 || line.distance >= 1 << 15 || line.first <= -(1 << 30)) return best;
  }
  strict = strict && type == Type::kFloat;
  const bool is_wide = wide(strict, outputs);
  const int weights = kStages * (is_wide ? Wide::kStageOfWeights : Narrow::kStageOfWeights);
  const int warps = is_wide || strict ? 8 : 4;
  double least = 0;
  for (int log2 = 5; log2 >= 3; --log2) {
    const int64_t columns = 1 << log2, rows = kPlaces / columns;
    const int64_t wide_enough = (columns - 1) * x.step + (std::max(x.taps, 1) - 1) * x.distance + 1;
    for (int tap_rows = std::max(y.taps, 1); tap_rows >= 1;
         tap_rows = tap_rows > 1 ? (tap_rows + 1) / 2 : 0) {
      ConvTilePlan plan;
      plan.columns_log2 = log2;
      plan.tap_rows = tap_rows;
      plan.columns = static_cast<int>(wide_enough);
      plan.row_step = tap_rows == 1 ? static_cast<int>(y.step) : 1;
      plan.row_pitch = tap_rows == 1 ? 1 : static_cast<int>(y.step);
      const int64_t high_enough =
          tap_rows == 1 ? rows : (rows - 1) * y.step + (tap_rows - 1) * y.distance + 1;
      plan.rows = static_cast<int>(high_enough);
      const int64_t halo = high_enough * wide_enough * kChunkBytes;
      for (const int buffers : {2, 1}) {
        if (buffers * halo + weights > shared_limit) continue;
        plan.buffers = buffers;
        plan.shared_bytes =
            static_cast<int>(std::max<int64_t>(buffers * halo + weights, warps * kStageBytes));
        break;
      }
      if (plan.buffers == 0 || plan.shared_bytes > shared_limit) continue;
      // Work: tiles that cover the result, and for each the places read, against those computed.
      const double tiles = static_cast<double>(round_up(y.count, rows) * round_up(x.count, columns));
      const double reads =
          static_cast<double>(round_up(std::max(y.taps, 1), tap_rows) * high_enough * wide_enough);
      const double work =
          tiles * (kPlaces * std::max(y.taps * x.taps, 1) + reads * (plan.buffers == 1 ? 2 : 1));
      if (best.buffers == 0 || work < least) {
        best = plan;
        least = work;
      }
    }
  }
  return best;
}

bool conv_tiles_grid_fits(Type type, bool strict, const ConvSums& call) {
  const int outputs = wide(strict && type == Type::kFloat, call.outputs) ? Wide::kOutputs : Narrow::kOutputs;
  return call.groups * round_up(call.outputs, outputs) <= kMostBlocksDown;
}

bool conv_reads_weight(Type type, const ConvSums& call) {
  const int piece = piece_of(type);
  const ConvWeight& w = call.weight;
  return w.source == 1 && aligned_to_pieces(w.data) && w.output % piece == 0 && w.tap[0] % piece == 0 &&
         w.tap[1] % piece == 0 && w.tap[2] % piece == 0 && (call.groups == 1 || w.group % piece == 0);
}

bool conv_writes_bits(const ConvSums& call, bool depthwise) {
  const ConvTensor& target = call.target;
  const int channels = call.groups * call.outputs;
  const ConvLine& x = call.lines[2];
  if (target.channel == 1) return channels % 8 == 0 && (depthwise || call.outputs % 8 == 0);
  return target.place[2] == 1 && x.out_step == 1 && x.out_first % 8 == 0 && x.count % 8 == 0 &&
         target.place[1] % 8 == 0;
}

void launch_conv_tiles(Type type, bool strict, const ConvTilePlan& plan, const ConvSums& call,
                       Stream stream) {
  if (plan.buffers == 0) throw LaunchError("a convolution whose tile does not fit into shared memory");
  if (type == Type::kFloat && strict) return start<float, true, Strict>(plan, call, stream);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (wide(strict && type == Type::kFloat, call.outputs)) return start<T, false, Wide>(plan, call, stream);
    start<T, false, Narrow>(plan, call, stream);
  });
}

}  // namespace patchconv::kernels
