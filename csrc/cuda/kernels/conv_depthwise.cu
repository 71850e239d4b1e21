// Depthwise convolutions, with one source channel per group. A block copies a tile of the source to shared
// memory and reads the values for all taps there. Serves both directions of a convolution, and any stride,
// dilation, padding mode and layout. Nothing is allocated. Sums are float32, rounded once.
#include "cuda/kernels/conv_depthwise.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// A thread computes outputs of some channels, in rows below each other.
template <typename T, bool kTogether>
constexpr int kCount = kTogether ? kPiece<T> : 1;
template <bool kTogether>
constexpr int kRows = kTogether ? 4 : 8;

constexpr int64_t kSharedWanted = 48 * 1024;  // so that several blocks fit on a multiprocessor

struct Tile {
  HaloTile halo;
  int columns_log2 = 0, groups_log2 = 0;  // groups of rows
  bool whole = false;                     // results are written in pieces of 16 bytes
  int weights = 0;                        // floats, in front of the halo tile
  int shared_bytes = 0;

  template <typename T, bool kTogether>
  constexpr int pieces_log2() const {
    return halo.channels_log2 - log2_up(kCount<T, kTogether>);
  }
  template <bool kTogether>
  constexpr int rows_log2() const {
    return groups_log2 + log2_up(kRows<kTogether>);
  }
  constexpr int columns() const { return 1 << columns_log2; }
};

// What a block computes: its first channel, image and plane, and the number of its tile along rows and
// columns.
struct Work {
  int channel;
  uint32_t image, plane, row, column;
};

// From the block's number: blocks that follow each other are neighbours in memory.
template <bool kTogether>
PATCHCONV_DEVICE Work work_of(const ConvCall& call, const Tile& tile) {
  auto rest = static_cast<uint32_t>(block_x());
  const auto next = [&](int64_t count, int log2) {
    const auto blocks = static_cast<uint32_t>(blocks_of(count, log2));
    const uint32_t number = rest % blocks;
    rest /= blocks;
    return number;
  };
  const auto next_channel = [&] {
    return static_cast<int>(next(call.groups * call.outputs, tile.halo.channels_log2)
                            << tile.halo.channels_log2);
  };
  Work work;
  if (kTogether) work.channel = next_channel();
  work.column = next(call.lines[2].count, tile.columns_log2);
  work.row = next(call.lines[1].count, tile.rows_log2<kTogether>());
  work.plane = next(call.lines[0].count, 0);
  if (!kTogether) work.channel = next_channel();
  work.image = rest;
  return work;
}

// The taps of a plane of the kernel: [column][row][channel].
template <typename T>
PATCHCONV_DEVICE void load_weights(float* to, const ConvCall& call, const HaloTile& tile, int plane_tap,
                                   int channel, int threads) {
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  for (int i = thread_index(); i < (y.taps * x.taps) << tile.channels_log2; i += threads) {
    const int k = channel + (i & (tile.channels() - 1)), tap = i >> tile.channels_log2;
    if (k >= call.groups * call.outputs) continue;
    const int s = tap / y.taps, r = tap - s * y.taps;
    const int group = call.outputs == 1 ? k : k / call.outputs;
    const int64_t offset = group * call.weight.group + (k - group * call.outputs) * call.weight.output +
                           call.lines[0].tap(plane_tap) * call.weight.tap[0] + y.tap(r) * call.weight.tap[1] +
                           x.tap(s) * call.weight.tap[2];
    to[i] = to_float(static_cast<const T*>(call.weight.data)[offset]);
  }
}

