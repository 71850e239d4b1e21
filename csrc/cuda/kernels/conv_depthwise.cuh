// What the depthwise kernels share: a tile of a tensor with its halo in shared memory, and sums along its
// rows.
#pragma once

#include <algorithm>

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kDepthwiseThreads = 256;

// The coordinates that consecutive outputs read along one dimension: one stretch or, if taps are farther
// apart than the outputs reach, one stretch per tap.
struct Reach {
  int length = 0;    // over all stretches
  int stretch = 0;   // of one
  int64_t jump = 0;  // in coordinates, from one to the next
  int tap = 0;       // from one tap to the next, within `length`
};

inline Reach reach_of(const ConvLine& line, int outputs, int taps, bool may_split) {
  constexpr int64_t kMost = 1 << 20;  // longer than any tile
  const int64_t one = std::min((outputs - 1) * line.step + 1, kMost);
  if (taps <= 1) return {static_cast<int>(one), static_cast<int>(one), 0, 0};
  const bool split = may_split && line.distance > one;
  const int64_t length = std::min(split ? taps * one : one + (taps - 1) * line.distance, kMost);
  return {static_cast<int>(length), static_cast<int>(split ? one : length), line.distance,
          static_cast<int>(split ? one : std::min(line.distance, kMost))};
}

// The coordinate of the value at index `i` of a reach that begins at `first`; -1 where that is zero. `i` is
// never outside the line's coordinates.
PATCHCONV_DEVICE int64_t source_at(PaddingMode mode, const ConvLine& line, const Reach& reach, int64_t first,
                                   int i) {
  const int number = i < reach.stretch ? 0 : i / reach.stretch;
  const int64_t at = first + number * reach.jump + (i - number * reach.stretch);
  return at < line.first || at > line.last() ? -1 : source_index(mode, at, line.source);
}

// A tile in shared memory: [row][column][channel] if channels are contiguous, else [channel][row][column].
struct HaloTile {
  int channels_log2 = 0;
  Reach rows, columns;
  int width = 0;        // of a row, in columns
  int across_log2 = 0;  // threads that read a row, if columns are contiguous
  bool whole = false;   // read in pieces of 16 bytes

  constexpr int channels() const { return 1 << channels_log2; }
  constexpr int64_t elements() const { return (int64_t{rows.length} * width) << channels_log2; }
};

// The exponent of the smallest power of two that is at least `count`.
constexpr int log2_up(int64_t count) {
  int result = 0;
  while ((int64_t{1} << result) < count) ++result;
  return result;
}

// Blocks of 2^log2 that cover a count.
constexpr int64_t blocks_of(int64_t count, int log2) { return (count + (int64_t{1} << log2) - 1) >> log2; }

template <typename T>
constexpr int kPiece = 16 / sizeof(T);

// Whether pieces of 16 bytes of a tensor are aligned, along its channels or along its columns.
template <typename T>
bool in_pieces(const ConvTensor& x, bool channels_together, int channels, int64_t columns) {
  const int64_t strides[] = {x.image, channels_together ? x.place[2] : x.channel, x.place[0], x.place[1]};
  for (int64_t stride : strides) {
    if (stride % kPiece<T> != 0) return false;
  }
  return aligned_to_pieces(x.data) && (channels_together ? x.channel : x.place[2]) == 1 &&
         (channels_together ? channels : columns) % kPiece<T> == 0;
}

// The tile that `columns` x `rows` outputs of 2^channels_log2 channels read.
template <typename T>
HaloTile halo_tile(bool channels_together, int channels_log2, const ConvLine& y, const ConvLine& x, int rows,
                   int row_taps, int columns, bool whole) {
  HaloTile tile;
  tile.channels_log2 = channels_log2;
  tile.rows = reach_of(y, rows, row_taps, true);
  tile.columns = reach_of(x, columns, x.taps, channels_together);
  tile.width = tile.columns.length;
  // The first piece of a row may begin before the first column.
  if (!channels_together && whole) tile.width = (tile.width + 2 * kPiece<T> - 2) / kPiece<T> * kPiece<T>;
  tile.across_log2 = std::min(5, log2_up(whole ? tile.width / kPiece<T> : tile.width));
  tile.whole = whole;
  return tile;
}

// Where a tile lies: the coordinates of its first row and column, the offset of its plane in the tensor.
struct HaloPlace {
  int64_t plane = 0, row = 0, column = 0;
};

// Columns of the tile before the first one that is needed: the tile begins at a multiple of a piece.
template <typename T, bool kTogether>
PATCHCONV_DEVICE int columns_before(const HaloTile& tile, int64_t column) {
  return kTogether || !tile.whole ? 0 : static_cast<int>(column & (kPiece<T> - 1));
}

// Writes zero if the offset is negative or the bit is 0.
template <typename T>
PATCHCONV_DEVICE void put_element(T* to, const ConvTensor& source, int64_t offset) {
  const bool zero = offset < 0 || (source.bits != nullptr && !bit_at(source.bits, offset));
  *to = zero ? from_float<T>(0) : static_cast<const T*>(source.data)[offset];
}

