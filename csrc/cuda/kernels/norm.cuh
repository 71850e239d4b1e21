// What the kernels of norm_statistics.cu, norm_map.cu and norm_backward.cu share: which thread reads which
// elements, and the numbers of a channel.
//
// Contiguous tensors are rows of elements that share their numbers; a team, which is a warp or a whole block,
// takes a part of a row. In channels_last a thread takes one 16-byte piece of channels and goes down the
// pixels with it, beside the threads of the neighbouring pieces; a block takes a chunk of one image's pixels.
#pragma once

#include <type_traits>

#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/norm.h"

namespace patchconv::kernels {

constexpr int kNormThreads = 256;
constexpr int64_t kBusy = 4096;  // if there are more teams, or blocks of pixels, each may take several steps

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sizes as the kernels count them: for batch norm in channels_last, all images are one.
struct NormSizes {
  int64_t channels, pixels, images;
  int64_t groups;            // 0: one statistic per channel
  int64_t channels_a_group;  // if there are groups

  PATCHCONV_DEVICE int64_t statistic(int64_t image, int64_t channel) const {
    return groups == 0 ? channel : image * groups + channel / channels_a_group;
  }
};

inline NormSizes sizes_of(const NormShape& shape) {
  const int64_t a_group = shape.groups == 0 ? 1 : shape.channels / shape.groups;
  if (shape.channels_last && shape.groups == 0) {
    return {shape.channels, shape.images * shape.pixels, 1, 0, a_group};
  }
  return {shape.channels, shape.pixels, shape.images, shape.groups, a_group};
}

// ---------------------------------------------------------------------------------------------------------
// Contiguous tensors

struct Rows {
  int64_t rows, length;  // their number, and the elements of each
  int64_t part, parts;   // elements of a part, parts of a row
  bool aligned;          // every row begins at a multiple of 16 bytes
  int team;              // threads: 32 or kNormThreads
  // A team takes `repeat` short rows at once, `stride` rows apart: those of one channel in that many images.
  int64_t repeat = 1, stride = 1;
  int64_t sets = rows;  // of such rows

  int64_t teams() const { return sets * parts; }
  int64_t blocks() const { return divided_up(teams(), kNormThreads / team); }
};

// Elements that a team takes at a time.
template <typename T>
constexpr int64_t row_step(int team) {
  return int64_t{team} * Elements<T>::kVectors * Elements<T>::kCount;
}

// `whole`: parts are so long that there are only a few per row. Otherwise each part is one step.
template <typename T>
Rows rows_of(int64_t rows, int64_t length, bool aligned, bool whole) {
  Rows result{rows, length, 0, 0, aligned && length % Elements<T>::kCount == 0, 0};
  result.team = length * static_cast<int64_t>(sizeof(T)) > 4096 ? kNormThreads : kWarp;
  const int64_t step = row_step<T>(result.team);
  int64_t steps = 1;
  if (whole) {
    const int64_t all = divided_up(length, step);
    steps = result.team == kWarp ? all : rows * all / kBusy;
    steps = steps < 1 ? 1 : steps > 64 ? 64 : steps;
  }
  result.part = steps * step;
  result.parts = divided_up(length, result.part);
  return result;
}

// Rows of batch norm, whose sums run over images as well. If rows are short, a part takes several, so that
// there are few parts to combine.
template <typename T>
Rows rows_of_batch(const NormShape& shape, bool aligned) {
  const int64_t rows = shape.images * shape.channels;
  Rows result = rows_of<T>(rows, shape.pixels, aligned, /*whole=*/true);
  if (result.team != kWarp || result.parts != 1) return result;
  const int64_t wanted = row_step<T>(kWarp) / shape.pixels, most = rows / kBusy;
  result.repeat = wanted < most ? wanted : most;
  result.repeat = result.repeat < 1 ? 1 : result.repeat > shape.images ? shape.images : result.repeat;
  result.stride = shape.channels;
  result.sets = divided_up(shape.images, result.repeat) * shape.channels;
  return result;
}

// A team's part: of rows `row`, row + stride, ... below `last`. Teams past the last have none, but take part
// in what their block does together.
struct RowPart {
  int64_t row, last;
  int64_t begin, end;
  int64_t number;
};

template <int kTeam>
PATCHCONV_DEVICE RowPart row_part(const Rows& rows) {
  const int64_t number = block_x() * (kNormThreads / kTeam) + thread_index() / kTeam;
  if (number >= rows.sets * rows.parts) return {0, 0, 0, 0, -1};
  const int64_t set = rows.parts == 1 ? number : number / rows.parts;
  const int64_t begin = (number - set * rows.parts) * rows.part, end = begin + rows.part;
  int64_t row = set, last = set + 1;
  if (rows.repeat > 1) {
    const int64_t images = set / rows.stride * rows.repeat, channel = set % rows.stride;
    row = images * rows.stride + channel;
    last = row + rows.repeat * rows.stride;
    if (last > rows.rows) last = rows.rows;
  }
  return {row, last, begin, end < rows.length ? end : rows.length, number};
}

// First element of this thread's piece `v` of the step that begins at `begin`.
template <typename T, int kTeam>
PATCHCONV_DEVICE int64_t piece_at(int64_t begin, int v) {
  return begin + (v * kTeam + thread_index() % kTeam) * Elements<T>::kCount;
}

// ---------------------------------------------------------------------------------------------------------
// channels_last

struct Pixels {
  int64_t chunk, chunks;  // pixels of a chunk, chunks of an image
  int across;             // threads side by side along the channels: a power of 2
  bool aligned;           // every pixel begins at a multiple of 16 bytes

