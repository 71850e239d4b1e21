// Mean and variance, with one read of the tensor. Each thread takes the mean of what it holds in registers
// and the squared differences from it, so that a large mean costs no digits. Parts are combined by the
// formula of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979), in an order that does not depend on the device. A second small kernel combines what the
// blocks found, in float64.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/moments.cuh"
#include "cuda/kernels/norm.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 80 registers, 96 bytes of shared memory.
template <typename T, int kTeam>
__global__ void __launch_bounds__(kNormThreads, 2) moments_rows_kernel(Rows rows, const T* x, Moments* out) {
  using E = Elements<T>;
  const RowPart part = row_part<kTeam>(rows);
  Moments all{0, 0, 0};
  for (int64_t row = part.row; row < part.last; row += rows.stride) {
    const T* from = x + row * rows.length;
    for (int64_t begin = part.begin; begin < part.end; begin += row_step<T>(kTeam)) {
      typename E::Piece pieces[E::kVectors];
      int left[E::kVectors];
#pragma unroll
      for (int v = 0; v < E::kVectors; ++v) {
        const int64_t place = piece_at<T, kTeam>(begin, v);
        left[v] = E::left(place, part.end);
        pieces[v] = E::load(from, place, part.end, rows.aligned);
      }
      Moments mine{0, 0, 0};
      float total = 0;
#pragma unroll
      for (int v = 0; v < E::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < E::kCount; ++i) {
          if (i >= left[v]) continue;
          total += to_float(pieces[v].at[i]);
          mine.count += 1;
        }
      }
      if (mine.count == 0) continue;
      mine.mean = total / mine.count;
#pragma unroll
      for (int v = 0; v < E::kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < E::kCount; ++i) {
          if (i >= left[v]) continue;
          const float difference = to_float(pieces[v].at[i]) - mine.mean;
          mine.squares = multiply_add(difference, difference, mine.squares);
        }
      }
      all = merged(all, mine);
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) all = merged(all, from_lane(all, distance));
  if constexpr (kTeam > kWarp) {
    Moments* warps = shared_memory<Moments>();
    if (lane_index() == 0) warps[thread_index() / kWarp] = all;
    block_barrier();
    if (thread_index() == 0) {
      for (int w = 1; w < kTeam / kWarp; ++w) all = merged(all, warps[w]);
    }
  }
  if (thread_index() % kTeam == 0 && part.number >= 0) out[part.number] = all;
}

constexpr int kAtOnce = 4;

// Budget: 128 registers, 17408 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kNormThreads, 2)
    moments_pixels_kernel(NormSizes n, Pixels pixels, const T* x, Moments* out) {
  using E = Elements<T>;
  const PixelPart part = pixel_part<T>(n, pixels);
  const T* from = x + part.image * n.pixels * n.channels + part.channel;
  const int down = kNormThreads / pixels.across;
  float count = 0, mean[E::kCount] = {}, squares[E::kCount] = {};
  for (int64_t p = part.first; p < part.end && part.left > 0; p += int64_t{kAtOnce} * down) {
    typename E::Piece pieces[kAtOnce];
    int here = 0;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t pixel = p + u * down;
      if (pixel < part.end) {
        pieces[u] = E::load(from + pixel * n.channels, 0, part.left, pixels.aligned);
        ++here;
      }
    }
    const auto taken = static_cast<float>(here);
    count += taken;
    const float each = 1 / taken, share = taken / count;
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      float total = 0, more = 0;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (u < here) total += to_float(pieces[u].at[i]);
      }
      const float average = total * each;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (u >= here) continue;
        const float difference = to_float(pieces[u].at[i]) - average;
        more = multiply_add(difference, difference, more);
      }
      const float delta = average - mean[i];
      squares[i] = multiply_add(delta * (count - taken) * share, delta, squares[i] + more);
      mean[i] = multiply_add(delta, share, mean[i]);
    }
  }
  // Combines the block's threads of the same channels by halves: rows [half, 2 half) give theirs to rows [0,
  // half).
  const int width = pixels.across * E::kCount;
  float* counts = shared_memory<float>();
  float* means = counts + kNormThreads;
  float* sums = means + kNormThreads * E::kCount;
  const int row = thread_index() / pixels.across, across = thread_index() % pixels.across;
  for (int half = down / 2; half > 0; half /= 2) {
    if (row >= half && row < 2 * half) {
      if (across == 0) counts[row] = count;
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        means[row * width + across * E::kCount + i] = mean[i];
        sums[row * width + across * E::kCount + i] = squares[i];
      }
    }
    block_barrier();
    if (row < half) {
      const float more = counts[row + half];
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        const int place = (row + half) * width + across * E::kCount + i;
        const Moments all = merged({count, mean[i], squares[i]}, {more, means[place], sums[place]});
        mean[i] = all.mean;
        squares[i] = all.squares;
      }
      count += more;
    }
  }
  if (row != 0) return;
  Moments* to = out + (part.image * pixels.chunks + part.chunk) * n.channels + part.channel;
#pragma unroll
  for (int i = 0; i < E::kCount; ++i) {
    if (i < part.left) to[i] = {count, mean[i], squares[i]};
  }
}

