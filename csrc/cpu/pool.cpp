// Max pooling on the CPU. The position of each maximum takes one byte if windows are small.
//
// Beside the output, the forward pass gives each maximum's offset in its window (core/pool.h) as uint8,
// uint16 or int32. With the offsets the output can be gathered again, the gradient scattered and stock's
// int64 indices computed. Half types are compared exactly. The gradient is summed in the order of the
// outputs, as stock does; for half types in float32, a few planes at a time, and rounded once. Beyond that
// nothing is allocated but the results.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/pool.h"
#include "cpu/clones.h"

#define PATCHCONV_CLONES PATCHCONV_CLONES_FOR("avx2")

namespace patchconv {

using at::IntArrayRef;
using at::Tensor;
using c10::irange;

namespace {

constexpr int64_t kLanes = 1024;     // columns (channels last: channels) whose maxima are found side by side
constexpr int64_t kGrain = 32768;    // taps or elements below which another thread does not pay
constexpr int64_t kPiece = 1 << 20;  // elements of a half type's gradient that are summed at once

template <typename scalar_t>
struct Order : PoolOrder<scalar_t> {};
template <>
struct Order<c10::Half> : HalfPoolOrder<0x7c00> {};
template <>
struct Order<c10::BFloat16> : HalfPoolOrder<0x7f80> {};

// Taps are as wide as the values where they fit, so that loops over both are vectorised.
template <typename scalar_t, typename Tap>
struct Job {
  using Raw = typename Order<scalar_t>::Raw;
  const Pool& pool;
  const Raw* input;
  Raw* output;
  void* offsets;
  int64_t offset_bytes;
  int64_t blocks;  // of kLanes lanes, per row
};

template <typename Job, typename Tap>
[[gnu::always_inline]] inline void put_offsets(const Job& job, const Tap* taps, int64_t lanes, int64_t at) {
  if (job.offset_bytes == 1) {
    std::copy_n(taps, lanes, static_cast<uint8_t*>(job.offsets) + at);
  } else if (job.offset_bytes == 2) {
    std::copy_n(taps, lanes, static_cast<uint16_t*>(job.offsets) + at);
  } else {
    std::copy_n(taps, lanes, static_cast<int32_t*>(job.offsets) + at);
  }
}

// Maxima of the output elements from `at` on. `column` is the window of the first; each next one reads
// `stride` further.
template <typename scalar_t, typename Tap>
[[gnu::always_inline]] inline void pool_lanes(const Job<scalar_t, Tap>& job, const PoolRow& row,
                                              const PoolWindow& column, int64_t channel, int64_t stride,
                                              int64_t lanes, int64_t at) {
  const int64_t inner = job.pool.inner;
  PoolMaxima<Order<scalar_t>, Tap, kLanes> maxima;
  maxima.scan(job.pool, row, column, job.input + row.outer * job.pool.plane() * inner + channel, inner,
              stride, lanes);
  std::copy_n(maxima.values(), lanes, job.output + at);
  put_offsets(job, maxima.offsets, lanes, at);
}

// A unit of work is a block of kLanes columns of a row or, in channels-last formats, of kLanes channels of a
// row.
template <typename scalar_t, typename Tap>
[[gnu::always_inline]] inline void pool_unit(const Job<scalar_t, Tap>& job, int64_t unit) {
  const Pool& pool = job.pool;
  const PoolDim& width = pool.width();
  const PoolRow row(pool, unit / job.blocks);
  const int64_t first = row.number * width.out * pool.inner;
  const int64_t begin = unit % job.blocks * kLanes;
  if (pool.inner > 1) {
    const int64_t lanes = std::min(kLanes, pool.inner - begin);
    for (int64_t w = 0; w < width.out; ++w) {
      pool_lanes(job, row, width.window(w), begin, 1, lanes, first + w * pool.inner + begin);
    }
    return;
  }
  const Range all{begin, std::min(begin + kLanes, width.out)};
  Range inside = intersect(all, width.interior());
  if (inside.size() < 4) inside = {all.end, all.end};
  for (int64_t w = all.begin; w < all.end; w = w == inside.begin ? inside.end : w + 1) {
    const PoolWindow column = width.window(w);
    if (w != inside.begin) {
      const PoolMaximum<Order<scalar_t>> maximum(pool, row, column, job.input + row.outer * pool.plane());
      job.output[first + w] = maximum.value;
      put_offsets(job, &maximum.offset, 1, first + w);
    } else if (width.stride == 1) {
      pool_lanes(job, row, column, 0, 1, inside.size(), first + w);
    } else if (width.stride == 2) {
      pool_lanes(job, row, column, 0, 2, inside.size(), first + w);
    } else {
      pool_lanes(job, row, column, 0, width.stride, inside.size(), first + w);
    }
  }
}

// Overloads can be compiled for several instruction sets, templates cannot.
#define PATCHCONV_POOL(scalar_t, Tap)                                                           \
  PATCHCONV_CLONES void pool_units(const Job<scalar_t, Tap>& job, int64_t begin, int64_t end) { \
    for (int64_t unit = begin; unit < end; ++unit) pool_unit(job, unit);                        \
  }
PATCHCONV_POOL(float, uint32_t)
PATCHCONV_POOL(double, uint64_t)
PATCHCONV_POOL(c10::Half, uint16_t)
PATCHCONV_POOL(c10::Half, uint32_t)
PATCHCONV_POOL(c10::BFloat16, uint16_t)
PATCHCONV_POOL(c10::BFloat16, uint32_t)
#undef PATCHCONV_POOL

template <typename Tap, typename scalar_t>
void pool_all(const Pool& pool, const Tensor& input, const Tensor& output, const Tensor& offsets) {
  using Raw = typename Order<scalar_t>::Raw;
  const int64_t lanes = pool.inner == 1 ? pool.width().out : pool.inner;
  const auto* from = static_cast<const Raw*>(input.const_data_ptr());
  auto* to = static_cast<Raw*>(output.mutable_data_ptr());
  void* places = offsets.mutable_data_ptr();
  const Job<scalar_t, Tap> job{pool, from, to, places, offsets.element_size(), at::divup(lanes, kLanes)};
  const int64_t work = pool.positions() * pool.width().out * pool.inner / std::max<int64_t>(1, job.blocks);
  at::parallel_for(0, pool.rows() * job.blocks, kGrain / std::max<int64_t>(1, work) + 1,
                   [&](int64_t begin, int64_t end) { pool_units(job, begin, end); });
}

// Calls body(each); each(row, c0, c1, visit) is each_maximum for these offsets.
template <typename Body>
void with_offsets(const Pool& pool, const Tensor& offsets, Body body) {
  const Follow follow = follow_offsets(pool);
  const PoolTable table(pool, follow);
  auto call = [&]<Follow kFollow, typename Offset>() {
    const Offset* data = offsets.const_data_ptr<Offset>();
    body([&pool, &table, data](int64_t row, int64_t c0, int64_t c1, auto visit) {
      each_maximum<kFollow>(pool, table, row, c0, c1, data, visit);
    });
  };
  const int64_t bytes = offset_bytes(pool.positions());
  if (follow == Follow::kPlain) return call.template operator()<Follow::kPlain, uint8_t>();
  if (follow == Follow::kTable) return call.template operator()<Follow::kTable, uint8_t>();
  if (bytes == 1) return call.template operator()<Follow::kDivide, uint8_t>();
  if (bytes == 2) return call.template operator()<Follow::kDivide, uint16_t>();
  call.template operator()<Follow::kDivide, int32_t>();
}

// visit(start of the plane, element, position, place, inside) for all of the output, in parallel.
template <typename Visit>
void for_all(const Pool& pool, const Tensor& offsets, Visit visit) {
  const int64_t grain = kGrain / std::max<int64_t>(1, pool.width().out * pool.inner) + 1;
  with_offsets(pool, offsets, [&](auto each) {
    at::parallel_for(0, pool.rows(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t plane = row / pool.rows_per_plane() * pool.plane() * pool.inner;
        each(row, 0, pool.inner, [=](auto... where) { visit(plane, where...); });
      }
    });
  });
}

// Parallel over planes; in channels-last formats over images, and over enough blocks of channels to give
// every thread one. Half types: disjoint windows only. Zeros are written along dimension `lead`, just before
// the first sum that needs them, so that they are in the cache.
template <typename scalar_t>
void scatter(const Pool& pool, const Tensor& grad, const Tensor& offsets, const Tensor& result) {
  using Raw = typename Order<scalar_t>::Raw;
  constexpr int64_t kCacheLine = 64 / sizeof(Raw);
  const Raw* from = static_cast<const Raw*>(grad.const_data_ptr());
  Raw* to = static_cast<Raw*>(result.mutable_data_ptr());
  const int64_t inner = pool.inner;
  const int64_t pieces = at::divup(at::get_num_threads(), std::max<int64_t>(1, pool.outer));
  const int64_t block = at::divup(at::divup(std::max<int64_t>(1, inner), pieces), kCacheLine) * kCacheLine;
  const int64_t blocks = at::divup(inner, block);
  const int64_t grain = kGrain / std::max<int64_t>(1, pool.plane() * std::min(inner, block)) + 1;
  const PoolDim& lead = pool.depth().in > 1 || pool.depth().out > 1 ? pool.depth() : pool.height();
  const int64_t rows = pool.rows_per_plane() / std::max<int64_t>(1, lead.out);
  const int64_t slice = pool.plane() / std::max<int64_t>(1, lead.in);
  const int64_t run = blocks == 1 ? slice : 1;
  auto scatter_block = [=, &pool, &lead](int64_t outer, int64_t c0, int64_t c1, auto each) {
    Raw* sums = to + outer * pool.plane() * inner;
    int64_t zeroed = 0;
    auto zero_to = [&](int64_t end) {
      for (; zeroed < std::min(lead.in, end) * slice; zeroed += run) {
        std::memset(sums + zeroed * inner + c0, 0, run * (c1 - c0) * sizeof(Raw));
      }
    };
    for (int64_t o = 0; o < lead.out; ++o) {
      zero_to(lead.end(o));
      for (int64_t row = (outer * lead.out + o) * rows, r = 0; r < rows; ++r) {
        each(row + r, c0, c1, [=](int64_t element, int64_t, int64_t place, bool inside) {
          if (!inside) return;
          if constexpr (std::is_same_v<Raw, scalar_t>) {
            sums[place] += from[element];
          } else {
            sums[place] = from[element] == 0x8000 ? 0 : from[element];  // 0 + -0.0 is 0.0
          }
        });
      }
    }
    zero_to(lead.in);
  };
  with_offsets(pool, offsets, [&](auto each) {
    at::parallel_for(0, pool.outer * blocks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t c0 = task % blocks * block;
        scatter_block(task / blocks, c0, std::min(inner, c0 + block), each);
      }
    });
  });
}