  int down() const { return kNormThreads / across; }
};

// `at_once`: pixels per thread and step; `whole` as above.
template <typename T>
Pixels pixels_of(const NormSizes& n, bool aligned, bool whole, int at_once) {
  constexpr int kCount = Elements<T>::kCount;
  const int64_t pieces = divided_up(n.channels, kCount);
  int across = 1;
  while (across < kWarp && across < pieces) across *= 2;
  const int64_t step = int64_t{kNormThreads / across} * at_once;
  int64_t steps = 4;
  if (whole) {
    steps = n.images * divided_up(n.pixels, step) * divided_up(pieces, across) / kBusy;
    steps = steps < 4 ? 4 : steps > 4096 ? 4096 : steps;
  }
  return {steps * step, divided_up(n.pixels, steps * step), across, aligned && n.channels % kCount == 0};
}

inline Grid grid_of(const NormSizes& n, const Pixels& pixels, int count) {
  return {n.images * pixels.chunks, static_cast<int>(divided_up(n.channels, int64_t{count} * pixels.across))};
}

// What a thread of a block of pixels takes: its channels, of which `left` exist, in pixels first, first +
// down, ... below end.
struct PixelPart {
  int64_t image, chunk;
  int64_t channel;
  int left;
  int64_t first, end;
};

template <typename T>
PATCHCONV_DEVICE PixelPart pixel_part(const NormSizes& n, const Pixels& pixels) {
  constexpr int kCount = Elements<T>::kCount;
  PixelPart part;
  part.image = n.images == 1 ? 0 : block_x() / pixels.chunks;
  part.chunk = block_x() - part.image * pixels.chunks;
  const int across = thread_index() % pixels.across, row = thread_index() / pixels.across;
  part.channel = (static_cast<int64_t>(block_y()) * pixels.across + across) * kCount;
  const int64_t left = n.channels - part.channel;
  part.left = left < 0 ? 0 : left < kCount ? static_cast<int>(left) : kCount;
  const int64_t begin = part.chunk * pixels.chunk, end = begin + pixels.chunk;
  part.first = begin + row;
  part.end = end < n.pixels ? end : n.pixels;
  return part;
}

// ---------------------------------------------------------------------------------------------------------
// The numbers of a channel

struct Coefficients {
  float mean, scale, bias;

  PATCHCONV_DEVICE float map(float x) const { return multiply_add(x - mean, scale, bias); }
};

PATCHCONV_DEVICE float inverse_deviation(const NormAffine& affine, float var) {
  return affine.inverse ? var : 1 / square_root(var + affine.eps);
}

PATCHCONV_DEVICE Coefficients coefficients(const NormAffine& affine, int64_t statistic, int64_t channel) {
  const float invstd = inverse_deviation(affine, affine.var[statistic]);
  return {affine.mean[statistic], affine.weight == nullptr ? invstd : invstd * affine.weight[channel],
          affine.bias == nullptr ? 0 : affine.bias[channel]};
}

// Numbers of a piece's channels, of which `left` exist: by 16 bytes where they lie so.
template <int kCount>
PATCHCONV_DEVICE void load_channels(float (&to)[kCount], const float* from, int64_t channel, int left) {
  constexpr int kWhole = 4;
  if (left == kCount && reinterpret_cast<uintptr_t>(from + channel) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += kWhole) {
      const auto four = load_whole<Vec<float, kWhole>>(from + channel + i);
#pragma unroll
      for (int j = 0; j < kWhole; ++j) to[i + j] = four.at[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = i < left ? from[channel + i] : 0;
}

// Those of a piece's channels.
template <int kCount>
PATCHCONV_DEVICE void load_coefficients(Coefficients (&to)[kCount], const NormSizes& n,
                                        const NormAffine& affine, int64_t image, int64_t channel, int left) {
  if (n.groups > 0 || affine.weight == nullptr || affine.bias == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < left) to[i] = coefficients(affine, n.statistic(image, channel + i), channel + i);
    }
    return;
  }
  float mean[kCount], var[kCount], weight[kCount], bias[kCount];
  load_channels(mean, affine.mean, channel, left);
  load_channels(var, affine.var, channel, left);
  load_channels(weight, affine.weight, channel, left);
  load_channels(bias, affine.bias, channel, left);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = {mean[i], inverse_deviation(affine, var[i]) * weight[i], bias[i]};
  }
}

// Without SiLU, the result is 0 where z <= floor. ReLU has a floor of 0; without an activation it is NaN,
// which nothing is below.
inline float floor_of(Activation activation) {
  return activation == Activation::kRelu ? 0 : __builtin_nanf("");
}

template <bool kSilu>
PATCHCONV_DEVICE float activated(float z, float floor) {
  if constexpr (kSilu) return z / (1 + exponential(-z));
  return z <= floor ? 0 : z;
}

// The gradient of z. For ReLU it depends on the value that the forward pass stored, rounded to T: where that
// became 0, no gradient passes.
template <typename T, bool kSilu>
PATCHCONV_DEVICE float before_activation(float grad, float z, float floor) {
  if constexpr (kSilu) {
    const float sigmoid = 1 / (1 + exponential(-z));
    return grad * (sigmoid * multiply_add(z, 1 - sigmoid, 1.0f));
  }
  return to_float(from_float<T>(z)) <= floor ? 0 : grad;
}

// Calls use(std::bool_constant<whether it is SiLU>()).
template <typename Use>
void with_silu(Activation activation, Use use) {
  if (activation == Activation::kSilu) return use(std::true_type());
  use(std::false_type());
}

}  // namespace patchconv::kernels
