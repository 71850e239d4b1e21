// The weight's gradient of depthwise convolutions. A block sums products over a part of the positions, from
// tiles of both grids in shared memory, in float32. The parts are added up in float64, in a fixed order, and
// rounded once. The caller provides the workspace.
#include "cuda/kernels/conv_depthwise.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// A warp takes some taps below each other; its lanes take some channels and columns.
template <typename T, bool kTogether>
constexpr int kCount = kTogether ? kPiece<T> : 1;
constexpr int kTaps = 4;
constexpr int kWarpLog2 = log2_up(kWarp);
constexpr int kMostWarps = kDepthwiseThreads / kWarp;

constexpr int64_t kSharedWanted = 48 * 1024;  // so that several blocks fit on a multiprocessor
constexpr int64_t kShared = 99 * 1024;
constexpr int64_t kBlocksWanted = 512;
constexpr int64_t kMostTiles = 32;  // per part

struct Tile {
  HaloTile big, small;
  int columns_log2 = 0, rows_log2 = 0;  // of the small grid
  int tap_groups = 0;                   // in a column of taps
  int warps = 0;                        // of a block: as many groups of taps
  int slices = 0;                       // blocks for all taps of a plane
  int chunks = 0;                       // of channels
  int64_t tiles = 0, parts = 0;         // of all places
  int64_t shared_bytes = 0;

  constexpr int pieces_log2() const { return kWarpLog2 - columns_log2; }
};

int64_t taps_of(const ConvCall& call) {
  return int64_t{call.lines[0].taps} * call.lines[1].taps * call.lines[2].taps;
}

// The small grid as a line that is read.
PATCHCONV_DEVICE ConvLine grid_of(const ConvLine& line) {
  ConvLine grid;
  grid.source = grid.count = line.count;
  return grid;
}

// Budget: 112 registers, 101376 bytes of shared memory.
template <typename T, bool kTogether>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    conv_depthwise_weight_kernel(ConvCall call, Tile tile, float* workspace) {
  constexpr int kMine = kCount<T, kTogether>;
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const HaloTile &big = tile.big, &small = tile.small;
  const int channels = call.groups * call.outputs, threads = tile.warps * kWarp;

  auto rest = static_cast<uint32_t>(block_x());
  const auto next = [&](int64_t count) {
    const uint32_t number = rest % static_cast<uint32_t>(count);
    rest /= static_cast<uint32_t>(count);
    return static_cast<int>(number);
  };
  const int unit = next(tile.slices) * tile.warps + thread_index() / kWarp;
  const int t = next(z.taps), channel = next(tile.chunks) << big.channels_log2;
  const int64_t part = rest;
  const int s = unit / tile.tap_groups, tap_row = (unit - s * tile.tap_groups) * kTaps;

  const int lane = lane_index();
  const int mine = kTogether ? (lane & ((1 << tile.pieces_log2()) - 1)) * kMine : lane >> tile.columns_log2;
  const int column = kTogether ? lane >> tile.pieces_log2() : lane & ((1 << tile.columns_log2) - 1);

  T* const bigs = shared_memory<T>();
  T* const smalls = bigs + big.elements();
  const int big_column = kTogether ? big.channels() : 1, big_row = big.width * big_column;
  const int small_column = kTogether ? small.channels() : 1, small_row = small.width * small_column;
  const T* const big_corner = bigs + (kTogether ? mine : mine * big.rows.length * big_row) +
                              tap_row * big.rows.tap * big_row +
                              (column * static_cast<int>(x.step) + s * big.columns.tap) * big_column;
  const T* const small_corner =
      smalls + (kTogether ? mine : mine * small.rows.length * small_row) + column * small_column;

  float sums[kTaps][kMine] = {};
  for (int64_t number = part * tile.tiles / tile.parts; number < (part + 1) * tile.tiles / tile.parts;
       ++number) {
    rest = static_cast<uint32_t>(number);
    const int64_t p = int64_t{next(blocks_of(x.count, tile.columns_log2))} << tile.columns_log2;
    const int64_t q = int64_t{next(blocks_of(y.count, tile.rows_log2))} << tile.rows_log2;
    const int64_t plane = next(z.count), image = rest;
    const int64_t iz = source_index(call.mode, z.coordinate(plane, t), z.source);
    if (iz < 0) continue;
    const HaloPlace big_place{image * call.source.image + iz * call.source.place[0], y.coordinate(q, 0),
                              x.coordinate(p, 0)};
    const HaloPlace small_place{image * call.target.image + plane * call.target.place[0], q, p};
    block_barrier();  // the values of the last tile have been used
    load_tile<T, kTogether>(bigs, big, big_place, call.source, call.mode, y, x, channel, channels,
                            call.outputs, threads);
    load_tile<T, kTogether>(smalls, small, small_place, call.target, PaddingMode::kZeros, grid_of(y),
                            grid_of(x), channel, channels, 1, threads);
    commit_copies();
    wait_for_copies<0>();
    block_barrier();
    if (s >= x.taps || p + column >= x.count) continue;
    const int before = columns_before<T, kTogether>(big, big_place.column);
    const int rows = static_cast<int>(std::min(y.count - q, int64_t{1} << tile.rows_log2));
    sweep(sums, big_corner + before * big_column, big.rows.tap * big_row, static_cast<int>(y.step) * big_row,
          small_corner, small_row, rows);
  }

  // Adds up the columns, which a power of two of lanes holds.
  const int distance = kTogether ? 1 << tile.pieces_log2() : 1;
#pragma unroll
  for (int a = 0; a < kTaps; ++a) {
    const int r = tap_row + a;
    const int64_t tap = (int64_t{t} * y.taps + r) * x.taps + s;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      float sum = sums[a][i];
      for (int step = 0; step < tile.columns_log2; ++step) sum += shuffle_xor(sum, distance << step);
      const int64_t k = channel + mine + i;
      if (column != 0 || s >= x.taps || r >= y.taps || k >= channels) continue;
      workspace[(k * z.taps * y.taps * x.taps + tap) * tile.parts + part] = sum;
    }
  }
}

