// Philox4x32-10: random words as a function of a key and a counter, with no state between them.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). The key is a
// 64-bit seed and the counter a 64-bit block index above 64 zero bits, so block b of a seed is always the
// same four words, in whatever order blocks are computed: element i of a tensor takes word i % 4 of block i /
// 4. Everything is constexpr, so that device code can call it too (nvcc --expt-relaxed-constexpr).
#pragma once

#include <cstdint>

namespace patchconv {

constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t low, high;
};

constexpr PhiloxKey philox_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

// The key of the next round.
constexpr PhiloxKey philox_next(PhiloxKey key) { return {key.low + 0x9E3779B9u, key.high + 0xBB67AE85u}; }

constexpr void philox_round(PhiloxKey key, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint64_t first = 0xD2511F53ull * a;
  const uint64_t second = 0xCD9E8D57ull * c;
  a = static_cast<uint32_t>(second >> 32) ^ b ^ key.low;
  b = static_cast<uint32_t>(second);
  c = static_cast<uint32_t>(first >> 32) ^ d ^ key.high;
  d = static_cast<uint32_t>(first);
}

// The cipher on a full 128-bit counter; `counter` holds its least significant word first.
constexpr PhiloxBlock philox(PhiloxKey key, PhiloxBlock counter) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(key, counter.word[0], counter.word[1], counter.word[2], counter.word[3]);
    key = philox_next(key);
  }
  return counter;
}

// Words 4 * block to 4 * block + 3 of a seed's sequence.
constexpr PhiloxBlock philox_block(uint64_t seed, uint64_t block) {
  return philox(philox_key(seed), {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0}});
}

// An event of probability p happens where a word is below this threshold: 0 (never) for p = 0, and 2^32
// (always), which does not fit 32 bits, for p = 1.
constexpr uint64_t philox_threshold(double p) { return static_cast<uint64_t>(p * 4294967296.0 + 0.5); }

}  // namespace patchconv
