// The elementwise map of a norm, with its activation: one read and one write of the tensor, nothing
// allocated. z is computed in float32, as a difference and then a fused product and sum; y is rounded once.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/norm.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 80 registers, 0 bytes of shared memory.
template <typename T, bool kSilu, int kTeam>
__global__ void __launch_bounds__(kNormThreads, 3)
    norm_map_rows_kernel(NormSizes n, Rows rows, NormAffine affine, float floor, const T* x, T* y) {
  using E = Elements<T>;
  const RowPart part = row_part<kTeam>(rows);
  if (part.number < 0) return;
  const int64_t image = part.row / n.channels, channel = part.row - image * n.channels;
  const Coefficients numbers = coefficients(affine, n.statistic(image, channel), channel);
  const T* from = x + part.row * rows.length;
  T* to = y + part.row * rows.length;
  typename E::Piece pieces[E::kVectors];
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
    pieces[v] = E::load(from, piece_at<T, kTeam>(part.begin, v), part.end, rows.aligned);
  }
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      pieces[v].at[i] = from_float<T>(activated<kSilu>(numbers.map(to_float(pieces[v].at[i])), floor));
    }
    E::store(to, pieces[v], piece_at<T, kTeam>(part.begin, v), part.end, rows.aligned);
  }
}

constexpr int kAtOnce = 4;

// Budget: 96 registers, 0 bytes of shared memory.
template <typename T, bool kSilu>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_map_pixels_kernel(NormSizes n, Pixels pixels, NormAffine affine, float floor, const T* x, T* y) {
  using E = Elements<T>;
  const PixelPart part = pixel_part<T>(n, pixels);
  if (part.left == 0) return;
  Coefficients numbers[E::kCount];
  load_coefficients(numbers, n, affine, part.image, part.channel, part.left);
  const int64_t base = part.image * n.pixels * n.channels + part.channel;
  const int down = kNormThreads / pixels.across;
  for (int64_t p = part.first; p < part.end; p += int64_t{kAtOnce} * down) {
    typename E::Piece pieces[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t pixel = p + u * down;
      if (pixel < part.end) pieces[u] = E::load(x + base + pixel * n.channels, 0, part.left, pixels.aligned);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t pixel = p + u * down;
      if (pixel >= part.end) break;
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        if (i >= part.left) break;
        pieces[u].at[i] = from_float<T>(activated<kSilu>(numbers[i].map(to_float(pieces[u].at[i])), floor));
      }
      E::store(y + base + pixel * n.channels, pieces[u], 0, part.left, pixels.aligned);
    }
  }
}

}  // namespace

void launch_norm_map(Type type, const NormShape& shape, const NormAffine& affine, Activation activation,
                     const void* x, void* y, Stream stream) {
  if (shape.elements() == 0) return;
  const NormSizes n = sizes_of(shape);
  const bool aligned = aligned_to_pieces(x) && aligned_to_pieces(y);
  const float floor = floor_of(activation);
  with_type(type, [&](auto t) {
    with_silu(activation, [&](auto silu) {
      using T = decltype(t);
      constexpr bool kSilu = decltype(silu)::value;
      const auto start = [&](auto kernel, Grid grid, const auto& parts) {
        launch(kernel, grid, kNormThreads, 0, stream, n, parts, affine, floor, static_cast<const T*>(x),
               static_cast<T*>(y));
      };
      if (shape.channels_last) {
        const Pixels pixels = pixels_of<T>(n, aligned, /*whole=*/false, kAtOnce);
        return start(norm_map_pixels_kernel<T, kSilu>, grid_of(n, pixels, Elements<T>::kCount), pixels);
      }
      const Rows rows = rows_of<T>(n.images * n.channels, n.pixels, aligned, /*whole=*/false);
      start(rows.team == kWarp ? norm_map_rows_kernel<T, kSilu, kWarp>
                               : norm_map_rows_kernel<T, kSilu, kNormThreads>,
            {rows.blocks()}, rows);
    });
  });
}

}  // namespace patchconv::kernels
