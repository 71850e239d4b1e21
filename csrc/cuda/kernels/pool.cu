// Max pools: a thread an output element forward, an input element backward, neighbours next to each other in
// memory. A block takes kTile elements that follow each other; where its first one lies is found once by
// 64-bit divisions, the others by 32-bit ones from there. Nothing is allocated, nothing is shared.
#include "cuda/kernels/pool.h"

#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kTile = 1024;

// Place of an element of a tensor (outer, depth, height, width, inner).
struct Place {
  int64_t outer;
  int depth, height, width, inner;
};

// A size and its reciprocal.
struct Size {
  int n;
  double inverse;
};

// Sizes of one side of a pool.
struct Sides {
  Size depth, height, width, inner;
};

// PoolDim with 32-bit numbers (the launch has checked that they suffice): 64-bit divisions are calls on a
// GPU.
struct Dim {
  int in, out, adaptive, kernel, stride, padding, dilation;

  PATCHCONV_DEVICE int start(int o) const { return adaptive ? o * in / out : o * stride - padding; }
  PATCHCONV_DEVICE int taps(int o) const {
    return adaptive ? ((o + 1) * in + out - 1) / out - start(o) : kernel;
  }
};

// A window's taps: all, and those [begin, end) that lie inside the input.
struct Window {
  int start, taps, begin, end;
};

PATCHCONV_DEVICE Window window_of(const Dim& dim, int o) {
  const int start = dim.start(o), taps = dim.taps(o);
  const int begin = start < 0 ? (dim.dilation - 1 - start) / dim.dilation : 0;
  const int end = start < dim.in ? (dim.in - start + dim.dilation - 1) / dim.dilation : 0;
  return {start, taps, begin, end < taps ? end : taps};
}

struct Dims {
  Dim depth, height, width;
  int64_t inner;
};

// Divides `number`, below 2^52, and gives the remainder: a 64-bit division would be a call. The product is
// off by one at most.
PATCHCONV_DEVICE int divide(int64_t& number, const Size& by) {
  auto quotient = static_cast<int64_t>(static_cast<double>(number) * by.inverse);
  auto rest = static_cast<int>(number - quotient * by.n);
  if (rest < 0) {
    rest += by.n;
    --quotient;
  } else if (rest >= by.n) {
    rest -= by.n;
    ++quotient;
  }
  number = quotient;
  return rest;
}

PATCHCONV_DEVICE Place place_of_first(int64_t element, const Sides& n) {
  Place place;
  place.inner = divide(element, n.inner);
  place.width = divide(element, n.width);
  place.height = divide(element, n.height);
  place.depth = divide(element, n.depth);
  place.outer = element;
  return place;
}

// The place `step` elements further on; step and one inner line fit 32 bits together.
PATCHCONV_DEVICE Place moved(Place place, int step, const Sides& n) {
  const auto carry = [](int& digit, unsigned add, const Size& size) {
    const unsigned sum = static_cast<unsigned>(digit) + add;
    const unsigned over = sum / static_cast<unsigned>(size.n);
    digit = static_cast<int>(sum - over * static_cast<unsigned>(size.n));
    return over;
  };
  const unsigned columns = carry(place.inner, static_cast<unsigned>(step), n.inner);
  const unsigned rows = carry(place.width, columns, n.width);
  const unsigned slices = carry(place.height, rows, n.height);
  place.outer += carry(place.depth, slices, n.depth);
  return place;
}

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T, typename Offset, bool kTake>
__global__ void __launch_bounds__(kElementThreads, 4)
    max_pool_kernel(Dims pool, Sides out, int64_t count, const T* x, T* y, Offset* offsets) {
  const auto& [depth, height, width, inner] = pool;
  const int64_t begin = block_x() * kTile;
  const Place first = place_of_first(begin, out);
  for (int step = thread_index(); step < kTile && begin + step < count; step += kElementThreads) {
    const Place o = moved(first, step, out);
    const Window dw = window_of(depth, o.depth), hw = window_of(height, o.height),
                 ww = window_of(width, o.width);
    const T* plane = x + o.outer * depth.in * height.in * width.in * inner + o.inner;
    const auto at = [&](int d, int h, int w) {
      return plane[((static_cast<int64_t>(d) * height.in + h) * width.in + w) * inner];
    };
    if constexpr (kTake) {
      const auto offset = static_cast<int>(offsets[begin + step]);
      const int lines = offset / ww.taps;
      const int w = ww.start + offset % ww.taps * width.dilation;
      const int h = hw.start + lines % hw.taps * height.dilation;
      const int d = dw.start + lines / hw.taps * depth.dilation;
      const bool inside = w >= 0 && w < width.in && h >= 0 && h < height.in && d >= 0 && d < depth.in;
      y[begin + step] = inside ? at(d, h, w) : from_float<T>(-kInfinity);
    } else {
      // A value wins that is greater than the best so far or not a number: of equal ones the first, of NaN
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
      y[begin + step] = value;
      offsets[begin + step] = static_cast<Offset>(offset);
    }
  }
}