template <typename T>
PATCHCONV_DEVICE void put_piece(T* to, const ConvTensor& source, int64_t offset) {
  using Piece = Vec<T, kPiece<T>>;
  const T* from = static_cast<const T*>(source.data) + offset;
  if (offset >= 0 && source.bits == nullptr) return copy_async(to, from);
  Piece piece{};
  uint32_t bits = 0;
  if (offset >= 0) {
    piece = load_whole<Piece>(from);
    bits = static_cast<uint32_t>(source.bits[offset / 8]) >> (offset % 8);
  }
#pragma unroll
  for (int i = 0; i < kPiece<T>; ++i) {
    if ((bits >> i & 1) == 0) piece.at[i] = from_float<T>(0);
  }
  store_whole(to, piece);
}

// Loads a tile. Its channel i takes the source channel that serves channel `channel` + i, where each source
// channel serves `outputs` of them. Channels from `channels` on are left out. Copies may still be incomplete
// on return.
template <typename T, bool kTogether>
PATCHCONV_DEVICE void load_tile(T* to, const HaloTile& tile, const HaloPlace& place, const ConvTensor& source,
                                PaddingMode mode, const ConvLine& y, const ConvLine& x, int channel,
                                int channels, int outputs, int threads) {
  const int each = tile.whole ? kPiece<T> : 1;
  const auto channel_offset = [&](int k) {
    return place.plane + (outputs == 1 ? k : k / outputs) * source.channel;
  };
  if constexpr (kTogether) {
    const int shift = tile.channels_log2 - (tile.whole ? log2_up(kPiece<T>) : 0);
    for (int i = thread_index(); i < (tile.rows.length * tile.width) << shift; i += threads) {
      const int k = channel + (i & ((1 << shift) - 1)) * each;
      if (k >= channels) continue;
      const int row = (i >> shift) / tile.width, column = (i >> shift) - row * tile.width;
      const int64_t iy = source_at(mode, y, tile.rows, place.row, row);
      const int64_t ix = source_at(mode, x, tile.columns, place.column, column);
      const int64_t offset =
          iy < 0 || ix < 0 ? -1 : channel_offset(k) + iy * source.place[1] + ix * source.place[2];
      if (tile.whole) {
        put_piece(to + i * each, source, offset);
      } else {
        put_element(to + i, source, offset);
      }
    }
  } else {
    const int units = tile.whole ? tile.width / kPiece<T> : tile.width;
    const int across = 1 << tile.across_log2;
    const int before = columns_before<T, kTogether>(tile, place.column);
    for (int line = thread_index() >> tile.across_log2; line < tile.rows.length << tile.channels_log2;
         line += threads >> tile.across_log2) {
      const int c = line / tile.rows.length;
      if (channel + c >= channels) continue;
      const int64_t iy = source_at(mode, y, tile.rows, place.row, line - c * tile.rows.length);
      const int64_t row = channel_offset(channel + c) + iy * source.place[1];
      for (int unit = thread_index() & (across - 1); unit < units; unit += across) {
        T* const unit_to = to + line * tile.width + unit * each;
        const int64_t at = place.column - before + unit * each;
        if (tile.whole && iy >= 0 && at >= 0 && at < x.source) {
          put_piece(unit_to, source, row + at);
          continue;
        }
        for (int i = 0; i < each; ++i) {
          const int64_t ix = source_at(mode, x, tile.columns, place.column, unit * each + i - before);
          put_element(unit_to + i, source, iy < 0 || ix < 0 ? -1 : row + ix * source.place[2]);
        }
      }
    }
  }
}

template <typename T, int kCount>
PATCHCONV_DEVICE void load_values(float (&to)[kCount], const T* from) {
  const auto values = load_whole<Vec<T, kCount>>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = to_float(values.at[i]);
}

// Adds to sums[a] the sum over b of factors[b * factor_step] * values[a * step + b * along]. If a and b have
// equal steps (kSlides), each value is read once.
template <bool kSlides, int kSums, int kCount, typename T, typename F>
PATCHCONV_DEVICE void sweep_by(float (&sums)[kSums][kCount], const T* values, int step, int along,
                               const F* factors, int factor_step, int count) {
  float window[kSums][kCount];
  if (kSlides) {
#pragma unroll
    for (int a = 0; a + 1 < kSums; ++a) load_values(window[a], values + a * step);
  }
  for (int begin = 0; begin < count; begin += kSums) {
#pragma unroll
    for (int b = 0; b < kSums; ++b) {
      if (begin + b >= count) break;
#pragma unroll
      for (int a = kSlides ? kSums - 1 : 0; a < kSums; ++a) {
        load_values(window[(a + b) % kSums], values + a * step);
      }
      float factor[kCount];
      load_values(factor, factors);
#pragma unroll
      for (int a = 0; a < kSums; ++a) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          sums[a][i] = multiply_add(factor[i], window[(a + b) % kSums][i], sums[a][i]);
        }
      }
      values += along;
      factors += factor_step;
    }
  }
}

template <int kSums, int kCount, typename T, typename F>
PATCHCONV_DEVICE void sweep(float (&sums)[kSums][kCount], const T* values, int step, int along,
                            const F* factors, int factor_step, int count) {
  if (step == along) {
    sweep_by<true>(sums, values, step, along, factors, factor_step, count);
  } else {
    sweep_by<false>(sums, values, step, along, factors, factor_step, count);
  }
}

}  // namespace patchconv::kernels
