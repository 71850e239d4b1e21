// Layer norm over rows: one warp per row, or one block if rows are long. A row is read twice, the second time
// from the caches, so memory sees one read and one write of the tensor. The gradient likewise takes two reads
// and one write, and one more read of both tensors for the gradients of the parameters. Sums are float32 in a
// thread, about the mean of what it has read (norm_statistics.cu says how). Over blocks they are float64, in
// an order that depends on the shape alone.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/moments.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/norm_layer.h"
#include "cuda/kernels/sums.cuh"

namespace patchconv::kernels {

namespace {

// The weights or biases of a piece; `otherwise` if there are none.
template <int kCount>
PATCHCONV_DEVICE void load_parameters(float (&to)[kCount], const float* from, float otherwise, int64_t column,
                                      int count) {
  if (from != nullptr) return load_channels(to, from, column, count);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = otherwise;
}

// Gives every thread of a team the value of its first one. All threads of the block take part.
template <int kTeam, typename V>
PATCHCONV_DEVICE V from_first(const V& value) {
  V* slots = shared_memory<V>();
  block_barrier();  // what was in the slots has been read
  if (thread_index() % kTeam == 0) slots[thread_index() / kTeam] = value;
  block_barrier();
  return slots[thread_index() / kTeam];
}

// The sum of a team's values, over its warps in order; only the team's first thread gets it.
template <int kTeam, typename V, typename Add>
PATCHCONV_DEVICE V team_total(V all, Add add) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) all = add(all, from_lane(all, distance));
  if constexpr (kTeam > kWarp) {
    V* warps = shared_memory<V>();
    block_barrier();
    if (lane_index() == 0) warps[thread_index() / kWarp] = all;
    block_barrier();
    if (thread_index() == 0) {
      for (int w = 1; w < kTeam / kWarp; ++w) all = add(all, warps[w]);
    }
  }
  return from_first<kTeam>(all);
}

// Calls use(first column, pieces...) for this thread's pieces of a row.
template <typename T, int kTeam, typename Use>
PATCHCONV_DEVICE void each_piece(const LayerNorm& norm, Use use) {
  constexpr int kCount = Elements<T>::kCount;
  for (int64_t column = thread_index() % kTeam * kCount; column < norm.columns;
       column += int64_t{kTeam} * kCount) {
    const int64_t left = norm.columns - column;
    use(column, left < kCount ? static_cast<int>(left) : kCount);
  }
}

// Budget: 48 registers, 96 bytes of shared memory.
template <typename T, int kTeam>
__global__ void __launch_bounds__(kNormThreads)
    layer_norm_kernel(LayerNorm norm, bool aligned, const T* x, T* y, float* mean, float* rstd) {
  using E = Elements<T>;
  const int64_t row = block_x() * (kNormThreads / kTeam) + thread_index() / kTeam;
  const bool there = row < norm.rows;
  const T* from = x + row * norm.columns;
  Moments all{0, 0, 0};
  if (there) {
    each_piece<T, kTeam>(norm, [&](int64_t column, int count) {
      const typename E::Piece piece = E::load(from + column, 0, count, aligned);
      float total = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) total += i < count ? to_float(piece.at[i]) : 0;
      const auto n = static_cast<float>(count);
      const float average = total * (1 / n);
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        const float difference = i < count ? to_float(piece.at[i]) - average : 0;
        squares = multiply_add(difference, difference, squares);
      }
      all = merged(all, {n, average, squares});
    });
  }
  all = team_total<kTeam>(all, [](const Moments& a, const Moments& b) { return merged(a, b); });
  if (!there) return;
  const float scale = 1 / square_root(all.squares / all.count + norm.eps);
  if (thread_index() % kTeam == 0) {
    mean[row] = all.mean;
    rstd[row] = scale;
  }
  T* to = y + row * norm.columns;
  each_piece<T, kTeam>(norm, [&](int64_t column, int count) {
    typename E::Piece piece = E::load(from + column, 0, count, aligned);
    float weights[E::kCount], biases[E::kCount];
    load_parameters(weights, norm.weight, 1, column, count);
    load_parameters(biases, norm.bias, 0, column, count);
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      if (i >= count) break;
      const float normal = (to_float(piece.at[i]) - all.mean) * scale;
      piece.at[i] = from_float<T>(multiply_add(normal, weights[i], biases[i]));
    }
    E::store(to + column, piece, 0, count, aligned);
  });
}