// An empty kernel means adaptive windows.
struct Shape {
  IntArrayRef kernel, stride, padding, dilation;
};

Pool make_pool(IntArrayRef input, IntArrayRef output, const Shape& shape, at::MemoryFormat format) {
  const size_t dims = shape.kernel.empty() ? 0 : input.size() - 2;
  const auto [kernel, stride, padding, dilation] = shape;
  bool good = input.size() >= 3 && input.size() <= 5 && input.size() == output.size() &&
              kernel.size() == dims && std::min({stride.size(), padding.size(), dilation.size()}) >= dims;
  for (const auto d : irange(good ? dims : 0)) {
    good = good && kernel[d] > 0 && stride[d] > 0 && padding[d] >= 0 && dilation[d] > 0;
  }
  TORCH_CHECK(
      good,
      "patchconv::_max_pool: expected sizes, kernel, stride, padding and dilation of one pooling, got input ",
      input, ", output ", output, ", kernel ", kernel);
  Pool pool(input.slice(2), output.slice(2), kernel, stride, padding, dilation);
  const bool last = format != at::MemoryFormat::Contiguous;
  pool.outer = last ? input[0] : input[0] * input[1];
  pool.inner = last ? input[1] : 1;
  TORCH_CHECK(pool.positions() <= std::numeric_limits<int32_t>::max(),
              "patchconv::_max_pool: expected windows of at most 2^31 - 1 positions, got ", pool.positions());
  return pool;
}

