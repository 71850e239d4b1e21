// Dropout whose mask follows from a seed and is never stored: one read and one write of the tensor. Element i
// takes word i % 4 of Philox block i / 4, so a thread's 16 bytes take the words of one block or of two. In
// float32; the product and the sum are each rounded, as on the CPU.
#include "cuda/kernels/dropout.h"

#include "core/philox.h"
#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

// Budget: 72 registers, 0 bytes of shared memory.
template <typename T, bool kAdds>
__global__ void __launch_bounds__(kElementThreads) dropout_kernel(Dropout call, bool aligned) {
  using E = Elements<T>;
  const auto seed = static_cast<uint64_t>(*call.seed);
  typename E::Piece pieces[E::kVectors];
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
    pieces[v] = E::load(static_cast<const T*>(call.x), E::first(v), call.count, aligned);
  }
#pragma unroll
  for (int v = 0; v < E::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < E::kCount; i += 4) {
      const PhiloxBlock random = philox_block(seed, static_cast<uint64_t>(E::first(v) + i) / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = random.word[j] >= call.threshold;
        const float product = multiply(to_float(pieces[v].at[i + j]), kept ? call.scale : 0);
        pieces[v].at[i + j] = from_float<T>(kAdds ? add(product, kept ? call.shift : call.fill) : product);
      }
    }
    E::store(static_cast<T*>(call.y), pieces[v], E::first(v), call.count, aligned);
  }
}

}  // namespace

void launch_dropout(Type type, const Dropout& call, Stream stream) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool aligned = aligned_to_pieces(call.x) && aligned_to_pieces(call.y);
    const bool adds = call.shift != 0 || call.fill != 0;
    launch(adds ? dropout_kernel<T, true> : dropout_kernel<T, false>, {Elements<T>::tiles(call.count)},
           kElementThreads, 0, stream, call, aligned);
  });
}

}  // namespace patchconv::kernels
