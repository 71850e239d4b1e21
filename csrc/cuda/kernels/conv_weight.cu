// The weight's gradient by tensor cores: for each tap the product of two matrices, channels of the small grid
// by channels of the big one, over all images and positions. Each block multiplies a part of the positions
// into its part of the workspace; a second kernel adds the parts up in order. Tensor cores truncate, so sums
// are short: float32 over 4096 positions (if strict, over 16 and then 1024); float32 over those of a part;
// float64 over parts, rounded once. Nothing is allocated.
#include <algorithm>

#include "cuda/kernels/conv_weight.cuh"
#include "cuda/kernels/conv_weight_products.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// Segments that are summed before the sums go to the workspace.
template <bool kStrict>
constexpr int kHandedOn = (kStrict ? 1024 : 4096) / kSegmentPlaces;

constexpr int64_t elements_of_tap(const ConvCall& call) {
  return int64_t{call.groups} * call.outputs * call.sources;
}

// Where a block's sums of a tap and an output begin in the workspace: (part, tap, group, output, source).
PATCHCONV_DEVICE int64_t place_of(const ConvCall& call, const WeightPart& mine, int tap, int output) {
  int64_t taps = mine.part;
  for (int d = 0; d < 3; ++d) taps = taps * call.lines[d].taps + mine.tap[d];
  return (taps + tap) * elements_of_tap(call) + (int64_t{mine.group} * call.outputs + output) * call.sources;
}

// Adds the sums to the block's part of the workspace (`first`: stores them there) and sets them to zero.
template <typename T>
PATCHCONV_DEVICE void hand_on(WarpSums<T>& sums, const ConvCall& call, const WeightPart& mine, bool first,
                              float* workspace) {
#pragma unroll
  for (int m = 0; m < WarpSums<T>::kRows; ++m) {
#pragma unroll
    for (int tap = 0; tap < kMostTaps; ++tap) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int output = mine.output + WarpSums<T>::output() + m * 16 + half * 8 + lane_index() / 4;
        float* to = workspace + place_of(call, mine, tap, output);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int source = mine.source + WarpSums<T>::source() + i / 2 * 8 + lane_index() % 4 * 2 + i % 2;
          float& sum = sums.at[m][tap][i / 2][half * 2 + i % 2];
          if (tap < mine.taps && output < call.outputs && source < call.sources) {
            to[source] = first ? sum : to[source] + sum;
          }
          sum = 0;
        }
      }
    }
  }
}

