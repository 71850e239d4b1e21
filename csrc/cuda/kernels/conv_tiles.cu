// Convolutions by tensor cores over halo tiles. A block computes 256 positions of the result for 64 or 128
// outputs. For every chunk of 64 bytes of channels it holds the part of the source that those positions need,
// with its halo, in shared memory and uses it for all taps: a tap is a shift of the rows that matrices are
// loaded from. Weights come tap by tap through a ring of stages, copied while earlier taps are computed.
// Sources whose channels are not contiguous are transposed on their way into shared memory. Nothing is
// allocated; the result is written once. Sums are float32: those of tensor cores, which truncate. Strict
// float32 takes three tf32 products per tap, whose sums are added up with rounding.
#include "cuda/kernels/conv_tiles.cuh"

#include <algorithm>

#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 255 registers, 101376 bytes of shared memory, tensor cores.
template <typename T, bool kStrict, bool kGather, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) conv_tiles_kernel(ConvCall call, Tiling tiling) {
  char* halos = shared_memory<char>();
  const int halo_bytes = tiling.plan.rows * tiling.plan.columns * kChunkBytes;
  char* weights = halos + tiling.plan.buffers * halo_bytes;
  const Work work = work_of<Shape>(call, tiling);
  const int warp = thread_index() / kWarp, lane = lane_index();
  const int down = warp % (kPlaces / Shape::kWarpPlaces), across = warp / (kPlaces / Shape::kWarpPlaces);

  // For each of its warp's matrices, the position of the row whose address this lane gives.
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
      block_barrier();  // all threads are done with the tile
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
      // Gathers the next tile, one share per tap: other blocks compute meanwhile.
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
void start(const ConvTilePlan& plan, const ConvCall& call, Stream stream) {
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
  for (const ConvLine& line : lines) {  // coordinates in a tile, and shifts, are 32-bit
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
      // Work: the number of tiles, times the positions that each computes and reads.
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

bool conv_tiles_grid_fits(Type type, bool strict, const ConvCall& call) {
  const int outputs = wide(strict && type == Type::kFloat, call.outputs) ? Wide::kOutputs : Narrow::kOutputs;
  return call.groups * round_up(call.outputs, outputs) <= kMostBlocksDown;
}

bool conv_reads_weight(Type type, const ConvCall& call) {
  const int piece = piece_of(type);
  const ConvWeight& w = call.weight;
  return w.source == 1 && aligned_to_pieces(w.data) && w.output % piece == 0 && w.tap[0] % piece == 0 &&
         w.tap[1] % piece == 0 && w.tap[2] % piece == 0 && (call.groups == 1 || w.group % piece == 0);
}

bool conv_writes_bits(const ConvCall& call, bool depthwise) {
  const ConvTensor& target = call.target;
  const int channels = call.groups * call.outputs;
  const ConvLine& x = call.lines[2];
  if (target.channel == 1) return channels % 8 == 0 && (depthwise || call.outputs % 8 == 0);
  return target.place[2] == 1 && x.out_step == 1 && x.out_first % 8 == 0 && x.count % 8 == 0 &&
         target.place[1] % 8 == 0;
}

void launch_conv_tiles(Type type, bool strict, const ConvTilePlan& plan, const ConvCall& call,
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