// Budget: 56 registers, 64 bytes of shared memory.
template <typename T, int kTeam>
__global__ void __launch_bounds__(kNormThreads)
    layer_norm_gradient_kernel(LayerNorm norm, bool aligned, LayerNormBackward call) {
  using E = Elements<T>;
  const int64_t row = block_x() * (kNormThreads / kTeam) + thread_index() / kTeam;
  const bool there = row < norm.rows;
  const T* grad = static_cast<const T*>(call.grad) + row * norm.columns;
  const T* x = static_cast<const T*>(call.x) + row * norm.columns;
  const float mean = there ? call.mean[row] : 0, scale = there ? call.rstd[row] : 0;
  Sums all{0, 0};
  if (there) {
    each_piece<T, kTeam>(norm, [&](int64_t column, int count) {
      const typename E::Piece grads = E::load(grad + column, 0, count, aligned);
      const typename E::Piece xs = E::load(x + column, 0, count, aligned);
      float weights[E::kCount];
      load_parameters(weights, norm.weight, 1, column, count);
#pragma unroll
      for (int i = 0; i < E::kCount; ++i) {
        if (i >= count) break;
        const float g = to_float(grads.at[i]) * weights[i];
        all.grad += g;
        all.product = multiply_add(g, (to_float(xs.at[i]) - mean) * scale, all.product);
      }
    });
  }
  all = team_total<kTeam>(all, [](const Sums& a, const Sums& b) { return added(a, b); });
  if (!there) return;
  const float each = 1 / static_cast<float>(norm.columns);
  const float by_normal = -all.product * each, rest = -all.grad * each;
  T* out = static_cast<T*>(call.grad_input) + row * norm.columns;
  each_piece<T, kTeam>(norm, [&](int64_t column, int count) {
    typename E::Piece grads = E::load(grad + column, 0, count, aligned);
    const typename E::Piece xs = E::load(x + column, 0, count, aligned);
    float weights[E::kCount];
    load_parameters(weights, norm.weight, 1, column, count);
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      if (i >= count) break;
      const float normal = (to_float(xs.at[i]) - mean) * scale;
      const float g = to_float(grads.at[i]) * weights[i];
      grads.at[i] = from_float<T>(scale * multiply_add(by_normal, normal, g + rest));
    }
    E::store(out + column, grads, 0, count, aligned);
  });
}

// Sums per column over a chunk of rows: of the gradient, and of its product with the normalised value.
// Budget: 64 registers, 16384 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    layer_norm_columns_kernel(NormSizes n, Pixels rows, LayerNormBackward call, Sums* out) {
  using E = Elements<T>;
  const PixelPart part = pixel_part<T>(n, rows);
  const T* grad = static_cast<const T*>(call.grad) + part.channel;
  const T* x = static_cast<const T*>(call.x) + part.channel;
  const int down = kNormThreads / rows.across;
  Sums all[E::kCount] = {};
  for (int64_t r = part.first; r < part.end && part.left > 0; r += down) {
    const typename E::Piece grads = E::load(grad + r * n.channels, 0, part.left, rows.aligned);
    const typename E::Piece xs = E::load(x + r * n.channels, 0, part.left, rows.aligned);
    const float mean = call.mean[r], scale = call.rstd[r];
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      if (i >= part.left) break;
      const float g = to_float(grads.at[i]);
      all[i].grad += g;
      all[i].product = multiply_add(g, (to_float(xs.at[i]) - mean) * scale, all[i].product);
    }
  }
  store_block_sums<E::kCount>(n, rows, part, all, out);
}

