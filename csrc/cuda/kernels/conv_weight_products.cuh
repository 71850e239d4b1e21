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

// Where a lane finds what it multiplies, in bytes of a tile: of the small grid's first positions, and of the
// big grid for the first of each kAtOnce positions that are multiplied at once, to which a tap adds its own.
template <typename T>
struct WarpPlaces {
  static constexpr int kAtOnce = sizeof(T) == 4 ? 8 : 16;
  int small, big[kSegmentPlaces / kAtOnce];

  PATCHCONV_DEVICE explicit WarpPlaces(const ConvWeightPlan& plan) {
    const auto bytes = [](int row, int channel) {
      return (row * kTilePitch + channel) * static_cast<int>(sizeof(T));
    };
    const int lane = lane_index();
    // Of 16-bit types as load_matrices wants them; of float32 what arch.cuh says of a and b.
    const int row = sizeof(T) == 4 ? lane % 4 : lane % 16;
    const int channel = sizeof(T) == 4 ? lane / 4 : lane / 16 * 8;
    small = sizeof(T) == 4 ? bytes(row, WarpSums<T>::output() + channel)
                           : bytes(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
#pragma unroll
    for (int i = 0; i < kSegmentPlaces / kAtOnce; ++i) {
      // 8 positions, as many as a row has at least, are neighbours.
      const int place = sizeof(T) == 4 ? big_row(plan, i * kAtOnce) + row : big_row(plan, i * kAtOnce + row);
      big[i] = bytes(place, WarpSums<T>::source() + channel);
    }
  }
};

template <typename T>
PATCHCONV_DEVICE const T* at_bytes(const T* tile, int bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(tile) + bytes);
}

// Half precision: adds the products of a segment to the sums. If `kTaps` is not 0, there are so many taps and
// 64 channels of the small grid.
template <bool kStrict, int kTaps, typename T>
PATCHCONV_DEVICE void multiply(WarpSums<T>& sums, const T* tile, const ConvWeightPlan& plan,
                               const WarpPlaces<T>& places, int taps, int outputs) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t left[WarpSums<T>::kRows][4];
#pragma unroll
    for (int m = 0; m < WarpSums<T>::kRows; ++m) {
      load_matrices<true>(left[m], at_bytes(tile, places.small) + step * 16 * kTilePitch + m * 16);
    }
#pragma unroll
    for (int tap = 0; tap < (kTaps > 0 ? kTaps : kMostTaps); ++tap) {
      if (kTaps == 0 && tap >= taps) break;
      uint32_t both[4];
      load_matrices<true>(both, at_bytes(tile, places.big[step] + plan.tap_bytes[tap]));
#pragma unroll
      for (int m = 0; m < WarpSums<T>::kRows; ++m) {
        if (kTaps == 0 && m * 16 >= outputs) break;
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
template <bool kStrict, int kTaps>
PATCHCONV_DEVICE void multiply(WarpSums<float>& sums, const float* tile, const ConvWeightPlan& plan,
                               const WarpPlaces<float>& places, int taps, int outputs) {
  using Sums = WarpSums<float>;
#pragma unroll
  for (int part = 0; part < kSegmentPlaces; part += 16) {
    Sums part_sums;
    Sums& to = kStrict ? part_sums : sums;
#pragma unroll
    for (int first = part; first < part + 16; first += 8) {
      Tf32<kStrict, 4> left[Sums::kRows];
      const float* small = at_bytes(tile, places.small) + first * kTilePitch;
#pragma unroll
      for (int m = 0; m < Sums::kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[m].set(i, small[i / 2 * 4 * kTilePitch + m * 16 + i % 2 * 8]);
      }
#pragma unroll
      for (int tap = 0; tap < (kTaps > 0 ? kTaps : kMostTaps); ++tap) {
        if (kTaps == 0 && tap >= taps) break;
        const float* big = at_bytes(tile, places.big[first / 8] + plan.tap_bytes[tap]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Tf32<kStrict, 2> right;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            right.set(i, big[4 * i * kTilePitch + n * 8]);
          }
#pragma unroll
          for (int m = 0; m < Sums::kRows; ++m) {
            if (kTaps == 0 && Sums::output() + m * 16 >= outputs) break;
            multiply<kStrict>(to.at[m][tap][n], left[m], right);
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
