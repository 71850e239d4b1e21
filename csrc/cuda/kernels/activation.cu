// Activations with a packed mask, and gradients from it. One read and one write of the tensor, and one bit
// per element; nothing is allocated. Arithmetic is in float32, rounded once.
#include "cuda/kernels/activation.h"

#include "cuda/kernels/bits.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// Limits as given, but a threshold: stock's is rounded to the tensor's type.
template <Mask kMask>
PATCHCONV_DEVICE bool is_inside(float x, float a, float b) {
  if constexpr (kMask == Mask::kRelu) return !(x <= 0);
  if constexpr (kMask == Mask::kLeakyRelu) return x > 0;
  if constexpr (kMask == Mask::kHardtanh) return !(x <= a) && !(x >= b);
  if constexpr (kMask == Mask::kThreshold) return !(x <= a);
  if constexpr (kMask == Mask::kHardsigmoid) return x > -3 && x < 3;
}

// `a` is as given; `low` and `high`, `a` and `b` rounded to the tensor's type, are for values.
template <Mask kMask>
PATCHCONV_DEVICE float value_of(float x, float a, float low, float high) {
  if constexpr (kMask == Mask::kRelu) return x <= 0 ? 0 : x;
  if constexpr (kMask == Mask::kLeakyRelu) return x > 0 ? x : multiply(x, a);
  if constexpr (kMask == Mask::kHardtanh) return x <= low ? low : x >= high ? high : x;
  if constexpr (kMask == Mask::kThreshold) return x <= low ? high : x;
  if constexpr (kMask == Mask::kHardsigmoid) {
    const float moved = add(x, 3);
    return multiply(moved <= 0 ? 0 : moved >= 6 ? 6 : moved, 1.0f / 6);
  }
}

// Budget: 112 registers, 0 bytes of shared memory.
template <typename T, Mask kMask, bool kSum>
__global__ void __launch_bounds__(kElementThreads) mask_forward_kernel(MaskForward call, bool aligned) {
  using E = Elements<T>;
  const T* x = static_cast<const T*>(call.x);
  const T* other = static_cast<const T*>(call.other);
  const float low = to_float(from_float<T>(call.a)), high = to_float(from_float<T>(call.b));
  const float limit = kMask == Mask::kThreshold ? low : call.a;
  typename E::Piece pieces[E::kVectors], others[kSum ? E::kVectors : 1];
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) pieces[v] = E::load(x, E::first(v), call.count, aligned);
  if constexpr (kSum) {
#pragma unroll
    for (int v = 0; v < E::kVectors; ++v) others[v] = E::load(other, E::first(v), call.count, aligned);
  }
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
    const int64_t begin = E::first(v);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      float value = to_float(pieces[v].at[i]);
      // The sum is rounded to the tensor's type, as the sum of two tensors is.
      if constexpr (kSum) value = to_float(from_float<T>(add(value, to_float(others[v].at[i]))));
      const bool there = begin + i < call.count;
      mine |= static_cast<uint32_t>(there && is_inside<kMask>(value, limit, call.b)) << i;
      pieces[v].at[i] = from_float<T>(value_of<kMask>(value, call.a, low, high));
    }
    store_bits<E::kCount>(call.bits, mine, begin, call.count);
    if (call.y != nullptr) E::store(static_cast<T*>(call.y), pieces[v], begin, call.count, aligned);
  }
}

PATCHCONV_DEVICE float scaled(float grad, float factor) {
  return factor == 0 ? 0 : factor == 1 ? grad : multiply(grad, factor);
}

// Budget: 64 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kElementThreads) mask_backward_kernel(MaskBackward call, bool aligned) {
  using E = Elements<T>;
  const T* grad = static_cast<const T*>(call.grad);
  typename E::Piece pieces[E::kVectors];
  uint32_t bits[E::kVectors];
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
    pieces[v] = E::load(grad, E::first(v), call.count, aligned);
    bits[v] = load_bits<E::kCount>(call.bits, E::first(v), call.count);
  }
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      const float factor = bits[v] >> i & 1 ? call.inside : call.outside;
      pieces[v].at[i] = from_float<T>(scaled(to_float(pieces[v].at[i]), factor));
    }
    E::store(static_cast<T*>(call.out), pieces[v], E::first(v), call.count, aligned);
  }
}

template <typename T>
void forward(Mask mask, const MaskForward& call, Stream stream) {
  const auto start = [&](auto kernel) {
    const bool aligned =
        aligned_to_pieces(call.x) && aligned_to_pieces(call.other) && aligned_to_pieces(call.y);
    launch(kernel, {Elements<T>::tiles(call.count)}, kElementThreads, 0, stream, call, aligned);
  };
  if (call.other != nullptr) {
    if (mask != Mask::kRelu) throw LaunchError("an activation of a sum that is not ReLU");
    return start(mask_forward_kernel<T, Mask::kRelu, true>);
  }
#define PATCHCONV_CASE(KIND) \
  case Mask::KIND:           \
    return start(mask_forward_kernel<T, Mask::KIND, false>);
  switch (mask) {
    PATCHCONV_CASE(kRelu)
    PATCHCONV_CASE(kLeakyRelu)
    PATCHCONV_CASE(kHardtanh)
    PATCHCONV_CASE(kThreshold)
    PATCHCONV_CASE(kHardsigmoid)
  }
#undef PATCHCONV_CASE
}

}  // namespace

void launch_mask_forward(Type type, Mask mask, const MaskForward& call, Stream stream) {
  with_type(type, [&](auto t) { forward<decltype(t)>(mask, call, stream); });
}

void launch_mask_backward(Type type, const MaskBackward& call, Stream stream) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool aligned = aligned_to_pieces(call.grad) && aligned_to_pieces(call.out);
    launch(mask_backward_kernel<T>, {Elements<T>::tiles(call.count)}, kElementThreads, 0, stream, call,
           aligned);
  });
}

}  // namespace patchconv::kernels
