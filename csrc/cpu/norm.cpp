// Batch norm's two passes over the data on the CPU: statistics per channel, and the affine map by channel.
//
// Statistics: blocks that fit the first-level cache are read twice, for their mean, in float64, and for the
// squares of the differences from it. Blocks are combined in float64 (Chan, Golub and LeVeque, "Updating
// formulae and a pairwise algorithm for computing sample variances", 1979). A large mean costs no digits that
// way. Blocks are cut in a fixed way, so results do not depend on the number of threads.
//
// The map is one product and one sum per element, in float64 (for half precision in float32), rounded once.
// They are separate operations in vector code and in its remainders: the library is compiled without fused
// multiply-add, so the value of an element depends neither on its position nor on the processor. Nothing is
// allocated but results and, for channels_last, some numbers per channel.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/clones.h"
#include "ops/norm.h"

#define PATCHCONV_CLONES PATCHCONV_CLONES_FOR("avx2", "avx512f")

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

constexpr int64_t kLanes = 16;     // independent sums: enough for the adders' latency
constexpr int64_t kBlock = 2048;   // elements per block along a row
constexpr int64_t kTerms = 16;     // squares added in float32, at most
constexpr int64_t kPixels = 64;    // pixels per block in channels_last
constexpr int64_t kChunks = 64;    // parts of a channels_last image, at most
constexpr int64_t kGrain = 32768;  // elements below which another thread does not pay

struct Moments {
  double count = 0, mean = 0, squares = 0;

  void add(double n, double m, double s) {
    const double total = count + n;
    if (total == 0) return;
    const double delta = m - mean;
    mean += delta * (n / total);
    squares += s + delta * delta * (count * n / total);
    count = total;
  }

  // `s` was summed about `center`, which is `m` as float32 has it: that added n (m - center)^2.
  void add(double n, double m, double s, double center) {
    const double rest = s - n * (m - center) * (m - center);
    add(n, m, rest < 0 ? 0 : rest);  // NaN stays NaN
  }
};

// In float64: else a mean that should be zero would be less exact than stock's.
template <typename T>
double sum(const T* x, int64_t n) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(x[i + j]);
  }
  for (int64_t j = 0; i < n; ++i, ++j) lanes[j] += static_cast<double>(x[i]);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

// Of the differences from the mean. A few terms are added in Acc, then in float64: if all values are equally
// far from the mean, long float32 sums lose digits.
template <typename Acc, typename T>
double squares(const T* x, int64_t n, Acc mean) {
  double totals[kLanes] = {};
  const auto add = [&](const T* from, int64_t terms) {
    Acc lanes[kLanes] = {};
    for (int64_t t = 0; t < terms; ++t) {
      for (int64_t j = 0; j < kLanes; ++j) {
        const Acc d = static_cast<Acc>(from[t * kLanes + j]) - mean;
        lanes[j] += d * d;
      }
    }
    for (int64_t j = 0; j < kLanes; ++j) totals[j] += static_cast<double>(lanes[j]);
  };
  int64_t i = 0;
  for (; i + kTerms * kLanes <= n; i += kTerms * kLanes) add(x + i, kTerms);
  add(x + i, (n - i) / kLanes);
  i += (n - i) / kLanes * kLanes;
  for (int64_t j = 0; i < n; ++i, ++j) {
    const Acc d = static_cast<Acc>(x[i]) - mean;
    totals[j] += static_cast<double>(d * d);
  }
  double total = 0;
  for (const double lane : totals) total += lane;
  return total;
}

template <typename Acc, typename T>
void row_moments(const T* x, int64_t n, Moments* moments) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    const double mean = sum(x + i, count) / static_cast<double>(count);
    const Acc center = static_cast<Acc>(mean);
    moments->add(static_cast<double>(count), mean, squares<Acc>(x + i, count, center),
                 static_cast<double>(center));
  }
}

// (n, c, s), dense in that order.
template <typename Acc, typename T>
void contiguous_moments(const T* x, int64_t n, int64_t c, int64_t s, Moments* result) {
  at::parallel_for(0, c, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n * s)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t channel = begin; channel < end; ++channel) {
                       for (int64_t image = 0; image < n; ++image) {
                         row_moments<Acc>(x + (image * c + channel) * s, s, result + channel);
                       }
                     }
                   });
}

