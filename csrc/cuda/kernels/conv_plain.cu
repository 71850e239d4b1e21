// Convolutions with one thread per result: any kernel, stride, dilation, groups, padding mode, type and
// layout. Nothing is allocated and shared memory holds no tile: neighbours read the same values again, from
// the caches. Sums over the taps of a channel are made in float32 and combined by Kahan's method, gradients
// of the weight in float64: this is the reference for the fast kernels.
#include "cuda/kernels/conv_values.cuh"
#include "cuda/kernels/launch.cuh"

namespace patchconv::kernels {

namespace {

constexpr int kThreads = 256;

// A sum that keeps what additions lose (Kahan's method).
template <typename S>
struct Kahan {
  S sum = 0, lost = 0;

  PATCHCONV_DEVICE void operator+=(S part) {
    const S more = part - lost;
    const S next = sum + more;
    lost = next - next == 0 ? (next - sum) - more : 0;  // infinities lose nothing
    sum = next;
  }
};

// A result's place.
struct Place {
  int64_t image;
  int channel;  // over all groups
  int64_t at[3];
};

// The place of result `index` of images x channels x counts. Results that follow each other are neighbours in
// memory.
PATCHCONV_DEVICE Place place_of(int64_t index, int channels, bool channels_together,
                                const int64_t (&counts)[3]) {
  Place place;
  if (channels_together) {
    place.channel = static_cast<int>(index % channels);
    index /= channels;
  }
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    place.at[d] = index % counts[d];
    index /= counts[d];
  }
  if (!channels_together) {
    place.channel = static_cast<int>(index % channels);
    index /= channels;
  }
  place.image = index;
  return place;
}

PATCHCONV_DEVICE int64_t offset_of(const ConvTensor& tensor, int64_t image, int64_t channel) {
  return image * tensor.image + channel * tensor.channel;
}

template <typename T>
PATCHCONV_DEVICE void store(const ConvCall& call, const Place& place, const int64_t (&at)[3], Sum<T> sum) {
  int64_t offset = offset_of(call.target, place.image, place.channel);
#pragma unroll
  for (int d = 0; d < 3; ++d) offset += at[d] * call.target.place[d];
  T* target = static_cast<T*>(const_cast<void*>(call.target.data));
  target[offset] = from_sum<T>(finished<T>(call.epilogue, sum, place.channel, offset));
}

// Budget: 96 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) conv_plain_kernel(ConvCall call, int64_t total) {
  const int64_t index = block_x() * kThreads + thread_index();
  if (index >= total) return;
  const int64_t counts[3] = {call.lines[0].count, call.lines[1].count, call.lines[2].count};
  const Place place = place_of(index, call.groups * call.outputs, call.target.channel == 1, counts);
  const int group = place.channel / call.outputs;
  const T* weight = static_cast<const T*>(call.weight.data) + group * call.weight.group +
                    (place.channel - group * call.outputs) * call.weight.output;
  Kahan<Sum<T>> sum;
  for (int c = 0; c < call.sources; ++c) {
    const int64_t channel = offset_of(call.source, place.image, int64_t{group} * call.sources + c);
    Sum<T> part = 0;
    for (int t = 0; t < call.lines[0].taps; ++t) {
      const ConvLine& z = call.lines[0];
      const int64_t iz = source_index(call.mode, z.coordinate(place.at[0], t), z.source);
      if (iz < 0) continue;
      for (int r = 0; r < call.lines[1].taps; ++r) {
        const ConvLine& y = call.lines[1];
        const int64_t iy = source_index(call.mode, y.coordinate(place.at[1], r), y.source);
        if (iy < 0) continue;
        const int64_t row = channel + iz * call.source.place[0] + iy * call.source.place[1];
        const T* tap =
            weight + c * call.weight.source + z.tap(t) * call.weight.tap[0] + y.tap(r) * call.weight.tap[1];
        for (int s = 0; s < call.lines[2].taps; ++s) {
          const ConvLine& x = call.lines[2];
          const int64_t ix = source_index(call.mode, x.coordinate(place.at[2], s), x.source);
          if (ix < 0) continue;
          part = multiply_add(value_at<T>(call.source, row + ix * call.source.place[2]),
                              to_sum(tap[x.tap(s) * call.weight.tap[2]]), part);
        }
      }
    }
    sum += part;
  }
  const int64_t at[3] = {call.lines[0].target(place.at[0]), call.lines[1].target(place.at[1]),
                         call.lines[2].target(place.at[2])};
  store<T>(call, place, at, sum.sum);
}