// Budget: 112 registers, 101376 bytes of shared memory.
template <typename T, bool kTogether>
__global__ void __launch_bounds__(kDepthwiseThreads, 2) conv_depthwise_kernel(ConvCall call, Tile tile) {
  constexpr int kMine = kCount<T, kTogether>, kDown = kRows<kTogether>;
  using Piece = Vec<T, kMine>;
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const HaloTile& halo = tile.halo;
  const int channels = call.groups * call.outputs;
  const int pieces_log2 = tile.pieces_log2<T, kTogether>();
  const int threads = 1 << (pieces_log2 + tile.columns_log2 + tile.groups_log2);
  const Work work = work_of<kTogether>(call, tile);

  // This thread's channels, column and rows.
  int rest = thread_index(), mine = 0;
  if (kTogether) mine = (rest & ((1 << pieces_log2) - 1)) * kMine, rest >>= pieces_log2;
  const int column = rest & (tile.columns() - 1);
  rest >>= tile.columns_log2;
  const int row = (rest & ((1 << tile.groups_log2) - 1)) * kDown;
  if (!kTogether) mine = rest >> tile.groups_log2;

  float* const weights = shared_memory<float>();
  T* const values = reinterpret_cast<T*>(weights + tile.weights);
  const int column_pitch = kTogether ? halo.channels() : 1, row_pitch = halo.width * column_pitch;
  const int step = static_cast<int>(y.step) * row_pitch;
  const auto first_row = [&] { return int64_t{work.row} << tile.rows_log2<kTogether>(); };
  const auto first_column = [&] { return int64_t{work.column} << tile.columns_log2; };
  const int before = columns_before<T, kTogether>(halo, x.coordinate(first_column(), 0));
  const T* const corner = values + (kTogether ? mine : mine * halo.rows.length * row_pitch) + row * step +
                          (before + column * static_cast<int>(x.step)) * column_pitch;

  float sums[kDown][kMine] = {};
  for (int t = 0; t < (y.taps > 0 && x.taps > 0 ? z.taps : 0); ++t) {
    const int64_t iz = source_index(call.mode, z.coordinate(work.plane, t), z.source);
    if (iz < 0) continue;
    block_barrier();  // the values of the last plane have been used
    const HaloPlace place{work.image * call.source.image + iz * call.source.place[0],
                          y.coordinate(first_row(), 0), x.coordinate(first_column(), 0)};
    load_tile<T, kTogether>(values, halo, place, call.source, call.mode, y, x, work.channel, channels,
                            call.outputs, threads);
    commit_copies();
    load_weights<T>(weights, call, halo, t, work.channel, threads);
    wait_for_copies<0>();
    block_barrier();
    for (int s = 0; s < x.taps; ++s) {
      sweep(sums, corner + s * halo.columns.tap * column_pitch, step, halo.rows.tap * row_pitch,
            weights + s * y.taps * halo.channels() + mine, halo.channels(), y.taps);
    }
  }

  const ConvEpilogue& epilogue = call.epilogue;
  const int channel = work.channel + mine;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (channel + i >= channels) break;
    const float scale =
        epilogue.scale == nullptr ? 1 : static_cast<const float*>(epilogue.scale)[channel + i];
#pragma unroll
    for (int a = 0; a < kDown; ++a) sums[a][i] *= scale;
    if (epilogue.bias == nullptr) continue;
    const float bias = to_float(static_cast<const T*>(epilogue.bias)[channel + i]);
#pragma unroll
    for (int a = 0; a < kDown; ++a) sums[a][i] += bias;
  }
  const int64_t first = work.image * call.target.image + channel * call.target.channel +
                        z.target(work.plane) * call.target.place[0] +
                        x.target(first_column() + column) * call.target.place[2];
#pragma unroll
  for (int a = 0; a < kDown; ++a) {
    const bool inside =
        first_row() + row + a < y.count && first_column() + column < x.count && channel < channels;
    const int64_t offset = first + y.target(first_row() + row + a) * call.target.place[1];
    const int count = inside ? std::min(kMine, channels - channel) : 0;
    const T* residual = static_cast<const T*>(epilogue.residual) + offset;
    T* const target = static_cast<T*>(const_cast<void*>(call.target.data)) + offset;
    Piece piece{};
    if (epilogue.residual != nullptr) {
      if (tile.whole && inside) piece = load_whole<Piece>(residual);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (!tile.whole && i < count) piece.at[i] = residual[i];
        sums[a][i] += to_float(piece.at[i]);
      }
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      piece.at[i] = from_float<T>(sums[a][i]);
      const bool passed = passes(to_float(piece.at[i]));
      bits |= static_cast<uint32_t>(passed) << i;
      if (epilogue.relu && !passed) piece.at[i] = from_float<T>(0);
    }
    if (tile.whole) {
      if (inside) store_whole(target, piece);
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (i < count) target[i] = piece.at[i];
      }
    }
    if (epilogue.bits == nullptr) continue;
    // A byte of bits: eight neighbours, held by one, two or eight threads.
    if (kMine == 4) bits |= shuffle_xor(bits, 1) << 4;
    if (kMine == 1) bits = ballot_of(bits != 0) >> lane_index();
    if (inside && thread_index() % (8 / kMine) == 0) epilogue.bits[offset / 8] = static_cast<uint8_t>(bits);
  }
}

