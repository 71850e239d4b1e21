// CPU kernels of the activations that save one bit per element for their backward: forward with the bits in
// one pass (also in place), the bits alone, and the gradient from the bits.
//
// Allocates the output and the bits, nothing else. Values and gradients are stock PyTorch's bit for bit: a
// half-precision element is compared with a bound of float32, clamped to a bound of its own dtype, and
// multiplied in float32 and rounded once; float64 is multiplied in float64. Every element, also in an
// incomplete last block, goes through the same code: vectors of 16 bytes, which GCC and Clang support on any
// processor. Wider vectors, or stores that bypass the cache, gain nothing, since memory is the limit.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardtanh.h>
#include <c10/core/Scalar.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "ops/activation.h"

// Inlines everything into the loop over blocks: a call per block costs a fifth of the time if the result's
// pages are new.
#define PATCHCONV_INLINE inline __attribute__((always_inline))

namespace patchconv {

using at::Tensor;

namespace {

constexpr int64_t kBlock = 64;     // elements that are worked on together
constexpr int64_t kGrain = 32768;  // elements below which another thread does not pay

template <typename T>
using Wide = at::opmath_type<T>;  // stock multiplies, and compares for a gradient, in this type
template <typename T>
using Stored = std::conditional_t<sizeof(T) == 2, int16_t, T>;  // half types as integers

template <typename S>
struct Vectors {
  using Integer =
      std::conditional_t<sizeof(S) == 2, int16_t, std::conditional_t<sizeof(S) == 4, int32_t, int64_t>>;
  typedef S Values __attribute__((vector_size(16)));
  typedef Integer Masks __attribute__((vector_size(16)));
};
template <typename S>
using Vector = typename Vectors<S>::Values;
template <typename S>
using MaskVector = typename Vectors<S>::Masks;  // all ones or all zeros per element, as comparisons give it
template <typename S>
constexpr int64_t kLanes = 16 / sizeof(S);

template <typename S>
PATCHCONV_INLINE Vector<S> load(const S* x) {
  Vector<S> v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}
template <typename S>
PATCHCONV_INLINE void store(Vector<S> v, S* y) {
  std::memcpy(y, &v, sizeof(v));
}
template <typename S>
PATCHCONV_INLINE Vector<S> all(S x) {
  return x - Vector<S>{};  // a sum would lose the sign of -0
}
template <typename S>
PATCHCONV_INLINE Vector<S> keep(MaskVector<S> mask, Vector<S> v) {
  return (Vector<S>)(mask & (MaskVector<S>)v);
}
template <typename S>
PATCHCONV_INLINE Vector<S> select(MaskVector<S> mask, Vector<S> yes, Vector<S> no) {
  return (Vector<S>)((mask & (MaskVector<S>)yes) | (~mask & (MaskVector<S>)no));
}

// How elements compare with a bound; every comparison with NaN is false.
template <typename T>
struct Order {
  using V = Vector<T>;
  using M = MaskVector<T>;
  using Bound = T;
  static Bound bound(T b) { return b; }
  static PATCHCONV_INLINE M at_most(V x, Bound b) { return x <= all(b); }
  static PATCHCONV_INLINE M at_least(V x, Bound b) { return x >= all(b); }
  static PATCHCONV_INLINE M below(V x, Bound b) { return x < all(b); }
  static PATCHCONV_INLINE M above(V x, Bound b) { return x > all(b); }
};

// Half types compare as integers, without conversion: with the magnitude of negative numbers inverted, their
// bits are in the order of the numbers, with NaN at both ends. For each comparison a bound becomes the last
// (or first) integer for which it holds.
template <typename T>
struct HalfOrder {
  using V = Vector<int16_t>;
  struct Bound {
    int16_t at_most, at_least, below, above;
  };
  static constexpr int16_t kLast = std::is_same_v<T, at::Half> ? 0x7c00 : 0x7f80;  // infinity
  static constexpr int16_t kFirst = -kLast - 1;