// The outputs [begin, end) whose windows may meet coordinate i.
struct Outputs {
  int begin, end;
};

PATCHCONV_DEVICE Outputs outputs_at(const Dim& dim, int i) {
  if (dim.adaptive) {
    // Windows cover floor(o * in / out) to ceil((o + 1) * in / out).
    const int o = i * dim.out / dim.in;
    int begin = o, end = o + 1;
    while (begin > 0 && dim.start(begin - 1) + dim.taps(begin - 1) > i) --begin;
    while (end < dim.out && dim.start(end) <= i) ++end;
    return {begin, end};
  }
  const int from = i + dim.padding - (dim.kernel - 1) * dim.dilation;
  const int last = (i + dim.padding) / dim.stride + 1;
  return {from > 0 ? (from + dim.stride - 1) / dim.stride : 0, last < dim.out ? last : dim.out};
}

// The tap of output o that lies at coordinate i; -1 if none does.
PATCHCONV_DEVICE int tap_at(const Dim& dim, int o, int i) {
  const int distance = i - dim.start(o);
  if (distance < 0 || distance % dim.dilation != 0) return -1;
  const int tap = distance / dim.dilation;
  return tap < dim.taps(o) ? tap : -1;
}

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T, typename Offset>
__global__ void __launch_bounds__(kElementThreads, 4)
    max_pool_backward_kernel(Dims pool, Sides in, int64_t count, const T* grad, const Offset* offsets,
                             T* result) {
  const auto& [depth, height, width, inner] = pool;
  const int64_t begin = block_x() * kTile;
  const Place first = place_of_first(begin, in);
  for (int step = thread_index(); step < kTile && begin + step < count; step += kElementThreads) {
    const Place i = moved(first, step, in);
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
          const int64_t element = (row * width.out + w) * inner + i.inner;
          if (offsets[element] == tap) sum = add(sum, to_float(grad[element]));
        }
      }
    }
    result[begin + step] = from_float<T>(sum);
  }
}

constexpr int64_t kMost = (int64_t{1} << 31) - 1 - kTile;

bool fits(const PoolDim& dim) {
  const int64_t reach = dim.adaptive
                            ? (dim.out + 1) * dim.in + dim.out
                            : dim.in + 2 * dim.padding + (dim.kernel + 1) * dim.dilation + dim.stride;
  return reach <= kMost && dim.out <= kMost && dim.out * dim.stride <= kMost;
}

Dims narrowed(const MaxPool& pool) {
  if (!serves(pool)) throw LaunchError("a max pool over a dimension of 2^31 or more");
  const auto narrow = [](const PoolDim& dim) {
    return Dim{static_cast<int>(dim.in),      static_cast<int>(dim.out),    dim.adaptive,
               static_cast<int>(dim.kernel),  static_cast<int>(dim.stride), static_cast<int>(dim.padding),
               static_cast<int>(dim.dilation)};
  };
  return {narrow(pool.dims[0]), narrow(pool.dims[1]), narrow(pool.dims[2]), pool.inner};
}

Sides sides(const Dims& pool, int Dim::* size) {
  const auto with_inverse = [](int n) { return Size{n, 1.0 / n}; };
  return {with_inverse(pool.depth.*size), with_inverse(pool.height.*size), with_inverse(pool.width.*size),
          with_inverse(static_cast<int>(pool.inner))};
}

int64_t elements(const MaxPool& pool, const Sides& n) {
  return pool.outer * n.depth.n * n.height.n * n.width.n * n.inner.n;
}

Grid tiles(int64_t count) { return {(count + kTile - 1) / kTile}; }

// Calls use(Offset()) for the pool's offset type.
template <typename Use>
void with_offsets(const MaxPool& pool, Use use) {
  if (pool.offset_bytes == 1) return use(uint8_t());
  if (pool.offset_bytes == 2) return use(uint16_t());
  throw LaunchError("a max pool with windows of more than 65536 places");
}

}  // namespace

bool serves(const MaxPool& pool) {
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