at::ScalarType offset_type(const Pool& pool) {
  const int64_t bytes = offset_bytes(pool.positions());
  return bytes == 1 ? at::kByte : bytes == 2 ? at::kUInt16 : at::kInt;
}

// The pooling that made these offsets.
Pool pool_of(const Tensor& offsets, IntArrayRef input_size, const Shape& shape) {
  Pool pool = make_pool(input_size, offsets.sizes(), shape, offsets.suggest_memory_format());
  TORCH_CHECK(offsets.scalar_type() == offset_type(pool),
              "patchconv::_max_pool: expected offsets to have dtype ", offset_type(pool),
              " for this window, got ", offsets.scalar_type());
  return pool;
}

std::tuple<Tensor, Tensor> max_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride,
                                    IntArrayRef padding, IntArrayRef dilation, IntArrayRef output_size) {
  const at::MemoryFormat format = input.suggest_memory_format();
  std::vector<int64_t> sizes = input.sizes().slice(0, std::min<size_t>(2, input.dim())).vec();
  sizes.insert(sizes.end(), output_size.begin(), output_size.end());
  const Pool pool = make_pool(input.sizes(), sizes, {kernel, stride, padding, dilation}, format);
  const Tensor output = at::empty(sizes, input.options().memory_format(format));
  const Tensor offsets = at::empty(sizes, input.options().dtype(offset_type(pool)).memory_format(format));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "max_pool", [&] {
    using Wide = std::conditional_t<sizeof(scalar_t) == 8, uint64_t, uint32_t>;
    using Narrow = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, Wide>;
    const auto pool_with = offsets.element_size() < 4 ? pool_all<Narrow, scalar_t> : pool_all<Wide, scalar_t>;
    pool_with(pool, input.contiguous(format), output, offsets);
  });
  return {output, offsets};
}

