// Sums over the images and positions of a tensor, per channel, for any strides: one read. A thread takes
// items of neighbouring elements, 16 bytes where they are contiguous: channels of one position, or positions
// of one channel. A few of them are summed in float32, those sums in float64, in an order that depends on
// sizes and strides. A second kernel adds up what blocks leave in the workspace and rounds once. Nothing is
// allocated.
#include <algorithm>

#include "cuda/kernels/conv_values.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 3;  // items that a thread loads at a time
constexpr int kFew = 4;     // rounds of such loads that are summed in float32
constexpr int64_t kBlocks = 1024;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The items of a channel, or of neighbouring ones, numbered by four digits: image, depth, row, column.
struct Items {
  int64_t sizes[4], strides[4];
  int64_t element = 1;  // stride between the elements of an item
  int64_t length = 0;   // elements of a row of items, unless items are channels
  int64_t count = 0;
  int64_t parts = 1;
  int across = 1;  // threads side by side along the channels
  bool aligned = false;
};

// An item, by its digits.
struct ItemAt {
  int64_t digits[4];

  PATCHCONV_DEVICE ItemAt(const Items& items, int64_t number) {
#pragma unroll
    for (int d = 3; d >= 1; --d) {
      digits[d] = number % items.sizes[d];
      number /= items.sizes[d];
    }
    digits[0] = number;
  }
  // Moves on by as many items as `step` is from the first.
  PATCHCONV_DEVICE void advance(const Items& items, const ItemAt& step) {
#pragma unroll
    for (int d = 3; d >= 0; --d) digits[d] += step.digits[d];
#pragma unroll
    for (int d = 3; d >= 1; --d) {
      if (digits[d] < items.sizes[d]) continue;
      digits[d] -= items.sizes[d];
      ++digits[d - 1];
    }
  }
  PATCHCONV_DEVICE int64_t offset(const Items& items) const {
    int64_t sum = 0;
#pragma unroll
    for (int d = 0; d < 4; ++d) sum += digits[d] * items.strides[d];
    return sum;
  }
};

// Loads an item, with zeros past `filled` elements and for elements whose bit is 0.
template <typename T>
PATCHCONV_DEVICE Vec<T, 16 / sizeof(T)> load_item(const ConvTensor& tensor, const Items& items,
                                                  int64_t offset, int64_t filled) {
  constexpr int kCount = 16 / sizeof(T);
  const T* data = static_cast<const T*>(tensor.data) + offset;
  Vec<T, kCount> item;
  if (items.aligned && filled >= kCount) {
    item = load_whole<Vec<T, kCount>>(data);
    if (tensor.bits == nullptr) return item;
    const int keep = tensor.bits[offset / 8] >> (offset % 8);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((keep >> i & 1) == 0) item.at[i] = T{};
    }
    return item;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool there = i < filled;
    item.at[i] = there ? data[i * items.element] : T{};
    if (there && tensor.bits != nullptr && !bit_at(tensor.bits, offset + i * items.element)) item.at[i] = T{};
  }
  return item;
}

// Budget: 128 registers, 16384 bytes of shared memory.
template <typename T, bool kTogether>
__global__ void __launch_bounds__(kThreads, 2)
    conv_channel_parts_kernel(ConvTensor tensor, int channels, Items items, double* out) {
  constexpr int kCount = 16 / sizeof(T);
  constexpr int kValues = kTogether ? kCount : 1;
  const int down = kThreads / items.across, row = thread_index() / items.across;
  const int place = thread_index() % items.across;
  const int64_t part = block_x() % items.parts;
  const int64_t channel = (block_x() / items.parts * items.across + place) * kValues;
  const int64_t left = channels - channel, end = items.count * (part + 1) / items.parts;
  int64_t number = items.count * part / items.parts + row;
  ItemAt at(items, number);
  const ItemAt step(items, down);
  const auto load = [&] {
    const bool there = number < end && left > 0;
    const int64_t filled = kTogether ? left : items.length - at.digits[3] * kCount;
    const auto item =
        load_item<T>(tensor, items, channel * tensor.channel + at.offset(items), there ? filled : 0);
    at.advance(items, step);
    number += down;
    return item;
  };

  double sums[kValues] = {};
  while (number < end) {
    Sum<T> few[kValues] = {};
#pragma unroll 1
    for (int time = 0; time < kFew && number < end; ++time) {
      Vec<T, kCount> pieces[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) pieces[u] = load();
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) few[kTogether ? i : 0] += to_sum(pieces[u].at[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) sums[i] += few[i];
  }

  // Adds up the block's sums by halves.
  double* const room = shared_memory<double>();
  for (int half = down / 2; half > 0; half /= 2) {
    const bool gives = row >= half && row < 2 * half;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (gives) room[i * kThreads + thread_index()] = sums[i];
    }
    block_barrier();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (row < half) sums[i] += room[i * kThreads + thread_index() + half * items.across];
    }
  }
  if (row != 0) return;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (i < left) out[(channel + i) * items.parts + part] = sums[i];
  }
}

