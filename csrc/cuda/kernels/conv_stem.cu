// Convolutions of up to four channels by tensor cores. A tile of the source lies in shared memory with four
// channels per position, so that the taps of a kernel row and their channels are one inner dimension: for
// each row of the kernel a block multiplies 256 positions by 64 outputs. Weights come row by row from a copy
// in that order, which the caller provides; nothing is allocated. Sums are float32, rounded once.
// A product of strict float32 takes three tf32 products.
#include <algorithm>

#include "cuda/kernels/conv_store.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 256;  // of a tile of outputs
constexpr int kChannels = 4;  // of a place of the source
constexpr int64_t kShared = 99 * 1024;
constexpr int kStepBytes = 32;  // of the inner dimension, per product of matrices
constexpr int kPadding = 16;    // bytes between rows of weights, so that eight lie in different banks

struct Tile {
  int columns_log2 = 0;     // of outputs
  int rows = 0, width = 0;  // of the source
  int row_bytes = 0;        // of the inner dimension, in whole steps
  int64_t down = 0, across = 0, output_tiles = 0;
  int64_t shared_bytes = 0;

  constexpr int columns() const { return 1 << columns_log2; }
  constexpr int weight_pitch() const { return row_bytes + kPadding; }
  constexpr int weight_bytes() const { return kStageOutputs * weight_pitch(); }
};

constexpr int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int row_bytes(Type type, const ConvCall& call) {
  const int64_t bytes = int64_t{call.lines[2].taps} * kChannels * (type == Type::kFloat ? 4 : 2);
  return static_cast<int>(std::min<int64_t>(divided_up(bytes, kStepBytes) * kStepBytes, 1 << 20));
}

// Budget: 32 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads) stem_pack_kernel(ConvCall call, int row, int64_t total, T* to) {
  const int64_t index = block_x() * kThreads + thread_index();
  if (index >= total) return;
  const int k = static_cast<int>(index % row), c = k % kChannels, s = k / kChannels;
  const int64_t output = index / row % call.outputs, tap = index / row / call.outputs;
  const int r = static_cast<int>(tap % call.lines[1].taps), t = static_cast<int>(tap / call.lines[1].taps);
  const bool there = c < call.sources && s < call.lines[2].taps;
  const int64_t offset =
      output * call.weight.output + c * call.weight.source + call.lines[0].tap(t) * call.weight.tap[0] +
      call.lines[1].tap(r) * call.weight.tap[1] + call.lines[2].tap(s) * call.weight.tap[2];
  to[index] = there ? static_cast<const T*>(call.weight.data)[offset] : from_float<T>(0);
}

// What a block computes: a tile of one image and plane, and some outputs.
struct Work {
  int64_t image, plane, row, column;
  int output;
};

PATCHCONV_DEVICE Work work_of(const ConvCall& call, const Tile& tile) {
  auto rest = static_cast<uint32_t>(block_x());
  const auto next = [&](int64_t count) {
    const uint32_t number = rest % static_cast<uint32_t>(count);
    rest /= static_cast<uint32_t>(count);
    return static_cast<int64_t>(number);
  };
  Work work;
  work.output = static_cast<int>(next(tile.output_tiles)) * kStageOutputs;
  work.column = next(tile.across) << tile.columns_log2;
  work.row = next(tile.down) * (kPlaces >> tile.columns_log2);
  work.plane = next(call.lines[0].count);
  work.image = rest;
  return work;
}

PATCHCONV_DEVICE int64_t source_at(PaddingMode mode, const ConvLine& line, int64_t at) {
  return at > line.last() ? -1 : source_index(mode, at, line.source);
}

// Loads the positions of the source's plane `plane`, four channels each.
template <typename T>
PATCHCONV_DEVICE void load_places(T* to, const ConvCall& call, const Tile& tile, const Work& work,
                                  int64_t plane) {
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  const ConvTensor& source = call.source;
  const int64_t base = work.image * source.image + plane * source.place[0];
  for (int i = thread_index(); i < tile.rows * tile.width; i += kThreads) {
    const int row = i / tile.width, column = i - row * tile.width;
    const int64_t iy = source_at(call.mode, y, y.coordinate(work.row, 0) + row);
    const int64_t ix = source_at(call.mode, x, x.coordinate(work.column, 0) + column);
    const int64_t offset = base + iy * source.place[1] + ix * source.place[2];
    Vec<T, kChannels> place;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int64_t at = offset + c * source.channel;
      const bool there =
          iy >= 0 && ix >= 0 && c < call.sources && (source.bits == nullptr || bit_at(source.bits, at));
      place.at[c] = there ? static_cast<const T*>(source.data)[at] : from_float<T>(0);
    }
    store_whole(to + i * kChannels, place);
  }
}

