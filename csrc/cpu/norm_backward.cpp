// Batch norm's gradients on the CPU, with or without a ReLU after the norm, in two passes over gradient and
// input: three sums per channel, then the elementwise map. The map may write over the incoming gradient.
//
// g is the gradient of the norm's result. With a ReLU, that is the incoming gradient where the norm's value,
// computed again exactly as in the forward pass, was above zero, and else 0. The sums are of g, of g * (x -
// mean) and of x - mean, in float64. They are cut in a fixed way, so they do not depend on the number of
// threads. The map is computed in float64 (for half precision in float32) and rounded once. Nothing is
// allocated but results and some numbers per channel.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <algorithm>
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

constexpr int64_t kLanes = 16;     // independent sums along a row
constexpr int64_t kChunks = 64;    // parts of the pixels in channels_last, at most
constexpr int64_t kGrain = 32768;  // elements below which another thread does not pay

template <typename T>
using Exact = std::conditional_t<sizeof(T) == 2, float, double>;

// The numbers of every channel. Forward: value = x * scale + shift, as in normalize_cpu. Backward: the
// input's gradient is (g - g_mean - (x - mean) * slope) * factor.
template <typename N>
struct Channels {
  std::vector<N> scale, shift, mean, g_mean, slope, factor;
  bool relu;

  Channels(int64_t count, bool relu_follows)
      : scale(count),
        shift(count),
        mean(count),
        g_mean(count),
        slope(count),
        factor(count),
        relu(relu_follows) {}
};

template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline N before_relu(T grad, T x, N scale, N shift) {
  const auto value = static_cast<T>(static_cast<N>(x) * scale + shift);
  return !kRelu || static_cast<N>(value) > N(0) ? static_cast<N>(grad) : N(0);
}

template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline T gradient(T grad, T x, N scale, N shift, N mean, N g_mean, N slope, N factor) {
  const N g = before_relu<kRelu>(grad, x, scale, shift);
  return static_cast<T>((g - g_mean - (static_cast<N>(x) - mean) * slope) * factor);
}

template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline void sum_each(const T* grad, const T* x, int64_t n, N scale, N shift,
                                            N mean_of_x, double* sums) {
  double first[kLanes] = {}, second[kLanes] = {}, third[kLanes] = {};
  const auto mean = static_cast<double>(mean_of_x);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const auto g = static_cast<double>(before_relu<kRelu>(grad[i + j], x[i + j], scale, shift));
      const double d = static_cast<double>(x[i + j]) - mean;
      first[j] += g;
      second[j] += g * d;
      third[j] += d;
    }
  }
  for (int64_t j = 0; i < n; ++i, ++j) {
    const auto g = static_cast<double>(before_relu<kRelu>(grad[i], x[i], scale, shift));
    const double d = static_cast<double>(x[i]) - mean;
    first[j] += g;
    second[j] += g * d;
    third[j] += d;
  }
  for (int64_t j = 0; j < kLanes; ++j) {
    sums[0] += first[j];
    sums[1] += second[j];
    sums[2] += third[j];
  }
}

template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline void sum_each_pixel(const T* grad, const T* x, int64_t pixels, int64_t count,
                                                  const N* __restrict scale, const N* __restrict shift,
                                                  const N* __restrict mean, double* __restrict first,
                                                  double* __restrict second, double* __restrict third) {
  for (int64_t p = 0; p < pixels; ++p, grad += count, x += count) {
    for (int64_t k = 0; k < count; ++k) {
      const auto g = static_cast<double>(before_relu<kRelu>(grad[k], x[k], scale[k], shift[k]));
      const double d = static_cast<double>(x[k]) - static_cast<double>(mean[k]);
      first[k] += g;
      second[k] += g * d;
      third[k] += d;
    }
  }
}

// `out` may be `grad`.
template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline void map_each(const T* grad, const T* x, T* out, int64_t n, N scale, N shift,
                                            N mean, N g_mean, N slope, N factor) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = gradient<kRelu>(grad[i], x[i], scale, shift, mean, g_mean, slope, factor);
  }
}

template <bool kRelu, typename T, typename N>
[[gnu::always_inline]] inline void map_each_pixel(const T* grad, const T* x, T* out, int64_t pixels,
                                                  int64_t count, const N* scale, const N* shift,
                                                  const N* mean, const N* g_mean, const N* slope,
                                                  const N* factor) {
  for (int64_t p = 0; p < pixels; ++p, grad += count, x += count, out += count) {
#pragma GCC ivdep
    for (int64_t k = 0; k < count; ++k) {
      out[k] = gradient<kRelu>(grad[k], x[k], scale[k], shift[k], mean[k], g_mean[k], slope[k], factor[k]);
    }
  }
}

