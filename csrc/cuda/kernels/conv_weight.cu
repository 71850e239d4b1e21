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

// Where a block's sums of its first tap and output begin in the workspace: (part, tap, group, output,
// source).
PATCHCONV_DEVICE float* place_of(const ConvCall& call, const WeightPart& mine, float* workspace) {
  int64_t taps = mine.part;
  for (int d = 0; d < 3; ++d) taps = taps * call.lines[d].taps + mine.tap[d];
  return workspace + taps * elements_of_tap(call) +
         (int64_t{mine.group} * call.outputs + mine.output) * call.sources + mine.source;
}

// Adds two neighbouring sums, of which `left` exist, to those in the workspace (`first`: stores them there)
// and sets them to zero. `even`: both exist or none.
PATCHCONV_DEVICE void hand_on(float (&sums)[2], bool first, int left, bool even, float* to) {
  if (even && left > 0) {
    using Both = Vec<float, 2>;
    Both both{{sums[0], sums[1]}};
    if (!first) {
      const Both before = *reinterpret_cast<const Both*>(to);
      both = {{before.at[0] + both.at[0], before.at[1] + both.at[1]}};
    }
    *reinterpret_cast<Both*>(to) = both;
  } else if (!even) {
    for (int i = 0; i < 2; ++i) {
      if (i < left) to[i] = first ? sums[i] : to[i] + sums[i];
    }
  }
  sums[0] = sums[1] = 0;
}

// The same with all of a warp's sums.
template <typename T>
PATCHCONV_DEVICE void hand_on(WarpSums<T>& sums, const ConvCall& call, const WeightPart& mine, bool first,
                              float* workspace) {
  const int row = WarpSums<T>::output() + lane_index() / 4,
            column = WarpSums<T>::source() + lane_index() % 4 * 2;
  float* const begin = place_of(call, mine, workspace) + int64_t{row} * call.sources + column;
  const int64_t tap_step = elements_of_tap(call), row_step = int64_t{8} * call.sources;
  const bool even = call.sources % 2 == 0;
#pragma unroll
  for (int tap = 0; tap < kMostTaps; ++tap) {
    if (tap >= mine.taps) break;
    float* to = begin + tap * tap_step;
#pragma unroll
    for (int m = 0; m < 2 * WarpSums<T>::kRows; ++m) {
      const bool inside = row + m * 8 < mine.small_left;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        auto& found = *reinterpret_cast<float (*)[2]>(&sums.at[m / 2][tap][n][m % 2 * 2]);
        const int left = inside ? mine.big_left - column - n * 8 : 0;
        hand_on(found, first, left, even, to + n * 8);
      }
      to += row_step;
    }
  }
}

// Budget: 248 registers, 75456 bytes of shared memory, tensor cores.
template <typename T, bool kStrict, Loads kLoads>
__global__ void __launch_bounds__(WeightTile<T>::kThreads, WeightTile<T>::resident(kStrict, kLoads))
    conv_weight_kernel(ConvCall call, ConvWeightPlan plan, float* workspace) {
  using Tile = WeightTile<T>;
  WeightPart& mine = *shared_memory<WeightPart>();
  T* const tiles = reinterpret_cast<T*>(&mine + 1);
  const int rows = Tile::rows(plan);
  const auto tile = [&](int number) {
    return tiles +
           number % (kLoads == Loads::kElements ? Tile::kGatherStages : Tile::kStages) * rows * kTilePitch;
  };
  if (thread_index() == 0) describe(call, plan, mine);
  write_rows(call, plan, rows, Tile::kThreads, kLoads == Loads::kSums ? sizeof(T) : 0, mine);
  block_barrier();

  const bool idle = WarpSums<T>::source() >= mine.big_left;
  WarpSums<T> sums;
  bool first = true;
  const WarpPlaces<T> places(plan);
  const int taps = mine.taps, outputs = mine.small_left;
  const bool full = outputs >= kTileChannels;
  const auto use = [&](int number) {
    if (!idle) {
      if (kLoads == Loads::kSums && full && taps == kMostTaps) {
        multiply<kStrict, kMostTaps>(sums, tile(number), plan, places, taps, outputs);
      } else {
        multiply<kStrict, 0>(sums, tile(number), plan, places, taps, outputs);
      }
    }
    if ((number + 1) % kHandedOn<kStrict> == 0) {
      hand_on(sums, call, mine, first, workspace);
      first = false;
    }
  };

  Segment begin{};
  const int count = static_cast<int>(segments_of(call, plan, mine, begin));
  TileLoader<T, kLoads> loader(call, plan, mine, begin);
  if constexpr (kLoads != Loads::kElements) {
    const bool masked =
        kLoads == Loads::kPieces && (call.target.bits != nullptr || call.source.bits != nullptr);
    const auto segment = [&](int number) -> Segment& { return mine.segments[number % Tile::kStages]; };
    const auto fetch = [&](int number) {
      if (number < count) {
        loader.copy(tile(number));
        if (masked && thread_index() == 0) segment(number + 1) = loader.next();
      }
      commit_copies();
    };
    uint8_t marks[Tile::kSmallPieces];
    if (masked && count > 0) loader.load_marks(begin, marks);
    if (masked && thread_index() == 0) segment(0) = begin;
    loader.begin_copies();
    for (int number = 0; number < Tile::kStages - 1; ++number) fetch(number);
    if (masked) block_barrier();
    for (int number = 0; number < count; ++number) {
      wait_for_copies<Tile::kStages - 2>();
      if (masked) loader.drop_masked(segment(number), marks, tile(number));
      block_barrier();
      if (masked && number + 1 < count) loader.load_marks(segment(number + 1), marks);
      fetch(number + Tile::kStages - 1);
      use(number);
    }
    wait_for_copies<0>();
  } else {
    typename Tile::Piece held[Tile::kMostPieces];
    for (int number = -1; number < count; ++number) {
      const bool more = number + 1 < count;
      if (more) loader.load(held);
      if (number >= 0) use(number);
      if (more) loader.store(held, tile(number + 1));
      block_barrier();
    }
  }
  hand_on(sums, call, mine, first, workspace);
}