  // The last integer, from `first` on in steps of `step`, whose number `holds` accepts.
  template <typename Holds>
  static int16_t last(int first, int step, const Holds& holds) {
    int begin = 0, end = kLast - kFirst + 1;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      const int key = first + step * middle;
      const auto bits = static_cast<uint16_t>(key < 0 ? key ^ 0x7fff : key);
      if (holds(static_cast<float>(T(bits, T::from_bits())))) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return static_cast<int16_t>(first + step * (begin - 1));
  }
  static Bound bound(float b) {
    return {last(kFirst, 1, [b](float x) { return x <= b; }),
            last(kLast, -1, [b](float x) { return x >= b; }), last(kFirst, 1, [b](float x) { return x < b; }),
            last(kLast, -1, [b](float x) { return x > b; })};
  }
  static PATCHCONV_INLINE V between(V x, int16_t first, int16_t last) {
    const V key = x ^ ((x >> 15) & all<int16_t>(0x7fff));
    return (key >= all(first)) & (key <= all(last));
  }
  static PATCHCONV_INLINE V at_most(V x, Bound b) { return between(x, kFirst, b.at_most); }
  static PATCHCONV_INLINE V at_least(V x, Bound b) { return between(x, b.at_least, kLast); }
  static PATCHCONV_INLINE V below(V x, Bound b) { return between(x, kFirst, b.below); }
  static PATCHCONV_INLINE V above(V x, Bound b) { return between(x, b.above, kLast); }
};
template <>
struct Order<at::Half> : HalfOrder<at::Half> {};
template <>
struct Order<at::BFloat16> : HalfOrder<at::BFloat16> {};

// A block of half precision to float32 and back, rounded to nearest even. torch's own conversion of float16
// has branches, which compilers do not vectorise.
PATCHCONV_INLINE int32_t choose(bool which, int32_t yes, int32_t no) {
  return no ^ (-int32_t{which} & (yes ^ no));
}
PATCHCONV_INLINE float widen(at::BFloat16 x) { return x; }
PATCHCONV_INLINE float widen(at::Half x) {
  constexpr int32_t kBias = 112 << 23;  // between the exponents of the two formats
  const int32_t magnitude = (x.x & 0x7fff) << 13;
  const int32_t normal = magnitude + kBias + choose(magnitude >= 0x7c00 << 13, kBias, 0);
  const float denormal = c10::bit_cast<float>(magnitude + kBias + (1 << 23)) - 0x1p-14f;
  const int32_t bits = choose(magnitude < 1 << 23, c10::bit_cast<int32_t>(denormal), normal);
  return c10::bit_cast<float>(bits | (x.x & 0x8000) << 16);
}
PATCHCONV_INLINE int16_t narrow(float x, at::BFloat16) { return c10::bit_cast<int16_t>(at::BFloat16(x)); }
PATCHCONV_INLINE int16_t narrow(float x, at::Half) {
  const auto bits = c10::bit_cast<int32_t>(x);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const int32_t denormal = c10::bit_cast<int32_t>(c10::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const int32_t finite = choose(magnitude < 113 << 23, denormal, normal);
  const int32_t special = choose(magnitude > 0x7f800000, 0x7e00, 0x7c00);
  return static_cast<int16_t>(choose(magnitude >= 143 << 23, special, finite) | (bits >> 16 & 0x8000));
}

// y = function(x, index) for vectors of a block, in float32 for half types. x may be y.
template <typename T, typename Function>
PATCHCONV_INLINE void map_wide(const Stored<T>* x, Stored<T>* y, const Function& function) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    for (int64_t i = 0; i < kBlock; i += kLanes<T>) store<T>(function(load(x + i), i), y + i);
  } else {
    float wide[kBlock];
    int16_t narrowed[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) wide[i] = widen(c10::bit_cast<T>(x[i]));
    for (int64_t i = 0; i < kBlock; i += kLanes<float>) store<float>(function(load(wide + i), i), wide + i);
    for (int64_t i = 0; i < kBlock; ++i) narrowed[i] = narrow(wide[i], T());
    std::memcpy(y, narrowed, sizeof(narrowed));
  }
}

// Bit i of the result belongs to element i of the 16 in these vectors.
template <typename S>
PATCHCONV_INLINE uint16_t pack(const MaskVector<S>* masks) {
#if defined(__SSE2__)
  // Packing with saturation halves the size of an element, and keeps all ones and all zeros.
  __m128i v[sizeof(S)];
  std::memcpy(v, masks, sizeof(v));
  for (size_t bytes = sizeof(S); bytes > 1; bytes /= 2) {
    for (size_t i = 0; i < bytes / 2; ++i) {
      v[i] = bytes > 2 ? _mm_packs_epi32(v[2 * i], v[2 * i + 1]) : _mm_packs_epi16(v[2 * i], v[2 * i + 1]);
    }
  }
  return static_cast<uint16_t>(_mm_movemask_epi8(v[0]));
#else
  uint16_t bits = 0;
  for (int64_t i = 0; i < 16; ++i)
    bits |= static_cast<uint16_t>((masks[i / kLanes<S>][i % kLanes<S>] & 1) << i);
  return bits;
#endif
}

// The masks of elements [first, first + kLanes) of a block.
template <typename S>
PATCHCONV_INLINE MaskVector<S> unpack(const uint8_t* bits, int64_t first) {
  const int here = bits[first / 8] >> (first % 8);
  if constexpr (sizeof(S) == 2) {
    const Vector<int16_t> lanes = {1, 2, 4, 8, 16, 32, 64, 128};
    return (all(static_cast<int16_t>(here)) & lanes) == lanes;
  } else {  // an element of 8 bytes as two of 4: SSE2 cannot compare 8
    const auto lanes = sizeof(S) == 4 ? Vector<int32_t>{1, 2, 4, 8} : Vector<int32_t>{1, 1, 2, 2};
    return (MaskVector<S>)((all(here) & lanes) == lanes);
  }
}

// The parameters of an activation, each in the precision in which stock uses it.
template <typename T>
struct Rule {
  using Bound = typename Order<T>::Bound;
  Bound low, high;                  // where the bits change
  Bound clamp_low, clamp_high;      // values beyond these
  Stored<T> low_value, high_value;  // become these
  Wide<T> slope;
};

template <typename T>
Rule<T> make_rule(Mask kind, double a, double b, bool values) {
  const bool hardtanh = kind == Mask::kHardtanh, threshold = kind == Mask::kThreshold;
  const bool hardsigmoid = kind == Mask::kHardsigmoid;
  const auto bound = [](double x) { return Order<T>::bound(c10::Scalar(x).to<Wide<T>>()); };
  // Parameters that are not used are not converted either: a conversion that overflows is an error.
  const T low = c10::Scalar(values && hardtanh ? a : values && threshold ? b : 0.0).to<T>();
  const T high = c10::Scalar(values && hardtanh ? b : 0.0).to<T>();
  return {.low = bound(hardsigmoid             ? -3
                       : hardtanh || threshold ? a
                                               : 0),
          .high = bound(hardsigmoid ? 3
                        : hardtanh  ? b
                                    : 0),
          .clamp_low = Order<T>::bound(low),
          .clamp_high = Order<T>::bound(high),
          .low_value = c10::bit_cast<Stored<T>>(low),
          .high_value = c10::bit_cast<Stored<T>>(high),
          .slope = c10::Scalar(kind == Mask::kLeakyRelu ? a : 0.0).to<Wide<T>>()};
}

// The bits and, where kValues, the values of a block. x may be y.
template <typename T, Mask kKind, bool kValues>
PATCHCONV_INLINE void activate(Rule<T> rule, const Stored<T>* x, Stored<T>* y, uint8_t* bits) {
  using O = Order<T>;
  using S = Stored<T>;
  for (int64_t sixteen = 0; sixteen < kBlock; sixteen += 16) {
    MaskVector<S> inside[sizeof(S)];
    for (int64_t j = 0; j < static_cast<int64_t>(sizeof(S)); ++j) {
      const int64_t i = sixteen + j * kLanes<S>;
      const Vector<S> v = load(x + i);
      if constexpr (kKind == Mask::kRelu || kKind == Mask::kThreshold) {
        inside[j] = ~O::at_most(v, rule.low);
      } else if constexpr (kKind == Mask::kLeakyRelu) {
        inside[j] = O::above(v, rule.low);
      } else if constexpr (kKind == Mask::kHardtanh) {
        inside[j] = ~(O::at_most(v, rule.low) | O::at_least(v, rule.high));
      } else {
        inside[j] = O::above(v, rule.low) & O::below(v, rule.high);
      }
      if constexpr (!kValues) continue;
      if constexpr (kKind == Mask::kRelu) {  // not by the bits: stock keeps -0
        store<S>(keep<S>(~O::below(v, rule.clamp_low), v), y + i);
      } else if constexpr (kKind == Mask::kHardtanh) {
        const Vector<S> w = select<S>(O::below(v, rule.clamp_low), all(rule.low_value), v);
        store<S>(select<S>(O::above(w, rule.clamp_high), all(rule.high_value), w), y + i);
      } else if constexpr (kKind == Mask::kThreshold) {
        store<S>(select<S>(inside[j], v, all(rule.low_value)), y + i);
      }
    }
    const uint16_t packed = pack<S>(inside);
    bits[sixteen / 8] = static_cast<uint8_t>(packed);
    bits[sixteen / 8 + 1] = static_cast<uint8_t>(packed >> 8);
  }
  if constexpr (kKind == Mask::kLeakyRelu && kValues) {
    using W = Wide<T>;
    map_wide<T>(x, y, [&](Vector<W> v, int64_t) __attribute__((always_inline)) {
      return select<W>(v > all(W(0)), v, v * all(rule.slope));
    });
  }
}

// Calls work(x, y, bits) for every 64 elements. If the last block is incomplete, it works on copies.
template <typename S, typename Bits, typename Work>
void for_blocks(int64_t numel, const S* x, S* y, Bits* bits, const Work& work) {
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, kGrain / kBlock, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t at = block * kBlock;
      const int64_t size = std::min(kBlock, numel - at);
      if (size == kBlock) {
        work(x + at, y == nullptr ? nullptr : y + at, bits + at / 8);
        continue;
      }
      S in[kBlock] = {}, out[kBlock];
      uint8_t packed[kBlock / 8] = {};
      std::copy_n(x + at, size, in);
      if constexpr (std::is_const_v<Bits>) std::copy_n(bits + at / 8, mask_bytes(size), packed);
      work(in, out, packed);
      if (y != nullptr) std::copy_n(out, size, y + at);
      if constexpr (!std::is_const_v<Bits>) {
        if (size % 8 != 0) packed[size / 8] &= static_cast<uint8_t>((1 << size % 8) - 1);
        std::copy_n(packed, mask_bytes(size), bits + at / 8);
      }
    }
  });
}