// (pixels, c), dense in that order.
template <typename Acc, typename T>
void channels_last_moments(const T* x, int64_t pixels, int64_t c, Moments* result) {
  const int64_t blocks = (pixels + kPixels - 1) / kPixels;
  const int64_t chunk = (blocks + kChunks - 1) / kChunks * kPixels;
  const int64_t chunks = chunk == 0 ? 0 : (pixels + chunk - 1) / chunk;
  std::vector<Moments> parts(chunks * c);
  at::parallel_for(0, chunks, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, chunk * c)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<double> totals(c), squares(c);
                     std::vector<Acc> means(c), sums(c);
                     for (int64_t part = begin; part < end; ++part) {
                       const int64_t last = std::min(pixels, (part + 1) * chunk);
                       for (int64_t p = part * chunk; p < last; p += kPixels) {
                         const int64_t count = std::min(kPixels, last - p);
                         const T* block = x + p * c;
                         std::fill(totals.begin(), totals.end(), 0.0);
                         for (int64_t q = 0; q < count; ++q) {
                           for (int64_t k = 0; k < c; ++k) totals[k] += static_cast<double>(block[q * c + k]);
                         }
                         for (int64_t k = 0; k < c; ++k) {
                           totals[k] /= static_cast<double>(count);
                           means[k] = static_cast<Acc>(totals[k]);
                         }
                         std::fill(squares.begin(), squares.end(), 0.0);
                         for (int64_t from = 0; from < count; from += kTerms) {
                           std::fill(sums.begin(), sums.end(), Acc(0));
                           for (int64_t q = from; q < std::min(count, from + kTerms); ++q) {
                             for (int64_t k = 0; k < c; ++k) {
                               const Acc d = static_cast<Acc>(block[q * c + k]) - means[k];
                               sums[k] += d * d;
                             }
                           }
                           for (int64_t k = 0; k < c; ++k) squares[k] += static_cast<double>(sums[k]);
                         }
                         for (int64_t k = 0; k < c; ++k)
                           parts[part * c + k].add(static_cast<double>(count), totals[k], squares[k],
                                                   static_cast<double>(means[k]));
                       }
                     }
                   });
  for (const auto part : irange(chunks)) {
    for (const auto k : irange(c)) {
      const Moments& m = parts[part * c + k];
      result[k].add(m.count, m.mean, m.squares);
    }
  }
}

bool channels_last(const Tensor& x) {
  return !x.is_contiguous() && (x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                                x.is_contiguous(at::MemoryFormat::ChannelsLast3d));
}

Tensor dense(const Tensor& input) {
  return input.is_contiguous() || channels_last(input) ? input
                                                       : input.contiguous(input.suggest_memory_format());
}

int64_t per_channel(const Tensor& x) { return x.numel() / std::max<int64_t>(1, x.size(0) * x.size(1)); }

std::tuple<Tensor, Tensor> batch_statistics_cpu(const Tensor& input, const OptionalTensor& running_mean,
                                                const OptionalTensor& running_var, double momentum) {
  const Tensor x = dense(input);
  const int64_t c = x.size(1);
  std::vector<Moments> moments(c);
  const auto dtype = at::toOpMathType(x.scalar_type());
  Tensor mean = at::empty({c}, x.options().dtype(dtype)), var = at::empty({c}, x.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_statistics", [&] {
    using Acc = at::opmath_type<scalar_t>;
    const auto* data = x.const_data_ptr<scalar_t>();
    if (channels_last(x)) {
      channels_last_moments<Acc>(data, x.size(0) * per_channel(x), c, moments.data());
    } else {
      contiguous_moments<Acc>(data, x.size(0), c, per_channel(x), moments.data());
    }
    for (const auto k : irange(c)) {
      mean.mutable_data_ptr<Acc>()[k] = static_cast<Acc>(moments[k].mean);
      var.mutable_data_ptr<Acc>()[k] =
          static_cast<Acc>(moments[k].squares / moments[k].count);  // NaN if there are none
    }
  });
  const auto count = static_cast<double>(x.numel()) / static_cast<double>(c);
  move_running(running_mean, mean, momentum, 1);
  move_running(running_var, var, momentum, count / std::max(1.0, count - 1));
  return {mean, var};
}