// Parts [outer][a][kept][b]. Result (outer, kept) combines all a and b.
struct Parts {
  int64_t kept, a, b;
};

constexpr int kFinishThreads = 256;

// Budget: 64 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kFinishThreads)
    finish_moments_kernel(const Moments* parts, Parts layout, int64_t results, NormStatistics call) {
  const int64_t k = block_x() * (kFinishThreads / kWarp) + thread_index() / kWarp;
  if (k >= results) return;  // a whole warp
  const int64_t outer = k / layout.kept, kept = k - outer * layout.kept;
  double count = 0, mean = 0, squares = 0;
  const auto merge = [&](double n, double m, double s) {
    const double total = count + n;
    if (total == 0) return;
    const double delta = m - mean;
    mean += delta * (n / total);
    squares += s + delta * delta * (count * (n / total));
    count = total;
  };
  for (int64_t i = lane_index(); i < layout.a * layout.b; i += kWarp) {
    const int64_t a = i / layout.b, b = i - a * layout.b;
    const Moments& part = parts[((outer * layout.a + a) * layout.kept + kept) * layout.b + b];
    merge(part.count, part.mean, part.squares);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const double n = shuffle_xor(count, distance), m = shuffle_xor(mean, distance),
                 s = shuffle_xor(squares, distance);
    merge(n, m, s);
  }
  if (lane_index() != 0) return;
  call.mean[k] = static_cast<float>(mean);
  const auto var = static_cast<float>(squares / count);
  call.var[k] = call.inverse ? 1 / square_root(var + call.eps) : var;
  if (call.running_mean != nullptr) {
    call.running_mean[k] =
        multiply_add(call.momentum, static_cast<float>(mean) - call.running_mean[k], call.running_mean[k]);
  }
  if (call.running_var != nullptr) {
    const auto unbiased = static_cast<float>(squares / (count > 1 ? count - 1 : 1));
    call.running_var[k] = multiply_add(call.momentum, unbiased - call.running_var[k], call.running_var[k]);
  }
}

template <typename T>
Rows moment_rows(const NormShape& shape, bool aligned) {
  if (shape.groups == 0) return rows_of_batch<T>(shape, aligned);
  return rows_of<T>(shape.statistics(), shape.share(), aligned, /*whole=*/true);
}

template <typename T>
Pixels moment_pixels(const NormShape& shape, bool aligned) {
  return pixels_of<T>(sizes_of(shape), aligned, /*whole=*/true, kAtOnce);
}

template <typename T>
void statistics(const NormShape& shape, const NormStatistics& call, Stream stream) {
  const bool aligned = aligned_to_pieces(call.x);
  const T* x = static_cast<const T*>(call.x);
  auto* out = reinterpret_cast<Moments*>(call.workspace);
  const NormSizes n = sizes_of(shape);
  Parts layout{};
  if (shape.channels_last) {
    const Pixels pixels = moment_pixels<T>(shape, aligned);
    launch(moments_pixels_kernel<T>, grid_of(n, pixels, Elements<T>::kCount), kNormThreads,
           int64_t{kNormThreads} * (1 + 2 * Elements<T>::kCount) * static_cast<int64_t>(sizeof(float)),
           stream, n, pixels, x, out);
    layout = shape.groups == 0 ? Parts{n.channels, pixels.chunks, 1}
                               : Parts{n.groups, pixels.chunks, n.channels_a_group};
  } else {
    const Rows rows = moment_rows<T>(shape, aligned);
    launch(rows.team == kWarp ? moments_rows_kernel<T, kWarp> : moments_rows_kernel<T, kNormThreads>,
           {rows.blocks()}, kNormThreads, sizeof(Moments) * (kNormThreads / kWarp), stream, rows, x, out);
    layout = shape.groups == 0 ? Parts{n.channels, rows.sets / n.channels, rows.parts}
                               : Parts{shape.statistics(), 1, rows.parts};
  }
  launch(finish_moments_kernel, {divided_up(shape.statistics(), kFinishThreads / kWarp)}, kFinishThreads, 0,
         stream, out, layout, shape.statistics(), call);
}

}  // namespace

bool serves(Type type, const NormShape& shape) {
  const int64_t a_block = kWarp * (type == Type::kFloat ? 4 : 8);
  return !shape.channels_last || shape.channels <= a_block * kMostBlocksDown;
}

int64_t norm_statistics_workspace(Type type, const NormShape& shape) {
  int64_t parts = 0;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (shape.channels_last) {
      const NormSizes n = sizes_of(shape);
      parts = n.images * moment_pixels<T>(shape, true).chunks * n.channels;
    } else {
      parts = moment_rows<T>(shape, true).teams();
    }
  });
  return parts * static_cast<int64_t>(sizeof(Moments) / sizeof(float));
}

void launch_norm_statistics(Type type, const NormShape& shape, const NormStatistics& call, Stream stream) {
  if (shape.elements() == 0) throw LaunchError("statistics of no elements");
  with_type(type, [&](auto t) { statistics<decltype(t)>(shape, call, stream); });
}

}  // namespace patchconv::kernels