constexpr int kSumThreads = 256;

// Where in the weight an element of the workspace belongs.
template <typename Index>
PATCHCONV_DEVICE int64_t offset_of(const ConvCall& call, Index rest) {
  const auto next = [&](int count, int64_t stride) {
    const Index number = rest % static_cast<Index>(count);
    rest /= static_cast<Index>(count);
    return static_cast<int64_t>(number) * stride;
  };
  const ConvWeight& weight = call.weight;
  int64_t offset = next(call.sources, weight.source);
  offset += next(call.outputs, weight.output);
  offset += next(call.groups, weight.group);
  for (int d = 2; d >= 0; --d) offset += next(static_cast<int>(call.lines[d].taps), weight.tap[d]);
  return offset;
}

// Budget: 40 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    conv_weight_sum_kernel(ConvCall call, int parts, int64_t elements, const float* workspace) {
  const int64_t element = block_x() * kSumThreads + thread_index();
  if (element >= elements) return;
  double sum = 0;
  for (int part = 0; part < parts; ++part) sum += workspace[part * elements + element];
  const int64_t offset = elements <= INT32_MAX ? offset_of(call, static_cast<uint32_t>(element))
                                               : offset_of(call, static_cast<uint64_t>(element));
  static_cast<T*>(const_cast<void*>(call.weight.data))[offset] = from_float<T>(static_cast<float>(sum));
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
void plan_runs(const ConvLine& line, int element_bytes, ConvWeightPlan& plan) {
  const int64_t columns = int64_t{1} << plan.columns_log2;
  int64_t length[kMostTaps] = {};
  int run_of[kMostTaps] = {}, begin[kMostTaps] = {};
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
    begin[tap] = static_cast<int>(later);
  }
  for (int run = 0; run < plan.runs; ++run) {
    plan.run_begin[run] = plan.run_columns;
    plan.run_columns += static_cast<int>(length[run]);
    const int64_t last = plan.run_first[run] + (length[run] - 1) * line.step;
    plan.reach = std::max(plan.reach, static_cast<int>(last));
  }
  for (int tap = 0; tap < plan.taps; ++tap) {
    plan.tap_bytes[tap] = (begin[tap] + plan.run_begin[run_of[tap]]) * kTilePitch * element_bytes;
  }
}

// Whether pieces of 16 bytes can be copied as they are stored.
bool in_pieces(const ConvTensor& tensor, int channels, int groups, int size) {
  const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
  return tensor.channel == 1 && aligned_to_pieces(tensor.data) && whole(tensor.image) &&
         whole(tensor.place[0]) && whole(tensor.place[1]) && whole(tensor.place[2]) &&
         (groups == 1 || whole(channels));
}

Loads loads_of(const ConvCall& call, const ConvWeightPlan& plan, int size) {
  if (!in_pieces(call.target, call.outputs, call.groups, size) ||
      !in_pieces(call.source, call.sources, call.groups, size)) {
    return Loads::kElements;
  }
  // From a segment's first place to another there are so many lines and columns. The bytes need 31 bits.
  const auto narrow = [&](const ConvTensor& tensor, int64_t lines, int64_t columns) {
    const int64_t elements =
        std::max<int64_t>(lines, 1) * tensor.place[1] + std::max<int64_t>(columns, 1) * tensor.place[2];
    return tensor.place[1] >= 0 && tensor.place[2] >= 0 && elements * size < int64_t{1} << 31;
  };
  const int64_t lines = (kSegmentPlaces >> plan.columns_log2) - 1;
  const bool whole = call.outputs * size % 16 == 0 && call.sources * size % 16 == 0;
  const bool sums = whole && call.mode == PaddingMode::kZeros && call.target.bits == nullptr &&
                    call.source.bits == nullptr && narrow(call.target, lines, kSegmentPlaces) &&
                    narrow(call.source, lines * call.lines[1].step, plan.reach);
  return sums ? Loads::kSums : Loads::kPieces;
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
  plan_runs(x, type == Type::kFloat ? 4 : 2, plan);

  // Two waves of blocks, none with fewer than 16 segments.
  const int resident = type == Type::kFloat ? WeightTile<float>::resident(strict, Loads::kSums)
                                            : WeightTile<Half>::resident(strict, Loads::kSums);
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
    const Loads loads = loads_of(call, plan, size);
    const auto kernel = [&](auto is_strict) {
      constexpr bool kStrict = decltype(is_strict)::value;
      if (loads == Loads::kElements) return conv_weight_kernel<T, kStrict, Loads::kElements>;
      return loads == Loads::kSums ? conv_weight_kernel<T, kStrict, Loads::kSums>
                                   : conv_weight_kernel<T, kStrict, Loads::kPieces>;
    };
    auto chosen = kernel(std::false_type());
    if constexpr (sizeof(T) == 4) {
      if (strict) chosen = kernel(std::true_type());
    }
    launch(chosen, {tiles_of(call, plan) * plan.parts}, WeightTile<T>::kThreads,
           WeightTile<T>::shared_bytes(plan, loads), stream, call, plan, workspace);
    const int64_t elements = elements_of(call);
    launch(conv_weight_sum_kernel<T>, {divided_up(elements, kSumThreads)}, kSumThreads, 0, stream, call,
           plan.parts, elements, workspace);
  });
}

}  // namespace patchconv::kernels
