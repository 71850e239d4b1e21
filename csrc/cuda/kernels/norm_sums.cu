// The sums by channel that the gradients of norms need: one read of the gradient and of the input. The
// forward pass's map is computed again from the input, so that neither its result nor a mask is saved. Sums
// are float32 in a thread and a block, float64 over blocks.
#include "cuda/kernels/norm_sums.h"

#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/sums.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 80 registers, 64 bytes of shared memory.
template <typename T, bool kSilu, int kTeam>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_sums_rows_kernel(NormSizes n, Rows rows, NormAffine affine, float floor, const T* grad, const T* x,
                          Sums* out) {
  using E = Elements<T>;
  constexpr int kVectors = E::kVectors / 2;  // half as many, of each of two tensors
  const RowPart part = row_part<kTeam>(rows);
  Sums all{0, 0};
  if (part.number >= 0) {
    const int64_t image = part.row / n.channels, channel = part.row - image * n.channels;
    const Coefficients numbers = coefficients(affine, n.statistic(image, channel), channel);
    for (int64_t row = part.row; row < part.last; row += rows.stride) {
      const int64_t first = row * rows.length;
      for (int64_t begin = part.begin; begin < part.end; begin += row_step<T>(kTeam) / 2) {
        typename E::Piece grads[kVectors], xs[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int64_t place = piece_at<T, kTeam>(begin, v);
          grads[v] = E::load(grad + first, place, part.end, rows.aligned);  // 0 past the end
          xs[v] = E::load(x + first, place, part.end, rows.aligned);
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int left = E::left(piece_at<T, kTeam>(begin, v), part.end);
#pragma unroll
          for (int i = 0; i < E::kCount; ++i) {
            if (i >= left) continue;
            const float value = to_float(xs[v].at[i]);
            const float g = before_activation<T, kSilu>(to_float(grads[v].at[i]), numbers.map(value), floor);
            all.grad += g;
            all.product = multiply_add(g, value - numbers.mean, all.product);
          }
        }
      }
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    all = added(all, from_lane(all, distance));
  }
  if constexpr (kTeam > kWarp) {
    Sums* warps = shared_memory<Sums>();
    if (lane_index() == 0) warps[thread_index() / kWarp] = all;
    block_barrier();
    if (thread_index() == 0) {
      for (int w = 1; w < kTeam / kWarp; ++w) all = added(all, warps[w]);
    }
  }
  if (thread_index() % kTeam == 0 && part.number >= 0) out[part.number] = all;
}

constexpr int kAtOnce = 2;

// Budget: 128 registers, 16384 bytes of shared memory.
template <typename T, bool kSilu>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_sums_pixels_kernel(NormSizes n, Pixels pixels, NormAffine affine, float floor, const T* grad,
                            const T* x, Sums* out) {
  using E = Elements<T>;
  const PixelPart part = pixel_part<T>(n, pixels);
  const int64_t base = part.image * n.pixels * n.channels + part.channel;
  const int down = kNormThreads / pixels.across;
  Coefficients numbers[E::kCount];
  Sums all[E::kCount] = {};
  load_coefficients(numbers, n, affine, part.image, part.channel, part.left);
  for (int64_t p = part.first; p < part.end && part.left > 0; p += int64_t{kAtOnce} * down) {
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
      if (p + u * down >= part.end) break;
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        if (i >= part.left) break;
        const float value = to_float(xs[u].at[i]);
        const float g = before_activation<T, kSilu>(to_float(grads[u].at[i]), numbers[i].map(value), floor);
        all[i].grad += g;
        all[i].product = multiply_add(g, value - numbers[i].mean, all[i].product);
      }
    }
  }
  store_block_sums<E::kCount>(n, pixels, part, all, out);
}

// Adds up parts [outer][a][channels][b], one warp per (outer, channel). For batch norm (`last`) it also
// writes the parameters' gradients, and multiplies `totals` by the weight.
struct FinishSums {
  int64_t channels, a, b, results;
  bool last;
};

// Budget: 48 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kFinishThreads)
    finish_sums_kernel(const Sums* parts, FinishSums layout, NormAffine affine, Sums* totals,
                       NormBackward call) {
  const int64_t k = warp_number();
  if (k >= layout.results) return;
  const int64_t outer = k / layout.channels, channel = k - outer * layout.channels;
  const Total all = warp_total(layout.a * layout.b, [&](int64_t i) {
    const int64_t a = i / layout.b, b = i - a * layout.b;
    const Sums& part = parts[((outer * layout.a + a) * layout.channels + channel) * layout.b + b];
    return Total{part.grad, part.product};
  });
  if (lane_index() != 0) return;
  double weight = 1;
  if (layout.last) {
    if (call.grad_bias != nullptr) call.grad_bias[channel] = static_cast<float>(all.grad);
    if (call.grad_weight != nullptr) {
      call.grad_weight[channel] =
          static_cast<float>(all.product * inverse_deviation(affine, affine.var[channel]));
    }
    if (affine.weight != nullptr) weight = affine.weight[channel];
  }
  totals[k] = {static_cast<float>(weight * all.grad), static_cast<float>(weight * all.product)};
}

// One warp per group of an image: the totals of its channels, times their weights.
// Budget: 48 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kFinishThreads)
    group_sums_kernel(const Sums* totals, NormSizes n, const float* weight, Sums* groups) {
  const int64_t k = warp_number();
  if (k >= n.images * n.groups) return;
  const int64_t image = k / n.groups, first = (k - image * n.groups) * n.channels_a_group;
  const Total all = warp_total(n.channels_a_group, [&](int64_t i) {
    const Sums& one = totals[image * n.channels + first + i];
    const double w = weight == nullptr ? 1 : weight[first + i];
    return Total{w * one.grad, w * one.product};
  });
  if (lane_index() == 0) groups[k] = {static_cast<float>(all.grad), static_cast<float>(all.product)};
}