// Overloads can be compiled for several instruction sets, templates cannot.
#define PATCHCONV_PASSES(T)                                                                                \
  PATCHCONV_CLONES void sum_row(const T* grad, const T* x, int64_t n, const Channels<Exact<T>>& c,         \
                                int64_t k, double* sums) {                                                 \
    if (c.relu) return sum_each<true>(grad, x, n, c.scale[k], c.shift[k], c.mean[k], sums);                \
    sum_each<false>(grad, x, n, c.scale[k], c.shift[k], c.mean[k], sums);                                  \
  }                                                                                                        \
  PATCHCONV_CLONES void sum_pixels(const T* grad, const T* x, int64_t pixels, int64_t count,               \
                                   const Channels<Exact<T>>& c, double* first, double* second,             \
                                   double* third) {                                                        \
    const auto *scale = c.scale.data(), *shift = c.shift.data(), *mean = c.mean.data();                    \
    if (c.relu)                                                                                            \
      return sum_each_pixel<true>(grad, x, pixels, count, scale, shift, mean, first, second, third);       \
    sum_each_pixel<false>(grad, x, pixels, count, scale, shift, mean, first, second, third);               \
  }                                                                                                        \
  PATCHCONV_CLONES void map_row(const T* grad, const T* x, T* out, int64_t n, const Channels<Exact<T>>& c, \
                                int64_t k) {                                                               \
    const auto scale = c.scale[k], shift = c.shift[k], mean = c.mean[k], g_mean = c.g_mean[k],             \
               slope = c.slope[k], factor = c.factor[k];                                                   \
    if (c.relu) return map_each<true>(grad, x, out, n, scale, shift, mean, g_mean, slope, factor);         \
    map_each<false>(grad, x, out, n, scale, shift, mean, g_mean, slope, factor);                           \
  }                                                                                                        \
  PATCHCONV_CLONES void map_pixels(const T* grad, const T* x, T* out, int64_t pixels, int64_t count,       \
                                   const Channels<Exact<T>>& c) {                                          \
    const auto *scale = c.scale.data(), *shift = c.shift.data(), *mean = c.mean.data(),                    \
               *g_mean = c.g_mean.data(), *slope = c.slope.data(), *factor = c.factor.data();              \
    if (c.relu) {                                                                                          \
      return map_each_pixel<true>(grad, x, out, pixels, count, scale, shift, mean, g_mean, slope, factor); \
    }                                                                                                      \
    map_each_pixel<false>(grad, x, out, pixels, count, scale, shift, mean, g_mean, slope, factor);         \
  }
PATCHCONV_PASSES(float)
PATCHCONV_PASSES(double)
PATCHCONV_PASSES(c10::BFloat16)
PATCHCONV_PASSES(c10::Half)
#undef PATCHCONV_PASSES

// Dense memory: planes of `pixels` elements, or for channels_last pixels of `channels` elements.
struct Layout {
  int64_t images, channels, pixels;
  bool last;

  explicit Layout(const Tensor& x)
      : images(x.size(0)),
        channels(x.size(1)),
        pixels(x.numel() / std::max<int64_t>(1, x.size(0) * x.size(1))),
        last(!x.is_contiguous()) {}
};

template <typename T>
void sum_all(const Layout& l, const T* grad, const T* x, const Channels<Exact<T>>& c, double* first,
             double* second, double* third) {
  if (!l.last) {
    at::parallel_for(0, l.channels, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, l.images * l.pixels)),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t k = begin; k < end; ++k) {
                         double sums[3] = {};
                         for (int64_t image = 0; image < l.images; ++image) {
                           const int64_t row = (image * l.channels + k) * l.pixels;
                           sum_row(grad + row, x + row, l.pixels, c, k, sums);
                         }
                         first[k] = sums[0];
                         second[k] = sums[1];
                         third[k] = sums[2];
                       }
                     });
    return;
  }
  const int64_t pixels = l.images * l.pixels, chunk = (pixels + kChunks - 1) / kChunks;
  const int64_t chunks = chunk == 0 ? 0 : (pixels + chunk - 1) / chunk;
  std::vector<double> parts(3 * chunks * l.channels);
  at::parallel_for(0, chunks, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, chunk * l.channels)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t part = begin; part < end; ++part) {
                       const int64_t from = part * chunk, place = from * l.channels;
                       double* sums = parts.data() + 3 * part * l.channels;
                       sum_pixels(grad + place, x + place, std::min(pixels, from + chunk) - from, l.channels,
                                  c, sums, sums + l.channels, sums + 2 * l.channels);
                     }
                   });
  for (const auto part : irange(chunks)) {
    for (const auto k : irange(l.channels)) {
      first[k] += parts[3 * part * l.channels + k];
      second[k] += parts[(3 * part + 1) * l.channels + k];
      third[k] += parts[(3 * part + 2) * l.channels + k];
    }
  }
}

