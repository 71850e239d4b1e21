// A norm with given statistics and ReLU, and one bit per element: for batch norm in eval mode, whose backward
// then needs no input. One read and one write of the tensor in memory order, as in activation.cu. The channel
// of a thread's first element is found by division, those of the next ones by counting.
#include "cuda/kernels/bits.cuh"
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/norm.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 24 registers, 0 bytes of shared memory.
__global__ void __launch_bounds__(kNormThreads)
    norm_scales_kernel(NormAffine affine, int64_t channels, float* scales) {
  const int64_t channel = block_x() * kNormThreads + thread_index();
  if (channel < channels) scales[channel] = coefficients(affine, channel, channel).scale;
}

// Divides numbers below 2^52 by a product with the inverse, which is off by at most one: on a GPU, a 64-bit
// division is a function call.
struct Divisor {
  int64_t by;
  double inverse;

  PATCHCONV_DEVICE int64_t quotient(int64_t number) const {
    const auto guess = static_cast<int64_t>(static_cast<double>(number) * inverse);
    const int64_t rest = number - guess * by;
    return rest < 0 ? guess - 1 : rest >= by ? guess + 1 : guess;
  }
};

// `run`: the number of consecutive elements that belong to one channel.
// Budget: 80 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    norm_mask_kernel(Divisor run, Divisor channels, int64_t count, NormAffine affine, const float* scales,
                     const T* x, T* y, uint8_t* bits, bool aligned) {
  using E = Elements<T>;
  typename E::Piece pieces[E::kVectors];
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) pieces[v] = E::load(x, E::first(v), count, aligned);
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
    const int64_t begin = E::first(v);
    const int64_t row = run.quotient(begin);
    int64_t channel = row - channels.quotient(row) * channels.by, left = (row + 1) * run.by - begin;
    Coefficients numbers{affine.mean[channel], scales[channel],
                         affine.bias == nullptr ? 0 : affine.bias[channel]};
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < E::kCount; ++i) {
      if (left == 0) {
        channel = channel + 1 == channels.by ? 0 : channel + 1;
        left = run.by;
        numbers = {affine.mean[channel], scales[channel], affine.bias == nullptr ? 0 : affine.bias[channel]};
      }
      --left;
      // The bit belongs to the value as it is stored.
      const T z = from_float<T>(numbers.map(to_float(pieces[v].at[i])));
      const bool below = to_float(z) <= 0;
      mine |= static_cast<uint32_t>(begin + i < count && !below) << i;
      pieces[v].at[i] = below ? from_float<T>(0) : z;
    }
    store_bits<E::kCount>(bits, mine, begin, count);
    E::store(y, pieces[v], begin, count, aligned);
  }
}

}  // namespace

void launch_norm_mask(Type type, const NormShape& shape, const NormAffine& affine, float* workspace,
                      const void* x, void* y, uint8_t* bits, Stream stream) {
  if (shape.groups != 0) throw LaunchError("a mask of a norm by groups");
  if (shape.elements() == 0) return;
  launch(norm_scales_kernel, {divided_up(shape.channels, kNormThreads)}, kNormThreads, 0, stream, affine,
         shape.channels, workspace);
  const auto divisor = [](int64_t by) { return Divisor{by, 1.0 / static_cast<double>(by)}; };
  const bool aligned = aligned_to_pieces(x) && aligned_to_pieces(y);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    launch(norm_mask_kernel<T>, {Elements<T>::tiles(shape.elements())}, kElementThreads, 0, stream,
           divisor(shape.channels_last ? 1 : shape.pixels), divisor(shape.channels), shape.elements(), affine,
           workspace, static_cast<const T*>(x), static_cast<T*>(y), bits, aligned);
  });
}

}  // namespace patchconv::kernels
