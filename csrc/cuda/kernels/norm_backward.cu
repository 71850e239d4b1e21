// Gradients of a norm with its activation: after the sums (norm_sums.cu), a second read of the gradient and
// of the input, and one write.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/norm_sums.h"
#include "cuda/kernels/sums.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kAtOnce = 2;

// grad_input = by_grad * (gradient of z); if through the statistics, plus by_distance * (x - mean) + rest.
struct Slopes {
  Coefficients z;
  float by_grad, by_distance, rest;
  bool through;

  template <typename T, bool kSilu>
  PATCHCONV_DEVICE float gradient(float grad, float x, float floor) const {
    const float g = before_activation<T, kSilu>(grad, z.map(x), floor);
    // Without the statistics, x must not count: it may be infinite or NaN.
    return through ? multiply_add(by_grad, g, multiply_add(by_distance, x - z.mean, rest)) : by_grad * g;
  }
};

PATCHCONV_DEVICE Slopes slopes(const Coefficients& z, float invstd, const Sums& total, float each) {
  return {z, z.scale, -invstd * invstd * invstd * (total.product * each), -invstd * (total.grad * each),
          true};
}

// `totals`: those of the statistics; null if the statistics are constants.
PATCHCONV_DEVICE Slopes slopes(const NormSizes& n, const NormAffine& affine, const Sums* totals, float each,
                               int64_t image, int64_t channel) {
  const int64_t statistic = n.statistic(image, channel);
  const Coefficients z = coefficients(affine, statistic, channel);
  if (totals == nullptr) return {z, z.scale, 0, 0, false};
  return slopes(z, inverse_deviation(affine, affine.var[statistic]), totals[statistic], each);
}

// Those of a piece's channels, of which `left` exist.
template <int kCount>
PATCHCONV_DEVICE void load_slopes(Slopes (&to)[kCount], const NormSizes& n, const NormAffine& affine,
                                  const Sums* totals, float each, int64_t image, int64_t channel, int left) {
  if (n.groups > 0 || totals == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) to[i] = slopes(n, affine, totals, each, image, channel + i);
    }
    return;
  }
  Coefficients z[kCount];
  float var[kCount], sums[2 * kCount];
  load_coefficients(z, n, affine, image, channel, left);
  load_channels(var, affine.var, channel, left);
  load_channels(sums, reinterpret_cast<const float*>(totals), 2 * channel, 2 * left);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Sums total{sums[2 * i], sums[2 * i + 1]};
    to[i] = slopes(z[i], inverse_deviation(affine, var[i]), total, each);
  }
}

// Budget: 80 registers, 0 bytes of shared memory.
template <typename T, bool kSilu, int kTeam>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_gradient_rows_kernel(NormSizes n, Rows rows, NormAffine affine, float floor, const Sums* totals,
                              float each, const T* grad, const T* x, T* out) {
  using E = Elements<T>;
  constexpr int kVectors = E::kVectors / 2;
  const RowPart part = row_part<kTeam>(rows);
  if (part.number < 0) return;
  const int64_t image = part.row / n.channels, channel = part.row - image * n.channels;
  const Slopes numbers = slopes(n, affine, totals, each, image, channel);
  const int64_t row = part.row * rows.length;
  for (int64_t begin = part.begin; begin < part.end; begin += row_step<T>(kTeam) / 2) {
    typename E::Piece grads[kVectors], xs[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t place = piece_at<T, kTeam>(begin, v);
      grads[v] = E::load(grad + row, place, part.end, rows.aligned);
      xs[v] = E::load(x + row, place, part.end, rows.aligned);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        grads[v].at[i] =
            from_float<T>(numbers.gradient<T, kSilu>(to_float(grads[v].at[i]), to_float(xs[v].at[i]), floor));
      }
      E::store(out + row, grads[v], piece_at<T, kTeam>(begin, v), part.end, rows.aligned);
    }
  }
}

// Budget: 112 registers, 0 bytes of shared memory.
template <typename T, bool kSilu>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_gradient_pixels_kernel(NormSizes n, Pixels pixels, NormAffine affine, float floor,
                                const Sums* totals, float each, const T* grad, const T* x, T* out) {
  using E = Elements<T>;
  const PixelPart part = pixel_part<T>(n, pixels);
  if (part.left == 0) return;
  Slopes numbers[E::kCount];
  load_slopes(numbers, n, affine, totals, each, part.image, part.channel, part.left);
  const int64_t base = part.image * n.pixels * n.channels + part.channel;
  const int down = kNormThreads / pixels.across;
  for (int64_t p = part.first; p < part.end; p += int64_t{kAtOnce} * down) {
    typename E::Piece grads[kAtOnce], xs[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t pixel = p + u * down;
      if (pixel >= part.end) break;
      grads[u] = E::load(grad + base + pixel * n.channels, 0, part.left, pixels.aligned);
      xs[u] = E::load(x + base + pixel * n.channels, 0, part.left, pixels.aligned);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t pixel = p + u * down;
      if (pixel >= part.end) break;
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        if (i >= part.left) break;
        grads[u].at[i] = from_float<T>(
            numbers[i].template gradient<T, kSilu>(to_float(grads[u].at[i]), to_float(xs[u].at[i]), floor));
      }
      E::store(out + base + pixel * n.channels, grads[u], 0, part.left, pixels.aligned);
    }
  }
}

template <typename T, bool kSilu>
void gradient(const NormShape& shape, const NormAffine& affine, float floor, const NormBackward& call,
              const Sums* through, Stream stream) {
  const NormSizes n = sizes_of(shape);
  const T* grad = static_cast<const T*>(call.grad);
  const T* x = static_cast<const T*>(call.x);
  T* out = static_cast<T*>(call.grad_input);
  const bool aligned = aligned_to_pieces(grad) && aligned_to_pieces(x) && aligned_to_pieces(out);
  const auto each = static_cast<float>(1.0 / static_cast<double>(shape.share()));
  if (shape.channels_last) {
    const Pixels pixels = pixels_of<T>(n, aligned, /*whole=*/false, kAtOnce);
    launch(norm_gradient_pixels_kernel<T, kSilu>, grid_of(n, pixels, Elements<T>::kCount), kNormThreads, 0,
           stream, n, pixels, affine, floor, through, each, grad, x, out);
  } else {
    const Rows rows = rows_of<T>(n.images * n.channels, n.pixels, aligned, /*whole=*/false);
    launch(rows.team == kWarp ? norm_gradient_rows_kernel<T, kSilu, kWarp>
                              : norm_gradient_rows_kernel<T, kSilu, kNormThreads>,
           {rows.blocks()}, kNormThreads, 0, stream, n, rows, affine, floor, through, each, grad, x, out);
  }
}

}  // namespace

void launch_norm_backward(Type type, const NormShape& shape, const NormAffine& affine, Activation activation,
                          const NormBackward& call, Stream stream) {
  if (shape.elements() == 0) throw LaunchError("the gradient of a norm of no elements");
  const auto* through =
      reinterpret_cast<const Sums*>(launch_norm_sums(type, shape, affine, activation, call, stream));
  if (call.grad_input == nullptr) return;
  with_type(type, [&](auto t) {
    with_silu(activation, [&](auto silu) {
      gradient<decltype(t), decltype(silu)::value>(shape, affine, floor_of(activation), call, through,
                                                   stream);
    });
  });
}

}  // namespace patchconv::kernels
