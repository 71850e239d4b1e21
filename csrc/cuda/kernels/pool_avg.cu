// Average pools and their gradients: one read of the input's windows and one write. Nothing is allocated and
// no shared memory used. Sums are in float32, in an order that depends on the shape alone.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/pool_places.cuh"

namespace patchconv::kernels {

namespace {

// How many elements of a window count along one dimension.
struct Counting {
  bool padding;
  float divisor;  // 0: the number of elements

  PATCHCONV_DEVICE int along(const Dim& dim, int o, const Window& window) const {
    if (!padding || dim.adaptive) return window.end - window.begin;
    const int end = window.start + window.taps, last = dim.in + dim.padding;
    return (end < last ? end : last) - window.start;
  }
  PATCHCONV_DEVICE float of(const Dims& pool, int d, int h, int w, const Window& dw, const Window& hw,
                            const Window& ww) const {
    if (divisor != 0) return divisor;
    return static_cast<float>(static_cast<int64_t>(along(pool.depth, d, dw)) * along(pool.height, h, hw) *
                              along(pool.width, w, ww));
  }
};

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kElementThreads, 4)
    avg_pool_kernel(Dims pool, Sides out, int64_t count, Counting counting, const T* x, T* y) {
  const auto& [depth, height, width, inner] = pool;
  each_element(out, count, [&](int64_t element, const Place& o) {
    const Window dw = window_of(depth, o.depth), hw = window_of(height, o.height),
                 ww = window_of(width, o.width);
    const T* plane = x + o.outer * depth.in * height.in * width.in * inner + o.inner;
    float sum = 0;
    for (int d = dw.begin; d < dw.end; ++d) {
      for (int h = hw.begin; h < hw.end; ++h) {
        const int64_t row = (static_cast<int64_t>(dw.start + d) * height.in + hw.start + h) * width.in;
        for (int w = ww.begin; w < ww.end; ++w) sum += to_float(plane[(row + ww.start + w) * inner]);
      }
    }
    const bool empty = dw.begin >= dw.end || hw.begin >= hw.end || ww.begin >= ww.end;
    y[element] = from_float<T>(empty ? 0 : sum / counting.of(pool, o.depth, o.height, o.width, dw, hw, ww));
  });
}

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kElementThreads, 4)
    avg_pool_backward_kernel(Dims pool, Sides in, int64_t count, Counting counting, const T* grad,
                             T* result) {
  const auto& [depth, height, width, inner] = pool;
  each_element(in, count, [&](int64_t element, const Place& i) {
    const Outputs ds = outputs_at(depth, i.depth), hs = outputs_at(height, i.height),
                  ws = outputs_at(width, i.width);
    float sum = 0;
    for (int d = ds.begin; d < ds.end; ++d) {
      if (tap_at(depth, d, i.depth) < 0) continue;
      const Window dw = window_of(depth, d);
      for (int h = hs.begin; h < hs.end; ++h) {
        if (tap_at(height, h, i.height) < 0) continue;
        const Window hw = window_of(height, h);
        const int64_t row = (i.outer * depth.out + d) * height.out + h;
        for (int w = ws.begin; w < ws.end; ++w) {
          if (tap_at(width, w, i.width) < 0) continue;
          const float g = to_float(grad[(row * width.out + w) * inner + i.inner]);
          sum += g / counting.of(pool, d, h, w, dw, hw, window_of(width, w));
        }
      }
    }
    result[element] = from_float<T>(sum);
  });
}

Counting counting_of(const AvgPool& pool) { return {pool.count_padding, static_cast<float>(pool.divisor)}; }

}  // namespace

void launch_avg_pool(Type type, const AvgPool& pool, const void* x, void* y, Stream stream) {
  const Dims dims = narrowed(pool);
  const Sides out = sides(dims, &Dim::out);
  const int64_t count = elements(pool, out);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    launch(avg_pool_kernel<T>, tiles(count), kElementThreads, 0, stream, dims, out, count, counting_of(pool),
           static_cast<const T*>(x), static_cast<T*>(y));
  });
}

void launch_avg_pool_backward(Type type, const AvgPool& pool, const void* grad, void* result, Stream stream) {
  const Dims dims = narrowed(pool);
  const Sides in = sides(dims, &Dim::in);
  const int64_t count = elements(pool, in);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    launch(avg_pool_backward_kernel<T>, tiles(count), kElementThreads, 0, stream, dims, in, count,
           counting_of(pool), static_cast<const T*>(grad), static_cast<T*>(result));
  });
}

}  // namespace patchconv::kernels