// Starts to copy the weights of row `number` of the kernel.
PATCHCONV_DEVICE void copy_weights(char* to, const ConvCall& call, const Tile& tile, const char* packed,
                                   int64_t number, int output) {
  const int pieces = tile.row_bytes / 16;
  for (int i = thread_index(); i < kStageOutputs * pieces; i += kThreads) {
    const int row = i / pieces, piece = i - row * pieces;
    const bool there = output + row < call.outputs;
    const int64_t offset = (number * call.outputs + output + row) * tile.row_bytes + piece * 16;
    copy_async(to + row * tile.weight_pitch() + piece * 16, there ? packed + offset : packed, there ? 16 : 0);
  }
}

// Turns four numbers into what tensor cores read. float32 is split into an upper part and, for strict sums,
// the rest.
template <typename T, bool kStrict>
PATCHCONV_DEVICE void prepare(uint32_t (&values)[4], uint32_t (&low)[4]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kStrict) {
        split_tf32(values[i], values[i], low[i]);
      } else {
        values[i] = to_tf32(bits_float(values[i]));
      }
    }
  }
}

// Multiplies one row of the kernel. places[m][i] points to the values of this lane's position i of matrix m.
template <typename T, bool kStrict>
PATCHCONV_DEVICE void multiply_row(float (&sums)[2][8][4], const char* const (&places)[2][2],
                                   const ConvLine& x, const Tile& tile, const char* weights) {
  constexpr int kPlaceBytes = kChannels * static_cast<int>(sizeof(T));
  const int lane = lane_index();
  const char* const mine = weights + (lane % 8 + lane / 16 * 8) * tile.weight_pitch() + lane / 8 % 2 * 16;
  for (int begin = 0; begin < tile.row_bytes; begin += kStepBytes) {
    uint32_t a[2][4], a_low[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = begin + half * 16 + lane % 4 * 4, s = at / kPlaceBytes;
      const int offset = s * static_cast<int>(x.distance) * kPlaceBytes + at % kPlaceBytes;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[m][2 * half + i] = s < x.taps ? load_whole<uint32_t>(places[m][i] + offset) : 0;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) prepare<T, kStrict>(a[m], a_low[m]);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t both[4], both_low[4];
      load_matrices<false>(both, mine + pair * 16 * tile.weight_pitch() + begin);
      prepare<T, kStrict>(both, both_low);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b[2] = {both[2 * n], both[2 * n + 1]};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float (&sum)[4] = sums[m][2 * pair + n];
          if constexpr (kStrict) {
            const uint32_t b_low[2] = {both_low[2 * n], both_low[2 * n + 1]};
            multiply_matrices(T(), sum, a_low[m], b);
            multiply_matrices(T(), sum, a[m], b_low);
          }
          multiply_matrices(T(), sum, a[m], b);
        }
      }
    }
  }
}

// Budget: 240 registers, 101376 bytes of shared memory, tensor cores.
template <typename T, bool kStrict>
__global__ void __launch_bounds__(kThreads, kStrict ? 1 : 2)
    conv_stem_kernel(ConvCall call, Tile tile, const char* packed) {
  constexpr int kPlaceBytes = kChannels * static_cast<int>(sizeof(T));
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  const Work work = work_of(call, tile);
  const int warp = thread_index() / kWarp, lane = lane_index();
  char* const weights = shared_memory<char>();
  char* const values = weights + 2 * tile.weight_bytes();
  const int first = warp * kStagePlaces;

  const char* places[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = first + m * 16 + i * 8 + lane / 4;
      const int row = (place >> tile.columns_log2) * static_cast<int>(y.step);
      const int column = (place & (tile.columns() - 1)) * static_cast<int>(x.step);
      places[m][i] = values + (row * tile.width + column) * kPlaceBytes;
    }
  }

  float sums[2][8][4] = {};
  for (int t = 0; t < (x.taps > 0 && y.taps > 0 ? z.taps : 0); ++t) {
    const int64_t iz = source_index(call.mode, z.coordinate(work.plane, t), z.source);
    if (iz < 0) continue;
    block_barrier();  // the values of the last plane have been used
    copy_weights(weights, call, tile, packed, int64_t{t} * y.taps, work.output);
    commit_copies();
    load_places(reinterpret_cast<T*>(values), call, tile, work, iz);
    for (int r = 0; r < y.taps; ++r) {
      wait_for_copies<0>();
      block_barrier();  // these weights have arrived, and the ones before have been used
      if (r + 1 < y.taps) {
        copy_weights(weights + (r + 1) % 2 * tile.weight_bytes(), call, tile, packed,
                     int64_t{t} * y.taps + r + 1, work.output);
        commit_copies();
      }
      const int shift = r * static_cast<int>(y.distance) * tile.width * kPlaceBytes;
      const char* const shifted[2][2] = {{places[0][0] + shift, places[0][1] + shift},
                                         {places[1][0] + shift, places[1][1] + shift}};
      const char* const stage = weights + r % 2 * tile.weight_bytes();
      if constexpr (kStrict) {
        float part[2][8][4] = {};
        multiply_row<T, true>(part, shifted, x, tile, stage);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = add(sums[m][n][i], part[m][n][i]);
          }
        }
      } else {
        multiply_row<T, false>(sums, shifted, x, tile, stage);
      }
    }
  }

  block_barrier();
  float* const stage = shared_memory<float>() + warp * kStagePlaces * kStagePitch;
  const Finish finish = finish_of<T>(call, 0, work.output);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) stage_sums(stage, m * 16, n, sums[m][n], finish);
  }
  warp_barrier();
  const int place = first + lane;
  const int64_t row = work.row + (place >> tile.columns_log2);
  const int64_t column = work.column + (place & (tile.columns() - 1));
  int64_t target = -1;
  if (row < y.count && column < x.count) {
    target = work.image * call.target.image + z.target(work.plane) * call.target.place[0] +
             y.target(row) * call.target.place[1] + x.target(column) * call.target.place[2];
  }
  store_stage<T>(call, stage, 0, work.output, target);
}