template <typename T>
void map_all(const Layout& l, const T* grad, const T* x, const Channels<Exact<T>>& c, T* out) {
  if (l.last) {
    at::parallel_for(0, l.images * l.pixels, std::max<int64_t>(1, kGrain / l.channels),
                     [&](int64_t begin, int64_t end) {
                       const int64_t at = begin * l.channels;
                       map_pixels(grad + at, x + at, out + at, end - begin, l.channels, c);
                     });
    return;
  }
  at::parallel_for(0, l.images * l.channels, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, l.pixels)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       const int64_t at = row * l.pixels;
                       map_row(grad + at, x + at, out + at, l.pixels, c, row % l.channels);
                     }
                   });
}

bool has_layout(const Tensor& tensor, at::MemoryFormat format) { return tensor.is_contiguous(format); }

// `target`: the incoming gradient, to be written over; undefined: new memory.
Gradients gradients(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                    std::array<bool, 3> mask, Tensor target) {
  const auto format = input.is_contiguous() ? at::MemoryFormat::Contiguous : input.suggest_memory_format();
  const Tensor x = input.contiguous(format), g = grad.contiguous(format);
  const Layout layout(x);
  const auto parameter_options = x.options().dtype(at::toOpMathType(x.scalar_type()));
  Tensor grad_weight = mask[1] ? at::empty({layout.channels}, parameter_options) : Tensor();
  Tensor grad_bias = mask[2] ? at::empty({layout.channels}, parameter_options) : Tensor();
  const bool direct = target.defined() && has_layout(target, format);
  Tensor result = mask[0] ? (direct ? target : at::empty_like(x)) : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_backward", [&] {
    using Acc = at::opmath_type<scalar_t>;
    using Number = Exact<scalar_t>;
    const auto numbers = [](const OptionalTensor& tensor) {
      return given(tensor) ? tensor->to(at::kDouble).contiguous() : Tensor();
    };
    const Tensor w = numbers(map.weight), b = numbers(map.bias), m = numbers(map.mean);
    const Tensor inverse = map.var.to(at::kDouble).add(map.eps).rsqrt_();
    const auto number = [](const Tensor& tensor, int64_t k, double otherwise) {
      return tensor.defined() ? tensor.const_data_ptr<double>()[k] : otherwise;
    };
    Channels<Number> c(layout.channels, map.activation == Activation::kRelu);
    for (const auto k : irange(layout.channels)) {
      // The same numbers as in the forward pass (normalize_channels).
      c.scale[k] = static_cast<Number>(number(inverse, k, 1)) * static_cast<Number>(number(w, k, 1));
      c.mean[k] = static_cast<Number>(number(m, k, 0));
      c.shift[k] = static_cast<Number>(number(b, k, 0)) - c.mean[k] * c.scale[k];
    }
    const auto* from = x.const_data_ptr<scalar_t>();
    const auto* gradient_data = g.const_data_ptr<scalar_t>();
    std::vector<double> first(layout.channels), second(layout.channels), third(layout.channels);
    if ((mask[0] && training) || mask[1] || mask[2]) {
      sum_all(layout, gradient_data, from, c, first.data(), second.data(), third.data());
    }
    const auto count = static_cast<double>(layout.images * layout.pixels);
    for (const auto k : irange(layout.channels)) {
      const double inv = number(inverse, k, 1);
      // The saved mean was rounded: the part of the sum that comes from the rounding is taken out.
      if (training && count > 0) second[k] -= first[k] * third[k] / count;
      c.g_mean[k] = static_cast<Number>(training ? first[k] / count : 0);
      c.slope[k] = static_cast<Number>(training ? inv * inv * second[k] / count : 0);
      c.factor[k] = static_cast<Number>(inv * number(w, k, 1));
      if (mask[1]) grad_weight.mutable_data_ptr<Acc>()[k] = static_cast<Acc>(second[k] * inv);
      if (mask[2]) grad_bias.mutable_data_ptr<Acc>()[k] = static_cast<Acc>(first[k]);
    }
    if (mask[0]) {
      map_all(layout, gradient_data, from, c, result.mutable_data_ptr<scalar_t>());
    }
  });
  if (target.defined() && !direct) target.copy_(result);
  return {result, grad_weight, grad_bias};
}

struct CpuNorm : NormWithAten {
  static Gradients backward(const Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                            std::array<bool, 3> mask) {
    if (map.groups > 0 || map.activation == Activation::kSilu || grad.scalar_type() != input.scalar_type())
      return NormWithAten::backward(grad, input, map, training, mask);
    return gradients(grad, input, map, training, mask, {});
  }
  static TwoTensors backward_(Tensor& grad, const Tensor& input, const NormMap& map, bool training,
                              std::array<bool, 2> mask) {
    auto [_, grad_weight, grad_bias] = gradients(grad, input, map, training, {true, mask[0], mask[1]}, grad);
    return {grad_weight, grad_bias};
  }
};

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_norm_backward", &NormSignatures<CpuNorm>::backward);
  m.impl("_batch_norm_backward_", &NormSignatures<CpuNorm>::backward_);
}

}  // namespace

}  // namespace patchconv
