// Bits of a packed mask (core/mask.h), for kernels that read tensors as elements.cuh does. Each thread turns
// its 16 bytes into 4 or 8 bits; 8 or 4 neighbouring lanes merge theirs by shuffles into one word, which the
// first of them writes. All lanes of a warp take part, also where a tile is incomplete.
#pragma once

#include "cuda/kernels/elements.cuh"

namespace patchconv::kernels {

// Writes the bits of a piece, whose first element is `begin`, as part of the word that neighbouring lanes
// share.
template <int kCount>
PATCHCONV_DEVICE void store_bits(uint8_t* bits, uint32_t mine, int64_t begin, int64_t count) {
  constexpr int kLanes = 32 / kCount;
  const int place = lane_index() % kLanes;
  uint32_t word = mine << (place * kCount);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) word |= shuffle_xor(word, distance);
  if (place != 0 || begin >= count) return;
  uint8_t* target = bits + begin / 8;
  if (begin + 32 <= count) return store_whole(target, word);
  for (int64_t left = (count - begin + 7) / 8; left > 0; --left, word >>= 8) {
    *target++ = static_cast<uint8_t>(word);
  }
}

template <int kCount>
PATCHCONV_DEVICE uint32_t load_bits(const uint8_t* bits, int64_t begin, int64_t count) {
  if (begin >= count) return 0;
  return static_cast<uint32_t>(bits[begin / 8]) >> (begin % 8);
}

}  // namespace patchconv::kernels