// One warp per channel.
// Budget: 40 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    conv_channel_sum_kernel(const double* from, int channels, int64_t parts, T* to) {
  const int64_t channel = block_x() * (kThreads / kWarp) + thread_index() / kWarp;
  if (channel >= channels) return;
  double sum = 0;
  for (int64_t part = lane_index(); part < parts; part += kWarp) sum += from[channel * parts + part];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
  if (lane_index() == 0) to[channel] = from_sum<T>(static_cast<Sum<T>>(sum));
}

bool channels_together(const ConvChannelSums& call) {
  return call.source.channel == 1 && call.source.place[2] != 1;
}

// Everything that does not depend on the address.
template <typename T>
Items items_of(const ConvChannelSums& call) {
  constexpr int kCount = 16 / sizeof(T);
  const ConvTensor& tensor = call.source;
  Items items{{call.images, call.sizes[0], call.sizes[1], call.sizes[2]},
              {tensor.image, tensor.place[0], tensor.place[1], tensor.place[2]}};
  int64_t blocks = call.channels;
  if (channels_together(call)) {
    const int64_t pieces = divided_up(call.channels, kCount);
    while (items.across < kWarp && items.across < pieces) items.across *= 2;
    blocks = divided_up(pieces, items.across);
  } else {
    // Contiguous rows count as one.
    for (int d = 2; d >= 1 && items.strides[d] == items.sizes[3] * items.strides[3]; --d) {
      items.sizes[3] *= items.sizes[d];
      items.sizes[d] = 1;
    }
    items.length = items.sizes[3];
    items.element = items.strides[3];
    items.sizes[3] = divided_up(items.length, kCount);
    items.strides[3] *= kCount;
  }
  items.count = items.sizes[0] * items.sizes[1] * items.sizes[2] * items.sizes[3];
  const int64_t most = items.count / (kThreads / items.across * kAtOnce * kFew);
  items.parts = std::clamp<int64_t>(std::min(divided_up(kBlocks, blocks), most), 1, kMostBlocks / blocks);
  items.aligned = items.element == 1 && (channels_together(call) || tensor.channel % kCount == 0);
  for (int64_t stride : items.strides) items.aligned = items.aligned && stride % kCount == 0;
  return items;
}

}  // namespace

int64_t conv_channel_sums_workspace(Type type, const ConvChannelSums& call) {
  int64_t floats = 0;
  with_any_type(type, [&](auto t) { floats = 2 * call.channels * items_of<decltype(t)>(call).parts; });
  return floats;
}

void launch_conv_channel_sums(Type type, const ConvChannelSums& call, float* workspace, Stream stream) {
  with_any_type(type, [&](auto t) {
    using T = decltype(t);
    Items items = items_of<T>(call);
    items.aligned = items.aligned && aligned_to_pieces(call.source.data);
    const int values = channels_together(call) ? 16 / static_cast<int>(sizeof(T)) : 1;
    double* const parts = reinterpret_cast<double*>(workspace);
    launch(channels_together(call) ? conv_channel_parts_kernel<T, true> : conv_channel_parts_kernel<T, false>,
           {divided_up(call.channels, int64_t{items.across} * values) * items.parts}, kThreads,
           values * kThreads * static_cast<int64_t>(sizeof(double)), stream, call.source, call.channels,
           items, parts);
    launch(conv_channel_sum_kernel<T>, {divided_up(call.channels, kThreads / kWarp)}, kThreads, 0, stream,
           parts, call.channels, items.parts, static_cast<T*>(call.target));
  });
}

}  // namespace patchconv::kernels