// Fills the output, if there is one, and returns the bits. The output may be the input.
Tensor activate_all(const Tensor& input, const Tensor& output, Mask kind, double a, double b) {
  auto result = at::empty({mask_bytes(input.numel())}, input.options().dtype(at::kByte));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "mask_forward", [&] {
    using S = Stored<scalar_t>;
    const auto rule = make_rule<scalar_t>(kind, a, b, output.defined());
    const auto* x = static_cast<const S*>(input.const_data_ptr());
    auto* y = output.defined() ? static_cast<S*>(output.mutable_data_ptr()) : nullptr;
    const auto run = [&]<Mask kKind>(std::integral_constant<Mask, kKind>) {
      const auto with = [&]<bool kValues>(std::bool_constant<kValues>) {
        for_blocks(input.numel(), x, y, result.mutable_data_ptr<uint8_t>(),
                   [rule](const S* in, S* out, uint8_t* bits) __attribute__((always_inline)) {
                     activate<scalar_t, kKind, kValues>(rule, in, out, bits);
                   });
      };
      y == nullptr ? with(std::false_type()) : with(std::true_type());
    };
    switch (kind) {
      case Mask::kRelu:
        return run(std::integral_constant<Mask, Mask::kRelu>());
      case Mask::kLeakyRelu:
        return run(std::integral_constant<Mask, Mask::kLeakyRelu>());
      case Mask::kHardtanh:
        return run(std::integral_constant<Mask, Mask::kHardtanh>());
      case Mask::kThreshold:
        return run(std::integral_constant<Mask, Mask::kThreshold>());
      case Mask::kHardsigmoid:
        return run(std::integral_constant<Mask, Mask::kHardsigmoid>());
    }
    TORCH_INTERNAL_ASSERT(false);
  });
  return result;
}