// Budget: 48 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kFinishThreads)
    layer_norm_parameters_kernel(const Sums* parts, int64_t chunks, int64_t columns, LayerNormBackward call) {
  const int64_t column = warp_number();
  if (column >= columns) return;
  const Total all = warp_total(chunks, [&](int64_t i) {
    const Sums& part = parts[i * columns + column];
    return Total{part.grad, part.product};
  });
  if (lane_index() != 0) return;
  if (call.grad_bias != nullptr) call.grad_bias[column] = static_cast<float>(all.grad);
  if (call.grad_weight != nullptr) call.grad_weight[column] = static_cast<float>(all.product);
}

// A warp takes a row of up to this many bytes.
constexpr int64_t kWarpBytes = 4096;

template <typename T>
bool long_rows(const LayerNorm& norm) {
  return norm.columns * static_cast<int64_t>(sizeof(T)) > kWarpBytes;
}

Grid rows_of(const LayerNorm& norm, bool blocks) {
  return {blocks ? norm.rows : divided_up(norm.rows, kNormThreads / kWarp)};
}

NormSizes as_pixels(const LayerNorm& norm) { return {norm.columns, norm.rows, 1, 0, 1}; }

template <typename T>
Pixels chunks_of(const LayerNorm& norm, bool aligned) {
  return pixels_of<T>(as_pixels(norm), aligned, /*whole=*/true, /*at_once=*/4);
}

}  // namespace

void launch_layer_norm(Type type, const LayerNorm& norm, const void* x, void* y, float* mean, float* rstd,
                       Stream stream) {
  if (norm.rows == 0 || norm.columns == 0) return;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool aligned =
        aligned_to_pieces(x) && aligned_to_pieces(y) && norm.columns % Elements<T>::kCount == 0;
    const bool blocks = long_rows<T>(norm);
    launch(blocks ? layer_norm_kernel<T, kNormThreads> : layer_norm_kernel<T, kWarp>, rows_of(norm, blocks),
           kNormThreads, sizeof(Moments) * (kNormThreads / kWarp), stream, norm, aligned,
           static_cast<const T*>(x), static_cast<T*>(y), mean, rstd);
  });
}

int64_t layer_norm_workspace(Type type, const LayerNorm& norm) {
  int64_t floats = 0;
  with_type(type, [&](auto t) { floats = 2 * chunks_of<decltype(t)>(norm, true).chunks * norm.columns; });
  return floats;
}

void launch_layer_norm_backward(Type type, const LayerNorm& norm, const LayerNormBackward& call,
                                Stream stream) {
  if (norm.rows == 0 || norm.columns == 0) throw LaunchError("the gradient of a norm of no elements");
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool aligned = aligned_to_pieces(call.x) && aligned_to_pieces(call.grad) &&
                         aligned_to_pieces(call.grad_input) && norm.columns % Elements<T>::kCount == 0;
    if (call.grad_input != nullptr) {
      const bool blocks = long_rows<T>(norm);
      launch(blocks ? layer_norm_gradient_kernel<T, kNormThreads> : layer_norm_gradient_kernel<T, kWarp>,
             rows_of(norm, blocks), kNormThreads, sizeof(Sums) * (kNormThreads / kWarp), stream, norm,
             aligned, call);
    }
    if (call.grad_weight == nullptr && call.grad_bias == nullptr) return;
    const NormSizes n = as_pixels(norm);
    const Pixels chunks = chunks_of<T>(norm, aligned);
    auto* parts = reinterpret_cast<Sums*>(call.workspace);
    launch(layer_norm_columns_kernel<T>, grid_of(n, chunks, Elements<T>::kCount), kNormThreads,
           int64_t{kNormThreads} * Elements<T>::kCount * static_cast<int64_t>(sizeof(Sums)), stream, n,
           chunks, call, parts);
    launch(layer_norm_parameters_kernel, {divided_up(norm.columns, kFinishThreads / kWarp)}, kFinishThreads,
           0, stream, parts, chunks.chunks, norm.columns, call);
  });
}

}  // namespace patchconv::kernels