// Adds up the parts [channel][tap][part], one warp per channel and tap.
// Budget: 48 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kDepthwiseThreads)
    add_weight_parts_kernel(ConvCall call, int64_t parts, const float* workspace) {
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  const int64_t taps = int64_t{call.lines[0].taps} * y.taps * x.taps;
  const int64_t number = block_x() * kMostWarps + thread_index() / kWarp;
  const int64_t k = number / taps;
  if (k >= int64_t{call.groups} * call.outputs) return;
  double sum = 0;
  for (int64_t part = lane_index(); part < parts; part += kWarp) sum += workspace[number * parts + part];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
  if (lane_index() != 0) return;
  const int64_t group = k / call.outputs, tap = number - k * taps;
  const int64_t s = tap % x.taps, r = tap / x.taps % y.taps, t = tap / x.taps / y.taps;
  const int64_t offset = group * call.weight.group + (k - group * call.outputs) * call.weight.output +
                         t * call.weight.tap[0] + r * call.weight.tap[1] + s * call.weight.tap[2];
  static_cast<T*>(const_cast<void*>(call.weight.data))[offset] = from_float<T>(static_cast<float>(sum));
}

template <typename T, bool kTogether>
Tile plan(const ConvCall& call, bool big_whole, bool small_whole, int64_t limit) {
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const int channels = call.groups * call.outputs;
  Tile tile;
  tile.tap_groups = (y.taps + kTaps - 1) / kTaps;
  const int groups = tile.tap_groups * x.taps;
  tile.slices = (groups + kMostWarps - 1) / kMostWarps;
  tile.warps = (groups + tile.slices - 1) / tile.slices;
  const auto fill = [&] {
    const int channels_log2 = tile.pieces_log2() + log2_up(kCount<T, kTogether>);
    const int rows = 1 << tile.rows_log2, columns = 1 << tile.columns_log2;
    tile.big =
        halo_tile<T>(kTogether, channels_log2, y, x, rows, tile.tap_groups * kTaps, columns, big_whole);
    tile.small =
        halo_tile<T>(kTogether, channels_log2, ConvLine(), ConvLine(), rows, 1, columns, small_whole);
    tile.chunks = static_cast<int>(blocks_of(channels, channels_log2));
    tile.shared_bytes = (tile.big.elements() + tile.small.elements()) * static_cast<int64_t>(sizeof(T));
  };
  const int pieces = log2_up((channels + kCount<T, kTogether> - 1) / kCount<T, kTogether>);
  tile.columns_log2 = kTogether ? kWarpLog2 - std::min(2, pieces) : std::min(kWarpLog2, log2_up(x.count));
  tile.rows_log2 = std::min(kTogether ? 4 : 5, log2_up(y.count));
  fill();
  while (tile.shared_bytes > kSharedWanted && tile.pieces_log2() + tile.rows_log2 > 0) {
    tile.pieces_log2() > 0 ? ++tile.columns_log2 : --tile.rows_log2;
    fill();
  }
  tile.tiles =
      call.images * z.count * blocks_of(y.count, tile.rows_log2) * blocks_of(x.count, tile.columns_log2);
  const int64_t blocks = int64_t{tile.chunks} * tile.slices * z.taps;
  const int64_t enough =
      std::max((kBlocksWanted + blocks - 1) / blocks, (tile.tiles + kMostTiles - 1) / kMostTiles);
  const int64_t most = std::max<int64_t>(1, limit / (4 * channels * taps_of(call)));
  tile.parts = std::min({tile.tiles, enough, most});
  return tile;
}