// Budget: 248 registers, 74848 bytes of shared memory, tensor cores.
template <typename T, bool kStrict, bool kAsync>
__global__ void __launch_bounds__(WeightTile<T>::kThreads, WeightTile<T>::resident(kStrict, kAsync))
    conv_weight_kernel(ConvCall call, ConvWeightPlan plan, float* workspace) {
  using Tile = WeightTile<T>;
  WeightPart& mine = *shared_memory<WeightPart>();
  T* const tiles = reinterpret_cast<T*>(&mine + 1);
  const int rows = Tile::rows(plan);
  const auto tile = [&](int64_t number) {
    return tiles +
           static_cast<int>(number % (kAsync ? Tile::kStages : Tile::kGatherStages)) * rows * kTilePitch;
  };
  if (thread_index() == 0) describe(call, plan, mine);
  write_rows(plan, call.lines[2].step, rows, Tile::kThreads, mine.rows);
  block_barrier();
  const TileLoader<T> loader(call, mine, rows);

  const bool idle = WarpSums<T>::source() >= mine.big_left;
  WarpSums<T> sums;
  bool first = true;
  const auto use = [&](int64_t number) {
    if (!idle) multiply<kStrict>(sums, tile(number), plan, mine.taps, mine.small_left);
    if ((number + 1) % kHandedOn<kStrict> == 0) {
      hand_on(sums, call, mine, first, workspace);
      first = false;
    }
  };

  Segment ahead{};
  const int64_t count = segments_of(call, plan, mine, ahead);
  if constexpr (kAsync) {
    const bool masked = call.target.bits != nullptr || call.source.bits != nullptr;
    Segment now = ahead;
    auto plane = loader.plane(ahead);
    const auto fetch = [&](int64_t number) {
      if (number < count) {
        loader.copy(ahead, plane, tile(number));
        if (ahead.advance(mine, plan.columns_log2)) plane = loader.plane(ahead);
      }
      commit_copies();
    };
    uint8_t marks[Tile::kSmallPieces];
    if (masked && count > 0) loader.load_marks(now, marks);
    for (int number = 0; number < Tile::kStages - 1; ++number) fetch(number);
    for (int64_t number = 0; number < count; ++number) {
      wait_for_copies<Tile::kStages - 2>();
      if (masked) {
        loader.drop_masked(now, marks, tile(number));
        now.advance(mine, plan.columns_log2);
        if (number + 1 < count) loader.load_marks(now, marks);
      }
      block_barrier();
      fetch(number + Tile::kStages - 1);
      use(number);
    }
    wait_for_copies<0>();
  } else {
    typename Tile::Piece held[Tile::kMostPieces];
    for (int64_t number = -1; number < count; ++number) {
      const bool more = number + 1 < count;
      if (more) {
        loader.load(ahead, held);
        ahead.advance(mine, plan.columns_log2);
      }
      if (number >= 0) use(number);
      if (more) loader.store(held, tile(number + 1));
      block_barrier();
    }
  }
  hand_on(sums, call, mine, first, workspace);
}

constexpr int kSumThreads = 256;

// Budget: 40 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    conv_weight_sum_kernel(ConvCall call, int parts, int64_t elements, const float* workspace) {
  int64_t rest = block_x() * kSumThreads + thread_index();
  if (rest >= elements) return;
  double sum = 0;
  for (int part = 0; part < parts; ++part) sum += workspace[part * elements + rest];
  const auto next = [&](int64_t count, int64_t stride) {
    const int64_t number = rest % count;
    rest /= count;
    return number * stride;
  };
  const ConvWeight& weight = call.weight;
  int64_t offset = next(call.sources, weight.source);
  offset += next(call.outputs, weight.output);
  offset += next(call.groups, weight.group);
  for (int d = 2; d >= 0; --d) offset += next(call.lines[d].taps, weight.tap[d]);
  static_cast<T*>(const_cast<void*>(weight.data))[offset] = from_float<T>(static_cast<float>(sum));
}

int64_t elements_of(const ConvCall& call) {
  return elements_of_tap(call) * call.lines[0].taps * call.lines[1].taps * call.lines[2].taps;
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t tiles_of(const ConvCall& call, const ConvWeightPlan& plan) {
  return int64_t{call.groups} * divided_up(call.outputs, kTileChannels) *
         divided_up(call.sources, kTileChannels) * call.lines[0].taps * call.lines[1].taps * plan.tap_groups;
}

// The columns of the big grid that a row of positions reads. If the distance of two taps is a multiple of the
// step between positions, they read the same columns for different positions, and share a run unless that
// would leave a hole.
void plan_runs(const ConvLine& line, ConvWeightPlan& plan) {
  const int64_t columns = int64_t{1} << plan.columns_log2;
  int64_t length[kMostTaps] = {};
  int run_of[kMostTaps] = {};
  plan.runs = 0;
  for (int tap = 0; tap < plan.taps; ++tap) {
    const int64_t first = tap * line.distance;
    int run = 0;
    while (run < plan.runs && ((first - plan.run_first[run]) % line.step != 0 ||
                               (first - plan.run_first[run]) / line.step > length[run])) {
      ++run;
    }
    if (run == plan.runs) plan.run_first[plan.runs++] = static_cast<int>(first);
    const int64_t later = (first - plan.run_first[run]) / line.step;
    length[run] = later + columns;
    run_of[tap] = run;
    plan.tap_begin[tap] = static_cast<int>(later);
  }
  for (int run = 0; run < plan.runs; ++run) {
    plan.run_begin[run] = plan.run_columns;
    plan.run_columns += static_cast<int>(length[run]);
  }
  for (int tap = 0; tap < plan.taps; ++tap) plan.tap_begin[tap] += plan.run_begin[run_of[tap]];
}

// Whether pieces of 16 bytes can be copied as they are stored.
bool in_pieces(const ConvTensor& tensor, int channels, int groups, int size) {
  const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
  return tensor.channel == 1 && aligned_to_pieces(tensor.data) && whole(tensor.image) &&
         whole(tensor.place[0]) && whole(tensor.place[1]) && whole(tensor.place[2]) &&
         (groups == 1 || whole(channels));
}

}  // namespace

