// What pool_max.cu and pool_avg.cu share: which windows contain which elements. A thread takes output
// elements forward, input elements backward; neighbouring threads take neighbours in memory. A block takes
// kTile consecutive elements. The position of its first one is found by 64-bit divisions, the others from
// there by 32-bit ones.
#pragma once

#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/pool.h"

namespace patchconv::kernels {

constexpr int kTile = 1024;

// Position of an element in a tensor (outer, depth, height, width, inner).
struct Place {
  int64_t outer;
  int depth, height, width, inner;
};

// A divisor of whole numbers from 0 to 2^31 - 1: a product's upper half takes the place of a division, which
// takes some twenty instructions. The multiplier is 2^(31 + s) / n, rounded up, with 2^s >= n > 2^(s - 1): it
// is too large by less than 2^s / n, which over such numbers adds less than 1 / n to the quotient.
struct Quick {
  int n = 1;
  uint32_t multiplier = 0;
  int shift = 0;

  Quick() = default;
  explicit Quick(int64_t by) : n(static_cast<int>(by)) {
    int log2 = 0;
    while ((int64_t{1} << log2) < by) ++log2;
    if (log2 == 0) return;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + static_cast<uint64_t>(by) - 1) /
                                       static_cast<uint64_t>(by));
    shift = log2 - 1;
  }
  PATCHCONV_DEVICE int quotient(int number) const {
    return n == 1 ? number
                  : static_cast<int>(multiply_high(static_cast<uint32_t>(number), multiplier) >> shift);
  }
};

// A size and its reciprocals.
struct Size {
  int n;
  double inverse;
  Quick quick;
};

// Sizes of one side of a pool.
struct Sides {
  Size depth, height, width, inner;
};

// PoolDim with 32-bit numbers, which the launch has checked to be enough: on a GPU, a 64-bit division is a
// function call.
struct Dim {
  int in, out, adaptive, kernel, stride, padding, dilation;
  Quick by_stride, by_dilation;

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
  const int begin = start < 0 ? dim.by_dilation.quotient(dim.dilation - 1 - start) : 0;
  const int end = start < dim.in ? dim.by_dilation.quotient(dim.in - start + dim.dilation - 1) : 0;
  return {start, taps, begin, end < taps ? end : taps};
}

struct Dims {
  Dim depth, height, width;
  int64_t inner;
};

// Divides `number`, below 2^52, and returns the remainder. A product with the inverse, which is off by at
// most one, takes the place of a 64-bit division, which is a function call.
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

// The place `step` elements further on; `step` plus one inner line must fit 32 bits.
PATCHCONV_DEVICE Place moved(Place place, int step, const Sides& n) {
  const auto carry = [](int& digit, int add, const Size& size) {
    const int sum = digit + add, over = size.quick.quotient(sum);
    digit = sum - over * size.n;
    return over;
  };
  const int columns = carry(place.inner, step, n.inner);
  const int rows = carry(place.width, columns, n.width);
  const int slices = carry(place.height, rows, n.height);
  place.outer += carry(place.depth, slices, n.depth);
  return place;
}

// Calls use(element, its place) for this thread's elements, of the block's kTile of `count`.
template <typename Use>
PATCHCONV_DEVICE void each_element(const Sides& n, int64_t count, Use use) {
  const int64_t begin = block_x() * kTile;
  const Place first = place_of_first(begin, n);
  for (int step = thread_index(); step < kTile && begin + step < count; step += kElementThreads) {
    use(begin + step, moved(first, step, n));
  }
}

// The outputs [begin, end) whose windows may contain coordinate i.
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
  const int last = dim.by_stride.quotient(i + dim.padding) + 1;
  const int begin = from > 0 ? dim.by_stride.quotient(from + dim.stride - 1) : 0;
  return {begin, last < dim.out ? last : dim.out};
}

// The tap of output o that lies at coordinate i; -1 if none does.
PATCHCONV_DEVICE int tap_at(const Dim& dim, int o, int i) {
  const int distance = i - dim.start(o);
  if (distance < 0) return -1;
  const int tap = dim.by_dilation.quotient(distance);
  return tap * dim.dilation == distance && tap < dim.taps(o) ? tap : -1;
}

constexpr int64_t kMost = (int64_t{1} << 31) - 1 - kTile;

inline bool fits(const PoolDim& dim) {
  const int64_t reach = dim.adaptive
                            ? (dim.out + 1) * dim.in + dim.out
                            : dim.in + 2 * dim.padding + (dim.kernel + 1) * dim.dilation + dim.stride;
  return reach <= kMost && dim.out <= kMost && dim.out * dim.stride <= kMost;
}

inline Dims narrowed(const PoolShape& pool) {
  if (!serves(pool)) throw LaunchError("a pool over a dimension of 2^31 or more");
  const auto narrow = [](const PoolDim& dim) {
    return Dim{static_cast<int>(dim.in),
               static_cast<int>(dim.out),
               dim.adaptive,
               static_cast<int>(dim.kernel),
               static_cast<int>(dim.stride),
               static_cast<int>(dim.padding),
               static_cast<int>(dim.dilation),
               Quick(dim.stride),
               Quick(dim.dilation)};
  };
  return {narrow(pool.dims[0]), narrow(pool.dims[1]), narrow(pool.dims[2]), pool.inner};
}

inline Sides sides(const Dims& pool, int Dim::* size) {
  const auto with_inverse = [](int n) { return Size{n, 1.0 / n, Quick(n)}; };
  return {with_inverse(pool.depth.*size), with_inverse(pool.height.*size), with_inverse(pool.width.*size),
          with_inverse(static_cast<int>(pool.inner))};
}

inline int64_t elements(const PoolShape& pool, const Sides& n) {
  return pool.outer * n.depth.n * n.height.n * n.width.n * n.inner.n;
}

inline Grid tiles(int64_t count) { return {(count + kTile - 1) / kTile}; }

}  // namespace patchconv::kernels