Tensor max_pool_take(const Tensor& input, const Tensor& offsets, IntArrayRef kernel, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation) {
  const at::MemoryFormat format = offsets.suggest_memory_format();
  const Pool pool = pool_of(offsets, input.sizes(), {kernel, stride, padding, dilation});
  const Tensor dense = input.contiguous(format);
  const Tensor output = at::empty(offsets.sizes(), input.options().memory_format(format));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "max_pool_take", [&] {
    using Raw = typename Order<scalar_t>::Raw;
    const Raw* from = static_cast<const Raw*>(dense.const_data_ptr());
    Raw* to = static_cast<Raw*>(output.mutable_data_ptr());
    for_all(pool, offsets.contiguous(format),
            [=](int64_t plane, int64_t element, int64_t, int64_t place, bool inside) {
              to[element] = inside ? from[plane + place] : Order<scalar_t>::lowest();
            });
  });
  return output;
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& offsets, IntArrayRef input_size,
                         IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  TORCH_CHECK(grad.sizes() == offsets.sizes(), "patchconv::_max_pool_backward: expected grad to have shape ",
              offsets.sizes(), ", got ", grad.sizes());
  const at::MemoryFormat format = offsets.suggest_memory_format();
  const Shape shape{kernel, stride, padding, dilation};
  const Pool pool = pool_of(offsets, input_size, shape);
  const Tensor result = at::empty(input_size, grad.options().memory_format(format));
  if (grad.element_size() > 2 || pool.disjoint()) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "max_pool_backward", [&] {
      scatter<scalar_t>(pool, grad.contiguous(format), offsets.contiguous(format), result);
    });
    return result;
  }
  // In float32, several images at a time or, if an image is large, several channels.
  const int64_t image = std::max<int64_t>(1, pool.plane() * input_size[1]);
  const int64_t images = std::max<int64_t>(1, kPiece / image);
  const int64_t channels = image <= kPiece ? input_size[1] : std::max<int64_t>(32, kPiece / pool.plane());
  for (int64_t n = 0; n < input_size[0]; n += images) {
    for (int64_t c = 0; c < input_size[1]; c += channels) {
      auto piece = [&](const Tensor& t) { return t.slice(0, n, n + images).slice(1, c, c + channels); };
      const Tensor part = piece(result);
      const Tensor sums = at::empty(part.sizes(), part.options().dtype(at::kFloat).memory_format(format));
      scatter<float>(make_pool(sums.sizes(), offsets.sizes(), shape, format),
                     piece(grad).to(at::kFloat).contiguous(format), piece(offsets).contiguous(format), sums);
      part.copy_(sums);
    }
  }
  return result;
}

Tensor max_pool_indices(const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride,
                        IntArrayRef padding, IntArrayRef dilation) {
  const at::MemoryFormat format = offsets.suggest_memory_format();
  const Pool pool = pool_of(offsets, input_size, {kernel, stride, padding, dilation});
  const Tensor indices = at::empty(offsets.sizes(), offsets.options().dtype(at::kLong).memory_format(format));
  int64_t* to = indices.mutable_data_ptr<int64_t>();
  for_all(pool, offsets.contiguous(format),
          [=](int64_t, int64_t element, int64_t position, int64_t, bool) { to[element] = position; });
  return indices;
}

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_max_pool", max_pool);
  m.impl("_max_pool_take", max_pool_take);
  m.impl("_max_pool_backward", max_pool_backward);
  m.impl("_max_pool_indices", max_pool_indices);
}

}  // namespace

}  // namespace patchconv