// Calls use(coordinate in the padded grid) wherever padding repeats the value of coordinate i, and for i
// itself.
template <typename Use>
PATCHCONV_DEVICE void each_showing(PaddingMode mode, const ConvDim& dim, int64_t i, Use use) {
  if (mode == PaddingMode::kReplicate) {
    const int64_t last = i == dim.big - 1 ? i + dim.pad_after : i;
    for (int64_t q = i == 0 ? -dim.pad_before : i; q <= last; ++q) use(q);
    return;
  }
  use(i);
  if (mode == PaddingMode::kZeros) return;
  const bool turns = mode == PaddingMode::kCircular;
  const int64_t front = turns ? i - dim.big : -i;
  const int64_t back = turns ? i + dim.big : 2 * (dim.big - 1) - i;
  if (front < 0 && front >= -dim.pad_before) use(front);
  if (back >= dim.big && back < dim.big + dim.pad_after) use(back);
}

// Calls use(p, tap) for the small coordinates p and taps that read coordinate q of the padded grid.
template <typename Use>
PATCHCONV_DEVICE void each_meeting(const ConvDim& dim, int64_t q, Use use) {
  for (int64_t r = 0; r < dim.kernel; ++r) {
    const int64_t distance = q + dim.pad_before - r * dim.dilation;
    if (distance < 0) return;
    const int64_t p = distance / dim.stride;
    if (p * dim.stride == distance && p < dim.small) use(p, r);
  }
}

struct Gather {
  ConvDim dims[3];
  PaddingMode mode;
  ConvCall sums;
};

// Budget: 152 registers, 0 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) conv_gather_kernel(Gather call, int64_t total) {
  const int64_t index = block_x() * kThreads + thread_index();
  if (index >= total) return;
  const ConvCall& sums = call.sums;
  const int64_t counts[3] = {call.dims[0].big, call.dims[1].big, call.dims[2].big};
  const Place place = place_of(index, sums.groups * sums.outputs, sums.target.channel == 1, counts);
  const int group = place.channel / sums.outputs;
  const T* weight = static_cast<const T*>(sums.weight.data) + group * sums.weight.group +
                    (place.channel - group * sums.outputs) * sums.weight.output;
  const int64_t source = offset_of(sums.source, place.image, int64_t{group} * sums.sources);
  Kahan<Sum<T>> sum;
  const auto each = [&](int d, auto use) {
    each_showing(call.mode, call.dims[d], place.at[d], [&](int64_t q) {
      each_meeting(call.dims[d], q,
                   [&](int64_t p, int64_t r) { use(p * sums.source.place[d], r * sums.weight.tap[d]); });
    });
  };
  each(0, [&](int64_t z, int64_t t) {
    each(1, [&](int64_t y, int64_t r) {
      each(2, [&](int64_t x, int64_t s) {
        Sum<T> part = 0;
        for (int c = 0; c < sums.sources; ++c) {
          part = multiply_add(value_at<T>(sums.source, source + c * sums.source.channel + z + y + x),
                              to_sum(weight[c * sums.weight.source + t + r + s]), part);
        }
        sum += part;
      });
    });
  });
  store<T>(sums, place, place.at, sum.sum);
}

// The sum of `mine` over the block's threads, for thread 0. `room`: one number per warp.
PATCHCONV_DEVICE double block_sum(double mine, double* room) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) mine += shuffle_xor(mine, distance);
  if (lane_index() == 0) room[thread_index() / kWarp] = mine;
  block_barrier();
  double sum = 0;
  if (thread_index() == 0) {
    for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += room[warp];
  }
  return sum;
}

