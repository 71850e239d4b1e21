// A copy of the weight in the order in which the halo kernel reads it: one matrix of outputs and sources per
// tap, its rows padded with zeros to 16 bytes. The only transient tensor of that kernel, of the weight's
// size.
#include <type_traits>

#include "cuda/kernels/conv_values.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kThreads = 256;

struct Packed {
  int64_t sizes[5];  // group, slice, row, column of taps; output
  int sources, padded;
  ConvWeight from;
};

// A thread writes 16 bytes.
// Budget: 40 registers, 0 bytes of shared memory.
template <typename T, bool kRound>
__global__ void __launch_bounds__(kThreads) conv_pack_kernel(Packed packed, int64_t pieces, T* to) {
  constexpr int kCount = 16 / sizeof(T);
  const int64_t number = block_x() * kThreads + thread_index();
  if (number >= pieces) return;
  const int across = packed.padded / kCount;
  int64_t rest = number / across, place[5];
  const int begin = static_cast<int>(number - rest * across) * kCount;
#pragma unroll
  for (int d = 4; d >= 0; --d) {
    place[d] = rest % packed.sizes[d];
    rest /= packed.sizes[d];
  }
  const ConvWeight& from = packed.from;
  const T* const first = static_cast<const T*>(from.data) + place[0] * from.group + place[1] * from.tap[0] +
                         place[2] * from.tap[1] + place[3] * from.tap[2] + place[4] * from.output;
  Vec<T, kCount> values;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T value = begin + i < packed.sources ? first[(begin + i) * from.source] : from_float<T>(0);
    if constexpr (kRound) {
      values.at[i] = bits_float(to_tf32(value));
    } else {
      values.at[i] = value;
    }
  }
  store_whole(to + number * kCount, values);
}

int padded(Type type, int sources) {
  const int piece = type == Type::kFloat ? 4 : 8;
  return (sources + piece - 1) / piece * piece;
}

}  // namespace

int64_t conv_packed_elements(Type type, const ConvCall& call, const std::array<int64_t, 3>& kernel) {
  return int64_t{call.groups} * kernel[0] * kernel[1] * kernel[2] * call.outputs * padded(type, call.sources);
}

ConvWeight launch_conv_pack(Type type, bool strict, const ConvCall& call,
                            const std::array<int64_t, 3>& kernel, void* packed, Stream stream) {
  const Packed form{{call.groups, kernel[0], kernel[1], kernel[2], call.outputs},
                    call.sources,
                    padded(type, call.sources),
                    call.weight};
  const int64_t elements = conv_packed_elements(type, call, kernel);
  const auto start = [&](auto t, auto round) {
    using T = decltype(t);
    const int64_t pieces = elements * static_cast<int64_t>(sizeof(T)) / 16;
    launch(conv_pack_kernel<T, decltype(round)::value>, {(pieces + kThreads - 1) / kThreads}, kThreads, 0,
           stream, form, pieces, static_cast<T*>(packed));
  };
  if (type == Type::kFloat && !strict) {
    start(float(), std::true_type());
  } else {
    with_type(type, [&](auto t) { start(t, std::false_type()); });
  }
  const int64_t matrix = int64_t{call.outputs} * form.padded;
  return {packed,
          kernel[0] * kernel[1] * kernel[2] * matrix,
          form.padded,
          1,
          {kernel[1] * kernel[2] * matrix, kernel[2] * matrix, matrix}};
}

}  // namespace patchconv::kernels