Tensor mask_pack_cpu(const Tensor& input, int64_t kind, double a, double b) {
  if (!has_mask_kernel(kind)) return mask_pack_with_aten(input, kind, a, b);
  return activate_all(input, Tensor(), static_cast<Mask>(kind), a, b);
}

// Returns the bits.
Tensor forward_to(const Tensor& input, const Tensor& output, int64_t kind, double a, double b) {
  // Stock computes the values in two cases: for hardsigmoid, and if a bound is NaN, where all values are NaN.
  const auto mask = static_cast<Mask>(kind);
  const bool nan = mask == Mask::kHardtanh && (std::isnan(a) || std::isnan(b));
  if (mask != Mask::kHardsigmoid && !nan) return activate_all(input, output, mask, a, b);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto bits = mask_pack_cpu(input, kind, a, b);
  Tensor values = output;
  nan ? at::hardtanh_out(values, input, a, b) : at::hardsigmoid_out(values, input);
  return bits;
}

std::tuple<Tensor, Tensor> mask_forward_cpu(const Tensor& input, int64_t kind, double a, double b) {
  if (!has_mask_kernel(kind)) return mask_forward_with_aten(input, kind, a, b);
  auto output = at::empty_like(input);
  auto bits = forward_to(input, output, kind, a, b);
  return {std::move(output), std::move(bits)};
}