// The tile shape that needs the fewest blocks; shared_bytes is 0 if none fits.
Tile plan(Type type, const ConvCall& call) {
  constexpr int64_t kMost = 1 << 15;  // longer than any tile
  const ConvLine &y = call.lines[1], &x = call.lines[2];
  const auto reach = [&](const ConvLine& line, int64_t outputs) {
    return std::min((outputs - 1) * line.step + std::max(line.taps - 1, 0) * line.distance + 1, kMost);
  };
  Tile best;
  for (int log2 = 5; log2 >= 3; --log2) {
    Tile tile;
    tile.columns_log2 = log2;
    tile.rows = static_cast<int>(reach(y, kPlaces >> log2));
    tile.width = static_cast<int>(reach(x, 1 << log2));
    tile.row_bytes = row_bytes(type, call);
    tile.down = divided_up(y.count, kPlaces >> log2);
    tile.across = divided_up(x.count, 1 << log2);
    tile.output_tiles = divided_up(call.outputs, kStageOutputs);
    const int64_t place_bytes = kChannels * (type == Type::kFloat ? 4 : 2);
    tile.shared_bytes = std::max<int64_t>(2 * tile.weight_bytes() + tile.rows * place_bytes * tile.width,
                                          kThreads / kWarp * kStageBytes);
    if (tile.shared_bytes > kShared) continue;
    if (best.shared_bytes == 0 || tile.down * tile.across < best.down * best.across) best = tile;
  }
  return best;
}

}  // namespace

bool conv_stem_serves(Type type, const ConvCall& call, int shared_limit) {
  if (type == Type::kDouble || call.groups != 1 || call.sources > kChannels) return false;
  const int64_t bytes = plan(type, call).shared_bytes;
  return bytes > 0 && bytes <= shared_limit;
}

int64_t conv_stem_packed_elements(Type type, const ConvCall& call) {
  return int64_t{call.lines[0].taps} * call.lines[1].taps * call.outputs * row_bytes(type, call) /
         (type == Type::kFloat ? 4 : 2);
}

void launch_conv_stem(Type type, bool strict, const ConvCall& call, void* packed, Stream stream) {
  const Tile tile = plan(type, call);
  const int64_t total = conv_stem_packed_elements(type, call);
  const auto start = [&](auto t, auto is_strict) {
    using T = decltype(t);
    launch(stem_pack_kernel<T>, {divided_up(total, kThreads)}, kThreads, 0, stream, call,
           tile.row_bytes / static_cast<int>(sizeof(T)), total, static_cast<T*>(packed));
    launch(conv_stem_kernel<T, decltype(is_strict)::value>,
           {call.images * call.lines[0].count * tile.down * tile.across * tile.output_tiles}, kThreads,
           tile.shared_bytes, stream, call, tile, static_cast<const char*>(packed));
  };
  if (type == Type::kFloat && strict) return start(float(), std::true_type());
  with_type(type, [&](auto t) { start(t, std::false_type()); });
}

}  // namespace patchconv::kernels