// A product and a sum are computed in this type and rounded to T once.
template <typename T>
using Exact = std::conditional_t<sizeof(T) == 2, float, double>;

template <typename T>
[[gnu::always_inline]] inline void map_each(const T* x, T* y, int64_t n, Exact<T> scale, Exact<T> shift) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(static_cast<Exact<T>>(x[i]) * scale + shift);
}

template <typename T>
[[gnu::always_inline]] inline void map_each_pixel(const T* x, T* y, int64_t pixels, int64_t c,
                                                  const Exact<T>* scale, const Exact<T>* shift) {
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t k = 0; k < c; ++k) {
      y[p * c + k] = static_cast<T>(static_cast<Exact<T>>(x[p * c + k]) * scale[k] + shift[k]);
    }
  }
}

// Overloads can be compiled for several instruction sets, templates cannot.
#define PATCHCONV_MAPS(T)                                                                              \
  PATCHCONV_CLONES void map_row(const T* x, T* y, int64_t n, Exact<T> scale, Exact<T> shift) {         \
    map_each(x, y, n, scale, shift);                                                                   \
  }                                                                                                    \
  PATCHCONV_CLONES void map_pixels(const T* x, T* y, int64_t pixels, int64_t c, const Exact<T>* scale, \
                                   const Exact<T>* shift) {                                            \
    map_each_pixel(x, y, pixels, c, scale, shift);                                                     \
  }
PATCHCONV_MAPS(float)
PATCHCONV_MAPS(double)
PATCHCONV_MAPS(c10::BFloat16)
PATCHCONV_MAPS(c10::Half)
#undef PATCHCONV_MAPS

// By channel: parameters and statistics have shape (c) and the dtype of the arithmetic.
Tensor normalize_channels(const Tensor& input, const NormMap& map) {
  const Tensor x = dense(input);
  const Tensor invstd = map.var.to(at::kDouble).add(map.eps).rsqrt_();  // not rounded yet
  const int64_t c = x.size(1);
  Tensor y = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "normalize", [&] {
    using Acc = at::opmath_type<scalar_t>;
    using Number = Exact<scalar_t>;
    std::vector<Number> scale(c), shift(c);
    auto numbers = [&](const OptionalTensor& tensor) {
      return given(tensor) ? tensor->contiguous() : Tensor();
    };
    const Tensor w = numbers(map.weight), b = numbers(map.bias), m = map.mean.contiguous();
    const auto* inverse = invstd.const_data_ptr<double>();
    auto number = [](const Tensor& tensor, int64_t k, Number otherwise) {
      return tensor.defined() ? static_cast<Number>(tensor.const_data_ptr<Acc>()[k]) : otherwise;
    };
    for (const auto k : irange(c)) {
      scale[k] = static_cast<Number>(inverse[k]) * number(w, k, 1);
      shift[k] = number(b, k, 0) - number(m, k, 0) * scale[k];
    }
    const auto* from = x.const_data_ptr<scalar_t>();
    auto* to = y.mutable_data_ptr<scalar_t>();
    if (channels_last(x)) {
      const int64_t pixels = x.size(0) * per_channel(x);
      at::parallel_for(0, pixels, std::max<int64_t>(1, kGrain / c), [&](int64_t begin, int64_t end) {
        map_pixels(from + begin * c, to + begin * c, end - begin, c, scale.data(), shift.data());
      });
    } else {
      const int64_t n = per_channel(x);
      at::parallel_for(0, x.size(0) * c, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n)),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t row = begin; row < end; ++row) {
                           map_row(from + row * n, to + row * n, n, scale[row % c], shift[row % c]);
                         }
                       });
    }
  });
  return activate_(y, map.activation);
}

struct CpuNorm {
  static Tensor normalize(const Tensor& input, const NormMap& map) {
    return map.groups > 0 ? NormWithAten::normalize(input, map) : normalize_channels(input, map);
  }
};

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_batch_statistics", &batch_statistics_cpu);
  m.impl("_normalize", &NormSignatures<CpuNorm>::normalize);
}

}  // namespace

}  // namespace patchconv