Tensor mask_forward_in_place_cpu(Tensor& input, int64_t kind, double a, double b) {
  if (!has_mask_kernel(kind)) return mask_forward_in_place_with_aten(input, kind, a, b);
  return forward_to(input, input, kind, a, b);
}

// A factor of 0 or 1 needs no arithmetic, and 0 gives 0 whatever the gradient is.
template <typename T>
PATCHCONV_INLINE void backward_block(Wide<T> inside, Wide<T> outside, const Stored<T>* x, Stored<T>* y,
                                     const uint8_t* bits) {
  using S = Stored<T>;
  if (inside == 1 && outside == 0) {
    for (int64_t i = 0; i < kBlock; i += kLanes<S>) store<S>(keep<S>(unpack<S>(bits, i), load(x + i)), y + i);
    return;
  }
  using W = Wide<T>;
  const auto kept_inside = MaskVector<W>{} - (inside != 0), kept_outside = MaskVector<W>{} - (outside != 0);
  map_wide<T>(x, y, [=](Vector<W> v, int64_t i) __attribute__((always_inline)) {
    const MaskVector<W> mask = unpack<W>(bits, i);
    return (Vector<W>)((MaskVector<W>)keep<W>(mask & kept_inside, v * all(inside)) |
                       (MaskVector<W>)keep<W>(~mask & kept_outside, v * all(outside)));
  });
}

Tensor mask_backward_cpu(const Tensor& grad, const Tensor& bits, double inside, double outside) {
  TORCH_CHECK_VALUE(
      bits.scalar_type() == at::kByte && bits.numel() == mask_bytes(grad.numel()) && bits.is_contiguous(),
      "patchconv::_mask_backward: expected bits to hold ", mask_bytes(grad.numel()), " bytes, got ",
      bits.sizes(), " of ", bits.scalar_type());
  auto result = at::empty_like(grad);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "mask_backward", [&] {
    using S = Stored<scalar_t>;
    const auto factor_inside = c10::Scalar(inside).to<Wide<scalar_t>>();
    const auto factor_outside = c10::Scalar(outside).to<Wide<scalar_t>>();
    for_blocks(grad.numel(), static_cast<const S*>(grad.const_data_ptr()),
               static_cast<S*>(result.mutable_data_ptr()), bits.const_data_ptr<uint8_t>(),
               [=](const S* in, S* out, const uint8_t* mask) __attribute__((always_inline)) {
                 backward_block<scalar_t>(factor_inside, factor_outside, in, out, mask);
               });
  });
  return result;
}

TORCH_LIBRARY_IMPL(patchconv, CPU, m) {
  m.impl("_mask_forward", &mask_forward_cpu);
  m.impl("_mask_forward_", &mask_forward_in_place_cpu);
  m.impl("_mask_pack", &mask_pack_cpu);
  m.impl("_mask_backward", &mask_backward_cpu);
}

}  // namespace

}  // namespace patchconv
