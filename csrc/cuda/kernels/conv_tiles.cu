// Convolutions by tensor cores over halo tiles. A block computes 256 positions of the result for 64 or 128
// outputs, in up to 32 rows of a power of two columns; where images are small, rows go on in the next image.
// For every chunk of 64 bytes of channels it holds the part of the source that those positions need,
// with its halo, in shared memory and uses it for all taps: a tap is a shift of the rows that matrices are
// loaded from. Weights come tap by tap through a ring of stages, copied while earlier taps are computed.
// Sources whose channels are not contiguous are transposed on their way into shared memory. Nothing is
// allocated; the result is written once. Sums are float32: those of tensor cores, which truncate. Strict
// float32 takes three tf32 products per tap, whose sums are added up with rounding.
#include "cuda/kernels/conv_tile_copies.cuh"
#include "cuda/kernels/conv_tile_products.cuh"

#include <algorithm>

#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// The state of a block's sum. What comes next is copied, then waited for, then multiplied: each has its own
// place in the order of the sum.
template <typename T, bool kStrict, bool kGather, typename Shape>
struct Loop {
  static constexpr bool kRound = sizeof(T) == 4 && !kStrict;  // to tf32

  const ConvCall& call;
  const Tiling& tiling;
  const Work& work;
  SourceCopies<T, kGather, kRound, Shape> source = {};
  WeightCopies<T, Shape> weights = {};

  // Of the step that is multiplied.
  Part part = {};
  int tile = 0, from = 0;  // its halo tile, and the tap's first place in it
  int rows_left, columns_left;
  int steps_left;
  int stage, stage_before;  // its weights, and those of the step before

  PATCHCONV_DEVICE char* shared(int offset) const { return shared_memory<char>() + offset; }
  PATCHCONV_DEVICE int next_stage(int at) const {
    at += Shape::kStageOfWeights;
    return at == tiling.weights + kStages * Shape::kStageOfWeights ? tiling.weights : at;
  }

  PATCHCONV_DEVICE void begin_part() {
    rows_left = rows_of(call, tiling, part.tap_group);
    columns_left = call.lines[2].taps;
    from = tile;
  }

  // Copies the first tiles and the weights of the first steps, in a group for each step.
  PATCHCONV_DEVICE void begin() {
    steps_left = tiling.steps;
    stage = tiling.weights;
    stage_before = tiling.weights + (kStages - 1) * Shape::kStageOfWeights;
    source.begin(call, tiling, work);
    source.fill(call, tiling, 0);
    weights.begin(call, tiling, work);
    begin_part();
    const int buffers = tiling.plan.buffers;
    for (int i = 0, to = stage; i < kStages - 1; ++i, to = next_stage(to)) {
      if (i == 0 || i + 1 < buffers) {
        source.copy_all(call, tiling, work);
        source.next(call, tiling, work, i + 1 < buffers ? (i + 1) * tiling.halo_bytes : 0);
      }
      copy_weights(to);
      if (i == kStages - 2) source.copy_some(tiling.share, call, tiling, work);
      commit_copies();
    }
    wait_for_copies<kStages - 2>();
    finish();
    if constexpr (kStrict) weights.split(shared(stage));
    block_barrier();
  }

  PATCHCONV_DEVICE void copy_weights(int to) {
    weights.copy(tiling, shared(to));
    weights.next(call, tiling, work);
  }

  PATCHCONV_DEVICE void finish() {
    if constexpr (!kGather) finish_tile<T, kRound, Shape>(call, tiling, work, part, tile);
  }

  // Goes on to the next part.
  PATCHCONV_DEVICE void next_tile() {
    next_part(tiling, part);
    if (tiling.plan.buffers == 1 && steps_left > 0) {
      block_barrier();  // all threads have loaded what they need of the tile
      source.copy_all(call, tiling, work);
      commit_copies();
    }
    // The place of the tile before is free when all threads have passed the next barrier.
    source.next(call, tiling, work, tile);
    tile += tiling.halo_bytes;
    if (tile == tiling.weights) tile = 0;
    begin_part();
    if (tiling.late) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<kStages - 3>();
    }
    if (steps_left > 0) finish();
  }

  // Between the halves of a step: all of its places have been loaded, and the next step's weights are needed.
  PATCHCONV_DEVICE void next() {
    --steps_left;
    from += tiling.tap_across;
    if (--columns_left == 0) {
      columns_left = call.lines[2].taps;
      from += tiling.tap_down;
      if (--rows_left == 0) next_tile();
    }
    wait_for_copies<kStages - 3>();
    if constexpr (kStrict) weights.split(shared(next_stage(stage)));
    block_barrier();

    copy_weights(stage_before);  // of the step that is kStages - 1 ahead
    source.copy_some(tiling.share, call, tiling, work);
    commit_copies();
    stage_before = stage;
    stage = next_stage(stage);
  }
};

