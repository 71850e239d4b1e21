// Dropout on the CPU: the input with elements dropped at random, from a seed instead of a stored mask.
//
// Element i in memory order takes word i % 4 of Philox block i / 4 of the seed (core/philox.h) and is kept
// with probability 1 - p, so any part of the mask can be computed again at any time, by any number of
// threads. Kept elements become x * scale + shift, dropped ones x * 0 + fill; where shift and fill are zero
// nothing is added, which keeps -0.0 as stock's product with a mask does. Half types compute in float32 and
// round once. Allocates the output; each thread has one chunk of words and values on its stack.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "core/philox.h"
#include "cpu/clones.h"

// Only instruction sets without fused multiply-add, so that the choice does not change how x * scale + shift
// is rounded.
#define PATCHCONV_CLONES PATCHCONV_CLONES_FOR("avx2")

namespace patchconv {

using at::Tensor;

namespace {

constexpr int64_t kChunk = 1024;   // elements whose words are computed at once; a multiple of 4 * kLanes
constexpr int64_t kLanes = 8;      // blocks computed side by side
constexpr int64_t kGrain = 16384;  // elements below which another thread does not pay

// What kept and dropped elements become, in the type they are computed in.
template <typename Math>
struct Outcome {
  Math scale, shift, fill;
  uint64_t threshold;
};

[[gnu::always_inline]] inline void make_words(uint64_t seed, uint64_t first_block, uint32_t* words) {
  for (int64_t b = 0; b < kChunk / 4; b += kLanes) {
    uint32_t w[4][kLanes];
    for (int64_t l = 0; l < kLanes; ++l) {
      const uint64_t block = first_block + b + l;
      w[0][l] = static_cast<uint32_t>(block);
      w[1][l] = static_cast<uint32_t>(block >> 32);
      w[2][l] = w[3][l] = 0;
    }
    PhiloxKey key = philox_key(seed);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int64_t l = 0; l < kLanes; ++l) philox_round(key, w[0][l], w[1][l], w[2][l], w[3][l]);
      key = philox_next(key);
    }
    for (int64_t l = 0; l < kLanes; ++l) {
      for (int64_t i = 0; i < 4; ++i) words[(b + l) * 4 + i] = w[i][l];
    }
  }
}

template <bool kAdds, typename Math>
[[gnu::always_inline]] inline void apply(Math* values, const uint32_t* words, const Outcome<Math>& outcome) {
  // A threshold of 2^32, which no word reaches, is handled apart: so the comparison stays in 32 bits, as wide
  // as a float.
  const bool drops_all = outcome.threshold > UINT32_MAX;
  const uint32_t threshold = static_cast<uint32_t>(outcome.threshold);
  const Math scale = drops_all ? Math(0) : outcome.scale;
  const Math shift = drops_all ? outcome.fill : outcome.shift;
  const Math fill = outcome.fill;
  for (int64_t i = 0; i < kChunk; ++i) {
    const bool kept = words[i] >= threshold;
    const Math factor = kept ? scale : Math(0);
    const Math term = kept ? shift : fill;
    const Math product = values[i] * factor;
    values[i] = kAdds ? product + term : product;
  }
}

template <typename scalar_t, typename Math>
[[gnu::always_inline]] inline void drop_chunks(const scalar_t* input, scalar_t* output, int64_t size,
                                               int64_t begin, int64_t end, uint64_t seed,
                                               const Outcome<Math>& outcome) {
  const bool adds = outcome.shift != 0 || outcome.fill != 0;
  alignas(64) uint32_t words[kChunk];
  // Conversions have loops of their own: in the loop with the choice they would prevent vectorisation, and a
  // branch on a random bit costs more than all the rest.
  alignas(64) Math values[kChunk] = {};
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t start = chunk * kChunk;
    const int64_t count = std::min(kChunk, size - start);
    make_words(seed, static_cast<uint64_t>(start) / 4, words);
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<Math>(input[start + i]);
    if (adds) {
      apply<true>(values, words, outcome);
    } else {
      apply<false>(values, words, outcome);
    }
    for (int64_t i = 0; i < count; ++i) output[start + i] = static_cast<scalar_t>(values[i]);
  }
}

// Overloads can be compiled for several instruction sets, templates cannot.
#define PATCHCONV_DROP(scalar_t, Math)                                                             \
  PATCHCONV_CLONES void drop(const scalar_t* input, scalar_t* output, int64_t size, int64_t begin, \
                             int64_t end, uint64_t seed, const Outcome<Math>& outcome) {           \
    drop_chunks(input, output, size, begin, end, seed, outcome);                                   \
  }
PATCHCONV_DROP(float, float)
PATCHCONV_DROP(double, double)
PATCHCONV_DROP(c10::BFloat16, float)
PATCHCONV_DROP(c10::Half, float)
#undef PATCHCONV_DROP

Tensor dropout(const Tensor& input, const Tensor& seed, double p, double scale, double shift, double fill) {
  TORCH_CHECK(p >= 0 && p <= 1, "patchconv::_dropout: expected p to be between 0 and 1, got ", p);
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.numel() == 1,
              "patchconv::_dropout: expected seed to be one int64, got ", seed.sizes(), " of ",
              seed.scalar_type());
  TORCH_CHECK(input.is_non_overlapping_and_dense(),
              "patchconv::_dropout: expected input to be dense, got strides ", input.strides());
  Tensor output = at::empty_like(input);
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(output.strides() == input.strides());
  const uint64_t key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  const int64_t size = input.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "dropout", [&] {
    using Math = at::opmath_type<scalar_t>;
    const Outcome<Math> outcome{static_cast<Math>(scale), static_cast<Math>(shift), static_cast<Math>(fill),
                                philox_threshold(p)};
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    // Threads take whole chunks: a chunk starts at a block's first word.
    at::parallel_for(0, (size + kChunk - 1) / kChunk, kGrain / kChunk,
                     [&](int64_t begin, int64_t end) { drop(from, to, size, begin, end, key, outcome); });
  });
  return output;
}

TORCH_LIBRARY_IMPL(patchconv, CPU, m) { m.impl("_dropout", dropout); }

}  // namespace

}  // namespace patchconv