// One block per element of the weight: its warps take rows, their lanes the columns.
// Budget: 112 registers, 64 bytes of shared memory.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) conv_plain_weight_kernel(ConvCall call) {
  const ConvLine &z = call.lines[0], &y = call.lines[1], &x = call.lines[2];
  int64_t rest = block_x();
  const int s = static_cast<int>(rest % x.taps);
  rest /= x.taps;
  const int r = static_cast<int>(rest % y.taps);
  rest /= y.taps;
  const int t = static_cast<int>(rest % z.taps);
  rest /= z.taps;
  const int c = static_cast<int>(rest % call.sources);
  const int k = static_cast<int>(rest / call.sources);  // over all groups
  const int group = k / call.outputs;
  double sum = 0;
  for (int64_t row = thread_index() / kWarp; row < call.images * z.count * y.count; row += kThreads / kWarp) {
    const int64_t p = row % y.count, o = row / y.count % z.count, n = row / y.count / z.count;
    const int64_t iz = source_index(call.mode, z.coordinate(o, t), z.source);
    const int64_t iy = source_index(call.mode, y.coordinate(p, r), y.source);
    if (iz < 0 || iy < 0) continue;
    const int64_t big = offset_of(call.source, n, int64_t{group} * call.sources + c) +
                        iz * call.source.place[0] + iy * call.source.place[1];
    const int64_t small = offset_of(call.target, n, k) + o * call.target.place[0] + p * call.target.place[1];
    for (int64_t q = lane_index(); q < x.count; q += kWarp) {
      const int64_t ix = source_index(call.mode, x.coordinate(q, s), x.source);
      if (ix < 0) continue;
      sum =
          multiply_add(static_cast<double>(value_at<T>(call.source, big + ix * call.source.place[2])),
                       static_cast<double>(value_at<T>(call.target, small + q * call.target.place[2])), sum);
    }
  }
  sum = block_sum(sum, shared_memory<double>());
  if (thread_index() != 0) return;
  const int64_t offset = group * call.weight.group + (k - group * call.outputs) * call.weight.output +
                         c * call.weight.source + t * call.weight.tap[0] + r * call.weight.tap[1] +
                         s * call.weight.tap[2];
  static_cast<T*>(const_cast<void*>(call.weight.data))[offset] = from_sum<T>(static_cast<Sum<T>>(sum));
}

int64_t blocks_for(int64_t total) { return (total + kThreads - 1) / kThreads; }

}  // namespace

void launch_conv_plain(Type type, const ConvCall& call, Stream stream) {
  const int64_t total = call.images * call.groups * call.outputs * call.lines[0].count * call.lines[1].count *
                        call.lines[2].count;
  with_any_type(type, [&](auto t) {
    launch(conv_plain_kernel<decltype(t)>, {blocks_for(total)}, kThreads, 0, stream, call, total);
  });
}

void launch_conv_plain_gather(Type type, const ConvDim (&dims)[3], PaddingMode mode, const ConvCall& call,
                              Stream stream) {
  const int64_t total = call.images * call.groups * call.outputs * dims[0].big * dims[1].big * dims[2].big;
  const Gather gather{{dims[0], dims[1], dims[2]}, mode, call};
  with_any_type(type, [&](auto t) {
    launch(conv_gather_kernel<decltype(t)>, {blocks_for(total)}, kThreads, 0, stream, gather, total);
  });
}

void launch_conv_plain_weight(Type type, const ConvCall& call, Stream stream) {
  const int64_t elements = int64_t{call.groups} * call.outputs * call.sources * call.lines[0].taps *
                           call.lines[1].taps * call.lines[2].taps;
  with_any_type(type, [&](auto t) {
    launch(conv_plain_weight_kernel<decltype(t)>, {elements}, kThreads, kThreads / kWarp * sizeof(double),
           stream, call);
  });
}

}  // namespace patchconv::kernels