// Threads take pieces of channels, columns and groups of rows, a power of two of each: as many as there are,
// or fewer if their tile would leave no room for other blocks.
template <typename T, bool kTogether>
Tile plan(const ConvCall& call, bool whole) {
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  const int channels = call.groups * call.outputs;
  constexpr int kLeast = kTogether ? log2_up(8 / kCount<T, kTogether>) : 0;  // a byte of a mask
  constexpr int kMost = log2_up(kDepthwiseThreads), kWarpLog2 = log2_up(kWarp);
  const int pieces_wanted =
      std::max(kLeast, log2_up((channels + kCount<T, kTogether> - 1) / kCount<T, kTogether>));
  int pieces = kTogether ? std::min(2, pieces_wanted) : 0;
  Tile tile;
  int &columns = tile.columns_log2, &groups = tile.groups_log2;
  columns = std::min(kTogether ? 4 : 6, log2_up(x.count));
  if (!kTogether) columns = std::max(columns, 3);  // a byte of a mask
  groups = std::min(kMost - columns - pieces, log2_up((y.count + kRows<kTogether> - 1) / kRows<kTogether>));
  pieces = std::min(pieces_wanted, kMost - columns - groups);
  columns = std::max(columns, kWarpLog2 - pieces - groups);
  const auto fill = [&](bool whole) {
    tile.halo = halo_tile<T>(kTogether, pieces + log2_up(kCount<T, kTogether>), y, x,
                             kRows<kTogether> << groups, y.taps, 1 << columns, whole);
    const int64_t taps = int64_t{y.taps} * x.taps;
    const int64_t weights = ((taps << tile.halo.channels_log2) + 3) / 4 * 4;
    const int64_t bytes = 4 * weights + tile.halo.elements() * static_cast<int64_t>(sizeof(T));
    tile.weights = static_cast<int>(weights);
    tile.shared_bytes = static_cast<int>(std::min<int64_t>(bytes, 1 << 30));
  };
  fill(whole);
  while (tile.shared_bytes > kSharedWanted && pieces + columns + groups > kWarpLog2) {
    if (pieces > kLeast) {
      --pieces;
    } else if (groups > 0) {
      --groups;
    } else {
      --columns;
    }
    fill(whole);
  }
  return tile;
}

// Whether the source can be copied in pieces of 16 bytes.
template <typename T, bool kTogether>
bool source_in_pieces(const ConvCall& call) {
  return in_pieces<T>(call.source, kTogether, call.groups * call.outputs, call.lines[2].source) &&
         (!kTogether || call.outputs == 1);
}

bool together(const ConvCall& call) {
  return call.target.channel == 1 && int64_t{call.groups} * call.outputs > 1;
}

// Calls use(T(), whether channels are contiguous).
template <typename Use>
void with_kernel(Type type, const ConvCall& call, Use use) {
  with_type(type, [&](auto t) {
    if (together(call)) return use(t, std::true_type());
    use(t, std::false_type());
  });
}

}  // namespace

bool conv_depthwise_serves(Type type, const ConvCall& call, int shared_limit) {
  if (type == Type::kDouble || call.sources != 1) return false;
  bool fits = true;  // in either layout, in pieces or not: the answer must hold for any strides
  with_type(type, [&](auto t) {
    using T = decltype(t);
    for (const bool whole : {false, true}) {
      fits = fits && plan<T, false>(call, whole).shared_bytes <= shared_limit &&
             plan<T, true>(call, whole).shared_bytes <= shared_limit;
    }
  });
  return fits;
}

void launch_conv_depthwise(Type type, const ConvCall& call, Stream stream) {
  with_kernel(type, call, [&](auto t, auto together) {
    using T = decltype(t);
    constexpr bool kTogether = decltype(together)::value;
    Tile tile = plan<T, kTogether>(call, source_in_pieces<T, kTogether>(call));
    const int channels = call.groups * call.outputs;
    const int64_t grid =
        call.images * call.lines[0].count * blocks_of(call.lines[1].count, tile.rows_log2<kTogether>()) *
        blocks_of(call.lines[2].count, tile.columns_log2) * blocks_of(channels, tile.halo.channels_log2);
    ConvTensor residual = call.target;
    residual.data = call.epilogue.residual;
    tile.whole = !kTogether ||
                 (in_pieces<T>(call.target, true, channels, 0) && in_pieces<T>(residual, true, channels, 0));
    launch(conv_depthwise_kernel<T, kTogether>, {grid},
           1 << (tile.pieces_log2<T, kTogether>() + tile.columns_log2 + tile.groups_log2), tile.shared_bytes,
           stream, call, tile);
  });
}

}  // namespace patchconv::kernels