// One warp per channel: the parameters' gradients, over the images.
// Budget: 48 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kFinishThreads)
    parameter_sums_kernel(const Sums* totals, NormSizes n, NormAffine affine, NormBackward call) {
  const int64_t channel = warp_number();
  if (channel >= n.channels) return;
  const int64_t first = n.statistic(0, channel);
  const Total all = warp_total(n.images, [&](int64_t image) {
    const Sums& one = totals[image * n.channels + channel];
    const double invstd = inverse_deviation(affine, affine.var[first + image * n.groups]);
    return Total{one.grad, invstd * one.product};
  });
  if (lane_index() != 0) return;
  if (call.grad_bias != nullptr) call.grad_bias[channel] = static_cast<float>(all.grad);
  if (call.grad_weight != nullptr) call.grad_weight[channel] = static_cast<float>(all.product);
}

template <typename T>
Rows sum_rows(const NormShape& shape, bool aligned) {
  if (shape.groups == 0) return rows_of_batch<T>(shape, aligned);
  return rows_of<T>(shape.images * shape.channels, shape.pixels, aligned, /*whole=*/true);
}

template <typename T>
Pixels sum_pixels(const NormShape& shape, bool aligned) {
  return pixels_of<T>(sizes_of(shape), aligned, /*whole=*/true, kAtOnce);
}

struct Workspace {
  int64_t parts, totals, groups;  // how many Sums each takes
  int64_t floats() const { return 2 * (parts + totals + groups); }
};

template <typename T>
Workspace workspace(const NormShape& shape) {
  const NormSizes n = sizes_of(shape);
  const int64_t parts = shape.channels_last ? n.images * sum_pixels<T>(shape, true).chunks * n.channels
                                            : sum_rows<T>(shape, true).teams();
  if (shape.groups == 0) return {parts, n.channels, 0};
  return {parts, n.images * n.channels, n.images * n.groups};
}

template <typename T, bool kSilu>
const Sums* sums(const NormShape& shape, const NormAffine& affine, float floor, const NormBackward& call,
                 Stream stream) {
  const bool through_statistics = call.training && call.grad_input != nullptr;
  const bool parameters = call.grad_weight != nullptr || call.grad_bias != nullptr;
  if (!through_statistics && !parameters) return nullptr;
  const NormSizes n = sizes_of(shape);
  const T* grad = static_cast<const T*>(call.grad);
  const T* x = static_cast<const T*>(call.x);
  const bool aligned = aligned_to_pieces(grad) && aligned_to_pieces(x);
  const Workspace space = workspace<T>(shape);
  Sums* const parts = reinterpret_cast<Sums*>(call.workspace);
  Sums* const totals = parts + space.parts;
  Sums* const groups = totals + space.totals;
  const auto warps = [](int64_t count) { return Grid{divided_up(count, kFinishThreads / kWarp)}; };

  FinishSums layout{n.channels, 0, 1, space.totals, shape.groups == 0};
  if (shape.channels_last) {
    const Pixels pixels = sum_pixels<T>(shape, aligned);
    launch(norm_sums_pixels_kernel<T, kSilu>, grid_of(n, pixels, Elements<T>::kCount), kNormThreads,
           int64_t{kNormThreads} * Elements<T>::kCount * static_cast<int64_t>(sizeof(Sums)), stream, n,
           pixels, affine, floor, grad, x, parts);
    layout.a = pixels.chunks;
  } else {
    const Rows rows = sum_rows<T>(shape, aligned);
    launch(rows.team == kWarp ? norm_sums_rows_kernel<T, kSilu, kWarp>
                              : norm_sums_rows_kernel<T, kSilu, kNormThreads>,
           {rows.blocks()}, kNormThreads, sizeof(Sums) * (kNormThreads / kWarp), stream, n, rows, affine,
           floor, grad, x, parts);
    layout.a = shape.groups == 0 ? rows.sets / n.channels : 1;
    layout.b = rows.parts;
  }
  launch(finish_sums_kernel, warps(space.totals), kFinishThreads, 0, stream, parts, layout, affine, totals,
         call);
  if (shape.groups == 0) return through_statistics ? totals : nullptr;
  if (parameters) {
    launch(parameter_sums_kernel, warps(n.channels), kFinishThreads, 0, stream, totals, n, affine, call);
  }
  if (!through_statistics) return nullptr;
  launch(group_sums_kernel, warps(space.groups), kFinishThreads, 0, stream, totals, n, affine.weight, groups);
  return groups;
}

}  // namespace

int64_t norm_backward_workspace(Type type, const NormShape& shape) {
  int64_t floats = 0;
  with_type(type, [&](auto t) { floats = workspace<decltype(t)>(shape).floats(); });
  return floats;
}

const float* launch_norm_sums(Type type, const NormShape& shape, const NormAffine& affine,
                              Activation activation, const NormBackward& call, Stream stream) {
  const Sums* result = nullptr;
  with_type(type, [&](auto t) {
    with_silu(activation, [&](auto silu) {
      result = sums<decltype(t), decltype(silu)::value>(shape, affine, floor_of(activation), call, stream);
    });
  });
  return reinterpret_cast<const float*>(result);
}

}  // namespace patchconv::kernels