// Calls use(T(), whether channels are contiguous).
template <typename Use>
void with_kernel(Type type, const ConvCall& call, Use use) {
  with_type(type, [&](auto t) {
    if (call.source.channel == 1 && call.target.channel == 1 && int64_t{call.groups} * call.outputs > 1) {
      return use(t, std::true_type());
    }
    use(t, std::false_type());
  });
}

}  // namespace

int64_t conv_depthwise_weight_workspace(Type type, const ConvCall& call, int64_t limit) {
  if (type == Type::kDouble || call.sources != 1) return -1;
  int64_t parts = 0;  // the most over all layouts, in pieces or not
  bool fits = true;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    for (const int whole : {0, 1, 2, 3}) {
      for (const Tile& tile : {plan<T, false>(call, whole & 1, whole & 2, limit),
                               plan<T, true>(call, whole & 1, whole & 2, limit)}) {
        fits = fits && tile.shared_bytes <= kShared;
        parts = std::max(parts, tile.parts);
      }
    }
  });
  return fits ? call.groups * call.outputs * taps_of(call) * parts : -1;
}

void launch_conv_depthwise_weight(Type type, const ConvCall& call, int64_t limit, float* workspace,
                                  Stream stream) {
  with_kernel(type, call, [&](auto t, auto together) {
    using T = decltype(t);
    constexpr bool kTogether = decltype(together)::value;
    const int channels = call.groups * call.outputs;
    const bool big_whole = (!kTogether || call.outputs == 1) &&
                           in_pieces<T>(call.source, kTogether, channels, call.lines[2].source);
    const bool small_whole = in_pieces<T>(call.target, kTogether, channels, call.lines[2].count);
    const Tile tile = plan<T, kTogether>(call, big_whole, small_whole, limit);
    launch(conv_depthwise_weight_kernel<T, kTogether>,
           {int64_t{tile.chunks} * tile.slices * call.lines[0].taps * tile.parts}, tile.warps * kWarp,
           tile.shared_bytes, stream, call, tile, workspace);
    const int64_t results = call.groups * call.outputs * taps_of(call);
    launch(add_weight_parts_kernel<T>, {(results + kMostWarps - 1) / kMostWarps}, kDepthwiseThreads, 0,
           stream, call, tile.parts, workspace);
  });
}

}  // namespace patchconv::kernels