ConvWeightPlan plan_conv_weight(Type type, bool strict, const ConvCall& call, int multiprocessors,
                                int64_t workspace_limit) {
  constexpr int64_t kMost = 1 << 29;  // kernels count coordinates in 32 bits
  ConvWeightPlan plan;
  if (type == Type::kDouble) return plan;
  for (const ConvLine& line : call.lines) {
    const int64_t last = line.last() + kSegmentPlaces * line.step;
    if (line.source > kMost || last > kMost || line.first < -kMost || line.distance > kMost) return plan;
  }
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  int64_t least = 0;  // segments of a plane
  for (int log2 = 5; log2 >= 3; --log2) {
    const int64_t segments = divided_up(x.count, 1 << log2) * divided_up(y.count, kSegmentPlaces >> log2);
    if (log2 < 5 && segments >= least) continue;
    least = segments;
    plan.columns_log2 = log2;
  }
  plan.tap_groups = static_cast<int>(divided_up(x.taps, kMostTaps));
  plan.taps = static_cast<int>(divided_up(x.taps, plan.tap_groups));
  plan.tap_groups = static_cast<int>(divided_up(x.taps, plan.taps));
  plan_runs(x, plan);

  // Two waves of blocks, none with fewer than 16 segments.
  const int resident = type == Type::kFloat ? WeightTile<float>::resident(strict, true)
                                            : WeightTile<Half>::resident(strict, true);
  const int64_t elements = elements_of(call), tiles = tiles_of(call, plan);
  int64_t parts =
      std::min(int64_t{2} * resident * multiprocessors / tiles, call.images * z.count * least / 16);
  parts = std::max<int64_t>(std::min(parts, workspace_limit / 4 / elements), 1);
  parts = std::min(parts, kMostBlocks / tiles);
  plan.parts = static_cast<int>(parts);
  plan.workspace = parts * elements;
  return plan;
}

void launch_conv_weight(Type type, bool strict, const ConvWeightPlan& plan, const ConvCall& call,
                        float* workspace, Stream stream) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const int size = static_cast<int>(sizeof(T));
    const bool async = in_pieces(call.target, call.outputs, call.groups, size) &&
                       in_pieces(call.source, call.sources, call.groups, size);
    auto kernel = async ? conv_weight_kernel<T, false, true> : conv_weight_kernel<T, false, false>;
    if constexpr (sizeof(T) == 4) {
      if (strict) kernel = async ? conv_weight_kernel<T, true, true> : conv_weight_kernel<T, true, false>;
    }
    launch(kernel, {tiles_of(call, plan) * plan.parts}, WeightTile<T>::kThreads,
           WeightTile<T>::shared_bytes(plan, async), stream, call, plan, workspace);
    const int64_t elements = elements_of(call);
    launch(conv_weight_sum_kernel<T>, {divided_up(elements, kSumThreads)}, kSumThreads, 0, stream, call,
           plan.parts, elements, workspace);
  });
}

}  // namespace patchconv::kernels
