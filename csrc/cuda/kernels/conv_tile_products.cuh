// The products of the halo kernel (conv_tiles.cu). A step of the sum, one tap of one chunk, has two halves of
// 32 bytes of channels. While a warp multiplies a half, it loads the matrices of the next one. Numbers are in
// the form that tensor cores take, except those of places in strict float32, which are split here.
#pragma once

#include "cuda/kernels/conv_tiles.cuh"

namespace patchconv::kernels {

constexpr int kHalfBytes = kChunkBytes / 2;

template <typename Shape>
using Sums = float[Shape::kMatrices][8][4];

// Matrices in registers: all of a half's places, and 16 outputs of 64. Those of the other half, or of the
// next 16 outputs, are being loaded meanwhile.
template <bool kStrict, typename Shape>
struct Matrices {
  uint32_t places[2][Shape::kMatrices][4];
  uint32_t weights[2][4], weights_low[kStrict ? 2 : 1][4];

  // Of 16 outputs whose rows begin at `rows`.
  PATCHCONV_DEVICE void load_weights(int i, const char* rows) {
    load_matrices<false>(weights[i], rows);
    if constexpr (kStrict) load_matrices<false>(weights_low[i], rows + Shape::kPlaneOfWeights);
  }
};

// For each of a warp's matrices of places, where the row that this lane gives begins in a halo tile, at the
// first tap.
template <typename Shape>
PATCHCONV_DEVICE void rows_of_places(const ConvCall& call, const Tiling& tiling, const Work& work, int first,
                                     int (&rows)[Shape::kMatrices]) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < Shape::kMatrices; ++m) {
    const int place = first + m * 16 + lane % 16;
    int y = place >> tiling.plan.columns_log2, x = place & ((1 << tiling.plan.columns_log2) - 1);
    // Beyond the last row and column nothing is stored, whatever is read.
    if (y >= tiling.plan.high) y = tiling.plan.high - 1;
    if (x >= tiling.plan.broad) x = tiling.plan.broad - 1;
    const int image = quotient(work.first + y, tiling.per_image);
    y += work.first - image * static_cast<int>(call.lines[1].count);
    const int row = image * tiling.plan.image_rows + (y - work.first) * tiling.plan.row_pitch;
    const int in_tile = row * tiling.plan.columns + x * static_cast<int>(call.lines[2].step);
    rows[m] = kept(in_tile * kChunkBytes + lane / 16 * 16);
  }
}

// Where the row that this lane gives of a stage's weights begins, in the first half.
PATCHCONV_DEVICE int row_of_weights(int first) {
  const int lane = lane_index();
  return piece_at(first + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

PATCHCONV_DEVICE void split_matrix(uint32_t (&matrix)[4], uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split_tf32(matrix[i], matrix[i], low[i]);
}

// Multiplies half kHalf of a step by the weights whose rows begin at `weights`, and loads the next half: of
// places the rows that begin at next_places, of weights at next_weights.
template <typename T, bool kStrict, int kHalf, typename Shape>
PATCHCONV_DEVICE void multiply_half(Sums<Shape>& sums, Matrices<kStrict, Shape>& matrices,
                                    const char* weights, const char* const (&next_places)[Shape::kMatrices],
                                    const char* next_weights) {
  auto& a = matrices.places[kHalf];
  [[maybe_unused]] uint32_t a_low[Shape::kMatrices][4];
  if constexpr (kStrict) {
#pragma unroll
    for (int m = 0; m < Shape::kMatrices; ++m) split_matrix(a[m], a_low[m]);
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    matrices.load_weights((pair + 1) % 2, pair < 3 ? weights + (pair + 1) * 16 * kChunkBytes : next_weights);
    if (pair < Shape::kMatrices) load_matrices<false>(matrices.places[1 - kHalf][pair], next_places[pair]);
    const auto& both = matrices.weights[pair % 2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t b[2] = {both[2 * n], both[2 * n + 1]};
#pragma unroll
      for (int m = 0; m < Shape::kMatrices; ++m) {
        float (&sum)[4] = sums[m][2 * pair + n];
        if constexpr (kStrict) {
          const auto& both_low = matrices.weights_low[pair % 2];
          const uint32_t low[2] = {both_low[2 * n], both_low[2 * n + 1]};
          multiply_matrices(T(), sum, a_low[m], b);
          multiply_matrices(T(), sum, a[m], low);
        }
        multiply_matrices(T(), sum, a[m], b);
      }
    }
  }
}

}  // namespace patchconv::kernels
