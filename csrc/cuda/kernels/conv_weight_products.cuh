// The matrix products of the weight's gradient, from the tiles that conv_weight.cuh loads.
#pragma once

#include "cuda/kernels/conv_weight.cuh"

namespace patchconv::kernels {

// A warp's sums: kRows x 16 channels of the small grid by 16 of the big one, for each tap. Of every 16 x 8
// product, lane l holds what arch.cuh says of c.
template <typename T>
struct WarpSums {
  static constexpr int kRows = sizeof(T) == 4 ? 2 : 4;
  float at[kRows][kMostTaps][2][4] = {};

  static PATCHCONV_DEVICE int source() { return thread_index() / kWarp % 4 * 16; }  // first channel of each
  static PATCHCONV_DEVICE int output() { return thread_index() / kWarp / 4 * kRows * 16; }
};

// The row of the tile in which the first tap finds its column for a position.
PATCHCONV_DEVICE int big_row(const ConvWeightPlan& plan, int place) {
  return kSegmentPlaces + (place >> plan.columns_log2) * plan.run_columns +
         (place & ((1 << plan.columns_log2) - 1));
}

// Half precision: adds the products of a segment to the sums.
template <bool kStrict, typename T>
PATCHCONV_DEVICE void multiply(WarpSums<T>& sums, const T* tile, const ConvWeightPlan& plan, int taps,
                               int outputs) {
  const int lane = lane_index();
#pragma unroll
  for (int first = 0; first < kSegmentPlaces; first += 16) {
    uint32_t left[WarpSums<T>::kRows][4];
    const T* small = tile + (first + lane % 8 + lane / 16 * 8) * kTilePitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < WarpSums<T>::kRows; ++m) load_matrices<true>(left[m], small + m * 16);
    const T* big =
        tile + big_row(plan, first + lane % 16) * kTilePitch + WarpSums<T>::source() + lane / 16 * 8;
#pragma unroll
    for (int tap = 0; tap < kMostTaps; ++tap) {
      if (tap >= taps) break;
      uint32_t both[4];
      load_matrices<true>(both, big + plan.tap_begin[tap] * kTilePitch);
#pragma unroll
      for (int m = 0; m < WarpSums<T>::kRows; ++m) {
        if (m * 16 >= outputs) break;
        multiply_matrices(T(), sums.at[m][tap][0], left[m], {both[0], both[1]});
        multiply_matrices(T(), sums.at[m][tap][1], left[m], {both[2], both[3]});
      }
    }
  }
}

// A float32 as one tf32 number, or as the sum of two.
template <bool kStrict, int kCount>
struct Tf32 {
  uint32_t high[kCount], low[kCount];

  PATCHCONV_DEVICE void set(int i, float x) {
    high[i] = to_tf32(x);
    if constexpr (kStrict) {
      float rounded = bits_float(high[i]);
      if (rounded - rounded != 0 && x - x == 0) rounded = bits_float(float_bits(x) & 0xffffe000u);
      high[i] = float_bits(rounded);
      low[i] = to_tf32(x == rounded ? 0 : x - rounded);
    }
  }
};

template <bool kStrict>
PATCHCONV_DEVICE void multiply(float (&sum)[4], const Tf32<kStrict, 4>& a, const Tf32<kStrict, 2>& b) {
  if constexpr (kStrict) {
    multiply_matrices(float(), sum, a.low, b.high);
    multiply_matrices(float(), sum, a.high, b.low);
  }
  multiply_matrices(float(), sum, a.high, b.high);
}

// float32. Strict: products of 16 positions are summed on their own first.
template <bool kStrict>
PATCHCONV_DEVICE void multiply(WarpSums<float>& sums, const float* tile, const ConvWeightPlan& plan, int taps,
                               int outputs) {
  using Sums = WarpSums<float>;
  const int place = lane_index() % 4, channel = lane_index() / 4;
#pragma unroll 1
  for (int part = 0; part < kSegmentPlaces; part += 16) {
    Sums part_sums;
    Sums& to = kStrict ? part_sums : sums;
#pragma unroll
    for (int first = part; first < part + 16; first += 8) {
      Tf32<kStrict, 4> left[Sums::kRows];
      const float* small = tile + (first + place) * kTilePitch + Sums::output() + channel;
#pragma unroll
      for (int m = 0; m < Sums::kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[m].set(i, small[i / 2 * 4 * kTilePitch + m * 16 + i % 2 * 8]);
      }
      const float* big = tile + (big_row(plan, first) + place) * kTilePitch + Sums::source() + channel;
#pragma unroll
      for (int tap = 0; tap < kMostTaps; ++tap) {
        if (tap >= taps) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Tf32<kStrict, 2> right;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            right.set(i, big[(plan.tap_begin[tap] + 4 * i) * kTilePitch + n * 8]);
          }
#pragma unroll
          for (int m = 0; m < Sums::kRows; ++m) {
            if (Sums::output() + m * 16 < outputs) multiply<kStrict>(to.at[m][tap][n], left[m], right);
          }
        }
      }
    }
    if constexpr (kStrict) {
#pragma unroll
      for (int i = 0; i < Sums::kRows * kMostTaps * 8; ++i) {
        (&sums.at[0][0][0][0])[i] += (&part_sums.at[0][0][0][0])[i];
      }
    }
  }
}

}  // namespace patchconv::kernels