template <typename T, bool kStrict, bool kGather, typename Shape>
PATCHCONV_DEVICE void sum_up(const ConvCall& call, const Tiling& tiling, const Work& work,
                             Sums<Shape>& sums) {
  const int warp = thread_index() / kWarp;
  const int down = warp % (kPlaces / Shape::kWarpPlaces), across = warp / (kPlaces / Shape::kWarpPlaces);
  int rows[Shape::kMatrices];
  rows_of_places<Shape>(call, tiling, work, down * Shape::kWarpPlaces, rows);
  const int row = row_of_weights(across * kStageOutputs);

  Loop<T, kStrict, kGather, Shape> loop{call, tiling, work};
  loop.begin();
  Matrices<kStrict, Shape> matrices;
  int places[Shape::kMatrices];
#pragma unroll
  for (int m = 0; m < Shape::kMatrices; ++m) {
    places[m] = swizzled(rows[m] + loop.from);
    load_matrices<false>(matrices.places[0][m], loop.shared(places[m]));
  }
  matrices.load_weights(0, loop.shared(row + loop.stage));
  const auto multiply_step = [&](Sums<Shape>& to) {
    const char* next[Shape::kMatrices];
#pragma unroll
    for (int m = 0; m < Shape::kMatrices; ++m) next[m] = loop.shared(places[m] ^ kHalfBytes);
    const int of_weights = row + loop.stage;
    multiply_half<T, kStrict, 0, Shape>(to, matrices, loop.shared(of_weights), next,
                                        loop.shared(of_weights ^ kHalfBytes));
    loop.next();
#pragma unroll
    for (int m = 0; m < Shape::kMatrices; ++m) {
      places[m] = swizzled(rows[m] + loop.from);
      next[m] = loop.shared(places[m]);
    }
    multiply_half<T, kStrict, 1, Shape>(to, matrices, loop.shared(of_weights ^ kHalfBytes), next,
                                        loop.shared(row + loop.stage));
  };
  do {
    if constexpr (kStrict) {
      Sums<Shape> part = {};
      multiply_step(part);
#pragma unroll
      for (int m = 0; m < Shape::kMatrices; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] = add(sums[m][n][i], part[m][n][i]);
        }
      }
    } else {
      multiply_step(sums);
    }
  } while (loop.steps_left > 0);
}

// Writes a warp's sums, 32 places at a time.
template <typename T, typename Shape>
PATCHCONV_DEVICE void store(const ConvCall& call, const Tiling& tiling, const Work& work,
                            const Sums<Shape>& sums) {
  const int warp = thread_index() / kWarp;
  const int down = warp % (kPlaces / Shape::kWarpPlaces), across = warp / (kPlaces / Shape::kWarpPlaces);
  float* stage = shared_memory<float>() + warp * kStagePlaces * kStagePitch;
  const int output = work.output + across * kStageOutputs;
  const Finish finish = finish_of<T>(call, work.group, output);
#pragma unroll
  for (int round = 0; round < Shape::kMatrices / 2; ++round) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) stage_sums(stage, m * 16, n, sums[2 * round + m][n], finish);
    }
    warp_barrier();
    const int first = down * Shape::kWarpPlaces + round * kStagePlaces;
    store_stage<T>(call, stage, work.group, output, target_of(call, tiling, work, first + lane_index()));
    warp_barrier();
  }
}

// Budget: 232 registers, 101376 bytes of shared memory, tensor cores.
template <typename T, bool kStrict, bool kGather, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) conv_tiles_kernel(ConvCall call, Tiling tiling) {
  const Work work = work_of<Shape>(call, tiling);
  Sums<Shape> sums = {};
  if (tiling.steps > 0) sum_up<T, kStrict, kGather, Shape>(call, tiling, work, sums);
  wait_for_copies<0>();
  block_barrier();
  store<T, Shape>(call, tiling, work, sums);
}

// Of a tile's elements of one channel, where the last one lies from the first one on.
int64_t last_element(const ConvCall& call, int tile_images) {
  const ConvTensor& source = call.source;
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  const int64_t last =
      (tile_images - 1) * source.image + (y.source - 1) * source.place[1] + (x.source - 1) * source.place[2];
  return last;
}

// Whether pieces of the source can be copied as they are, and places of a slice counted in pieces.
template <typename T>
bool copies_pieces(const ConvCall& call, int tile_images) {
  const ConvTensor& source = call.source;
  return source.channel == 1 && aligned_to_pieces(source.data) && source.image % kPieceOf<T> == 0 &&
         source.place[0] % kPieceOf<T> == 0 && source.place[1] % kPieceOf<T> == 0 &&
         source.place[2] % kPieceOf<T> == 0 && call.sources % kPieceOf<T> == 0 &&
         last_element(call, tile_images) / kPieceOf<T> < int64_t{1} << 31;
}

