// A tile of the source and its halo in shared memory: 64 bytes of channels per position, in four pieces of 16
// bytes. The order of the pieces depends on the position, so that the same piece of 8 neighbours, which one
// matrix load reads, lies in different banks.
#pragma once

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kChunkPieces = 4;
constexpr int kChunkBytes = 16 * kChunkPieces;
template <typename T>
constexpr int kPieceOf = 16 / sizeof(T);  // channels
template <typename T>
constexpr int kChunkOf = kChunkPieces * kPieceOf<T>;

// Offset of a piece in bytes, from the tile's beginning.
PATCHCONV_DEVICE int piece_at(int place, int piece) {
  return place * kChunkBytes + ((piece ^ (place >> 1 & 3)) << 4);
}

// The same for the piece at `offset`, in places of kChunkBytes whose pieces are in order. Holds for offsets
// from any multiple of kSwizzleBytes.
constexpr int kSwizzleBytes = 8 * kChunkBytes;
PATCHCONV_DEVICE int swizzled(int offset) { return offset ^ (offset >> 3 & 0x30); }

// Where a tile lies in the source.
struct Halo {
  int64_t base = 0;         // offset of its image, slice and first channel
  int channels = 0;         // of the group from there on; none if the slice is padding
  int row = 0, column = 0;  // coordinates of its first place
};

PATCHCONV_DEVICE int last_of(const ConvLine& line) { return static_cast<int>(line.last()); }

// The coordinate that a value comes from; negative if it is zero.
PATCHCONV_DEVICE int source_of(PaddingMode mode, const ConvLine& line, int coordinate) {
  return coordinate > last_of(line) ? -1 : source_index(mode, coordinate, static_cast<int>(line.source));
}

// Loads a piece element by element, with zeros where `channels` end and for elements whose bit is 0.
template <typename T>
PATCHCONV_DEVICE Vec<T, kPieceOf<T>> gathered_piece(const ConvTensor& source, int64_t offset, int channels) {
  Vec<T, kPieceOf<T>> piece;
  const int64_t stride = source.channel * int{sizeof(T)};
  const char* from = static_cast<const char*>(source.data) + offset * int{sizeof(T)};
  if (channels >= kPieceOf<T> && source.bits == nullptr) {
#pragma unroll
    for (int i = 0; i < kPieceOf<T>; ++i, from += stride) piece.at[i] = *reinterpret_cast<const T*>(from);
    return piece;
  }
#pragma unroll
  for (int i = 0; i < kPieceOf<T>; ++i, from += stride) {
    const bool there =
        i < channels && (source.bits == nullptr || bit_at(source.bits, offset + i * source.channel));
    piece.at[i] = there ? *reinterpret_cast<const T*>(from) : from_float<T>(0);
  }
  return piece;
}

// Zeros the elements whose bit is 0.
template <typename T>
PATCHCONV_DEVICE void keep_where(Vec<T, kPieceOf<T>>& piece, uint32_t bits) {
#pragma unroll
  for (int i = 0; i < kPieceOf<T>; ++i) {
    if (!(bits >> i & 1)) piece.at[i] = from_float<T>(0);
  }
}

// The same in shared memory, for a piece of contiguous channels.
template <typename T>
PATCHCONV_DEVICE void mask_piece(void* shared, const uint8_t* bits, int64_t offset) {
  auto piece = load_whole<Vec<T, kPieceOf<T>>>(shared);
  keep_where<T>(piece, bits[offset / 8] >> (offset % 8));
  store_whole(shared, piece);
}

}  // namespace patchconv::kernels
