// Max pools: values, positions and gradients. Nothing is allocated and no shared memory used. The order in
// which gradients are summed depends on the shape alone.
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/pool_places.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T, typename Offset, bool kTake>
__global__ void __launch_bounds__(kElementThreads, 4)
    max_pool_kernel(Dims pool, Sides out, int64_t count, const T* x, T* y, Offset* offsets) {
  const auto& [depth, height, width, inner] = pool;
  each_element(out, count, [&](int64_t element, const Place& o) {
    const Window dw = window_of(depth, o.depth), hw = window_of(height, o.height),
                 ww = window_of(width, o.width);
    const T* plane = x + o.outer * depth.in * height.in * width.in * inner + o.inner;
    const auto at = [&](int d, int h, int w) {
      return plane[((static_cast<int64_t>(d) * height.in + h) * width.in + w) * inner];
    };
    if constexpr (kTake) {
      const auto offset = static_cast<int>(offsets[element]);
      const int lines = offset / ww.taps;
      const int w = ww.start + offset % ww.taps * width.dilation;
      const int h = hw.start + lines % hw.taps * height.dilation;
      const int d = dw.start + lines / hw.taps * depth.dilation;
      const bool inside = w >= 0 && w < width.in && h >= 0 && h < height.in && d >= 0 && d < depth.in;
      y[element] = inside ? at(d, h, w) : from_float<T>(-kInfinity);
    } else {
      // A value wins if it is greater than the best so far or if it is NaN: of equal values the first, of NaN
      // the last.
      float best = -kInfinity;
      T value = from_float<T>(best);
      int offset = (dw.begin * hw.taps + hw.begin) * ww.taps + ww.begin;
      for (int d = dw.begin; d < dw.end; ++d) {
        for (int h = hw.begin; h < hw.end; ++h) {
          for (int w = ww.begin; w < ww.end; ++w) {
            const T candidate = at(dw.start + d * depth.dilation, hw.start + h * height.dilation,
                                   ww.start + w * width.dilation);
            const float key = to_float(candidate);
            if (key > best || key != key) {
              best = key;
              value = candidate;
              offset = (d * hw.taps + h) * ww.taps + w;
            }
          }
        }
      }
      y[element] = value;
      offsets[element] = static_cast<Offset>(offset);
    }
  });
}

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T, typename Offset>
__global__ void __launch_bounds__(kElementThreads, 4)
    max_pool_backward_kernel(Dims pool, Sides in, int64_t count, const T* grad, const Offset* offsets,
                             T* result) {
  const auto& [depth, height, width, inner] = pool;
  each_element(in, count, [&](int64_t element, const Place& i) {
    const Outputs ds = outputs_at(depth, i.depth), hs = outputs_at(height, i.height),
                  ws = outputs_at(width, i.width);
    float sum = 0;
    for (int d = ds.begin; d < ds.end; ++d) {
      const int depth_tap = tap_at(depth, d, i.depth);
      if (depth_tap < 0) continue;
      for (int h = hs.begin; h < hs.end; ++h) {
        const int line = tap_at(height, h, i.height);
        if (line < 0) continue;
        const int64_t row = (i.outer * depth.out + d) * height.out + h;
        for (int w = ws.begin; w < ws.end; ++w) {
          const int column = tap_at(width, w, i.width);
          if (column < 0) continue;
          const int tap = (depth_tap * height.taps(h) + line) * width.taps(w) + column;
          const int64_t from = (row * width.out + w) * inner + i.inner;
          if (offsets[from] == tap) sum = add(sum, to_float(grad[from]));
        }
      }
    }
    result[element] = from_float<T>(sum);
  });
}

// Calls use(Offset()) for the pool's offset type.
template <typename Use>
void with_offsets(const MaxPool& pool, Use use) {
  if (pool.offset_bytes == 1) return use(uint8_t());
  if (pool.offset_bytes == 2) return use(uint16_t());
  throw LaunchError("a max pool with windows of more than 65536 places");
}

}  // namespace

bool serves(const PoolShape& pool) {
  return fits(pool.dims[0]) && fits(pool.dims[1]) && fits(pool.dims[2]) && pool.inner <= kMost;
}

void launch_max_pool(Type type, const MaxPool& pool, const void* x, void* y, void* offsets, bool take,
                     Stream stream) {
  const Dims dims = narrowed(pool);
  const Sides out = sides(dims, &Dim::out);
  const int64_t count = elements(pool, out);
  with_type(type, [&](auto t) {
    with_offsets(pool, [&](auto offset) {
      using T = decltype(t);
      using Offset = decltype(offset);
      launch(take ? max_pool_kernel<T, Offset, true> : max_pool_kernel<T, Offset, false>, tiles(count),
             kElementThreads, 0, stream, dims, out, count, static_cast<const T*>(x), static_cast<T*>(y),
             static_cast<Offset*>(offsets));
    });
  });
}

void launch_max_pool_backward(Type type, const MaxPool& pool, const void* grad, const void* offsets,
                              void* result, Stream stream) {
  const Dims dims = narrowed(pool);
  const Sides in = sides(dims, &Dim::in);
  const int64_t count = elements(pool, in);
  with_type(type, [&](auto t) {
    with_offsets(pool, [&](auto offset) {
      using T = decltype(t);
      using Offset = decltype(offset);
      launch(max_pool_backward_kernel<T, Offset>, tiles(count), kElementThreads, 0, stream, dims, in, count,
             static_cast<const T*>(grad), static_cast<const Offset*>(offsets), static_cast<T*>(result));
    });
  });
}

}  // namespace patchconv::kernels