// Whether the bits of 32 channels, from a multiple of 32 on, lie in one word.
bool has_words(const ConvCall& call) {
  const ConvTensor& source = call.source;
  return reinterpret_cast<uintptr_t>(source.bits) % 4 == 0 && source.image % 32 == 0 &&
         source.place[0] % 32 == 0 && source.place[1] % 32 == 0 && source.place[2] % 32 == 0 &&
         (call.groups == 1 || call.sources % 32 == 0);
}

template <typename T, typename Shape>
Tiling tiling_of(const ConvTilePlan& plan, const ConvCall& call, bool gather) {
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const int64_t columns = int64_t{1} << plan.columns_log2, bytes = sizeof(T);
  Tiling tiling;
  tiling.plan = plan;
  const bool over_images = plan.image_rows > 0;
  tiling.down = round_up(over_images ? call.images * y.count : y.count, kPlaces / columns);
  tiling.per_image = over_images ? inverse_of(y.count) : 0;
  tiling.per_halo = over_images ? inverse_of(plan.image_rows) : 0;
  tiling.across = round_up(x.count, columns);
  tiling.per_column = static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(plan.columns) + 1);
  tiling.tap_groups = static_cast<int>(round_up(y.taps, plan.tap_rows));
  tiling.chunks = static_cast<int>(round_up(call.sources, kChunkOf<T>));
  tiling.output_tiles = static_cast<int>(round_up(call.outputs, Shape::kOutputs));
  tiling.steps = z.taps * y.taps * x.taps * tiling.chunks;

  const int places = static_cast<int>(roomy(plan.rows, plan.columns));
  tiling.halo_bytes = places * kChunkBytes;
  tiling.weights = plan.buffers * tiling.halo_bytes;
  tiling.words = tiling.weights + kStages * Shape::kStageOfWeights;
  tiling.table = tiling.words + (plan.words ? plan.buffers * places * kWordBytes : 0);
  tiling.gather_table = gather && plan.table && last_element(call, plan.tile_images) < int64_t{1} << 31;
  const auto entry = [&](int64_t stride) { return static_cast<int>(gather ? stride : stride / kPieceOf<T>); };
  tiling.image_entry = entry(call.source.image);
  tiling.row_entry = entry(call.source.place[1]);
  tiling.column_entry = entry(call.source.place[2]);
  tiling.bits_in_words = plan.words && call.source.bits != nullptr && has_words(call);
  tiling.rounds = gather
                      ? static_cast<int>(round_up(plan.rows * plan.columns, Shape::kThreads)) * kChunkPieces
                      : places / Shape::kRoundPlaces;
  // The last tap of a tile is too late for copies of the next one, unless it is the only tap.
  const int fewest = fewest_taps(plan, y, x);
  tiling.share = static_cast<int>(round_up(tiling.rounds, std::max(fewest - 1, 1)));
  tiling.late = plan.buffers == 1 || (plan.buffers == 2 && fewest <= 1);

  tiling.tap_across = static_cast<int>(x.distance) * kChunkBytes;
  // With one row of taps at a time, rows need not fit the tile, and the kernel does not go down.
  tiling.tap_down = plan.tap_rows == 1 ? 0
                                       : static_cast<int>(y.distance) * plan.columns * kChunkBytes -
                                             x.taps * tiling.tap_across;
  tiling.weight_across = x.tap_step * call.weight.tap[2] * bytes;
  tiling.weight_down = y.tap_step * call.weight.tap[1] * bytes - x.taps * tiling.weight_across;
  tiling.weight_round = Shape::kRoundPlaces * call.weight.output * bytes;
  return tiling;
}

template <typename T, bool kStrict, typename Shape>
void start(const ConvTilePlan& plan, const ConvCall& call, Stream stream) {
  const int64_t image_tiles = plan.image_rows > 0 ? 1 : call.images;
  const bool gather = !plan.table || !copies_pieces<T>(call, plan.tile_images);
  const Tiling tiling = tiling_of<T, Shape>(plan, call, gather);
  const Grid grid{image_tiles * call.lines[0].count * tiling.down * tiling.across,
                  call.groups * tiling.output_tiles};
  launch(gather ? conv_tiles_kernel<T, kStrict, true, Shape> : conv_tiles_kernel<T, kStrict, false, Shape>,
         grid, Shape::kThreads, plan.shared_bytes, stream, call, tiling);
}

}  // namespace

void launch_conv_tiles(Type type, bool strict, const ConvTilePlan& whole, const ConvCall& call,
                       Stream stream) {
  if (whole.buffers == 0) throw LaunchError("a convolution whose tile does not fit into shared memory");
  const ConvTilePlan plan = plan_over_images(type, strict, whole, call);
  if (type == Type::kFloat && strict) return start<float, true, Strict>(plan, call, stream);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (is_wide(strict && type == Type::kFloat, call.outputs))
      return start<T, false, Wide>(plan, call, stream);
    start<T, false, Narrow>(plan, call, stream);
  });
}

}  // namespace patchconv::kernels
