// Copies of a box between the two orders of memory: channels outermost (NCHW) and innermost (channels_last).
// A block takes 64 channels of 64 columns of a row through shared memory, so that both sides move along what
// is contiguous there. Stock's copy reads or writes single elements that lie a row, or a whole channel,
// apart.
#include "cuda/kernels/conv.h"

#include "cuda/kernels/arch.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kSide = 64;  // channels, and columns

// Elements from one line of the block's square to the next: an odd number of banks, so that columns are read
// from 32 of them.
template <typename T>
constexpr int kPitch = kSide + 4 / static_cast<int>(sizeof(T));

// Budget: 48 registers, 16640 bytes of shared memory.
template <typename T, bool kToChannels>
__global__ void __launch_bounds__(kThreads) conv_turn_kernel(ConvTurn turn, int64_t across) {
  T* square = shared_memory<T>();
  int64_t rest = block_x();
  const int64_t x0 = rest % across * kSide, c0 = int64_t{block_y()} * kSide;
  rest /= across;
  const int64_t y = rest % turn.sizes[1];
  rest /= turn.sizes[1];
  const int64_t z = rest % turn.sizes[0], n = rest / turn.sizes[0];
  const int64_t from_z = z + turn.first[0], from_y = y + turn.first[1];
  const bool inside = from_z >= 0 && from_z < turn.extents[0] && from_y >= 0 && from_y < turn.extents[1];
  const T* from = static_cast<const T*>(turn.from.data) + n * turn.from.image + from_z * turn.from.place[0] +
                  from_y * turn.from.place[1];
  T* to = static_cast<T*>(const_cast<void*>(turn.to.data)) + n * turn.to.image + z * turn.to.place[0] +
          y * turn.to.place[1];

  constexpr int kLines = kThreads / kSide, kSteps = kSide / kLines;
  const int i = thread_index() % kSide, first_line = thread_index() / kSide;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int line = step * kLines + first_line;
    const int64_t c = c0 + (kToChannels ? line : i), x = x0 + (kToChannels ? i : line);
    const int64_t from_x = x + turn.first[2];
    T value{};
    if (inside && c < turn.channels && x < turn.sizes[2] && from_x >= 0 && from_x < turn.extents[2]) {
      value = from[c * turn.from.channel + from_x * turn.from.place[2]];
    }
    square[line * kPitch<T> + i] = value;
  }
  block_barrier();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int line = step * kLines + first_line;
    const int64_t c = c0 + (kToChannels ? i : line), x = x0 + (kToChannels ? line : i);
    if (c < turn.channels && x < turn.sizes[2]) {
      to[c * turn.to.channel + x * turn.to.place[2]] = square[i * kPitch<T> + line];
    }
  }
}

template <typename T>
void start(const ConvTurn& turn, Stream stream) {
  const int64_t across = (turn.sizes[2] + kSide - 1) / kSide;
  const Grid grid{turn.images * turn.sizes[0] * turn.sizes[1] * across,
                  static_cast<int>((turn.channels + kSide - 1) / kSide)};
  const int64_t bytes = int64_t{kSide} * kPitch<T> * static_cast<int64_t>(sizeof(T));
  launch(turn.to.channel == 1 ? conv_turn_kernel<T, true> : conv_turn_kernel<T, false>, grid, kThreads, bytes,
         stream, turn, across);
}

}  // namespace

void launch_conv_turn(int element_bytes, const ConvTurn& turn, Stream stream) {
  if (element_bytes == 2) return start<uint16_t>(turn, stream);
  if (element_bytes == 4) return start<uint32_t>(turn, stream);
  throw LaunchError("a copy that does not serve elements of this size");
}

}  // namespace patchconv::kernels
