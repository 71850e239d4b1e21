// From a warp's sums to the result. The warp writes the sums of 32 positions and 64 outputs to its own part
// of shared memory, and reads them back in the order of the result's memory: along channels or along
// positions.
#pragma once

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kStagePlaces = 32;
constexpr int kStageOutputs = 64;
constexpr int kStagePitch = kStageOutputs + 8;
constexpr int kStageBytes = kStagePlaces * kStagePitch * 4;  // per warp

// Where four outputs of a position are staged. The order of eight outputs depends on where they are, so that
// lanes reach different banks: 16 that store pairs of outputs of four positions, 8 that load four outputs, of
// neighbouring positions or every second four of one position.
PATCHCONV_DEVICE int staged_at(int place, int output) {
  return place * kStagePitch + (output ^ ((output >> 5 ^ place >> 2) & 1) << 2);
}

// What the sums are multiplied by and what is added, for the outputs of a warp's products that a lane holds.
struct Finish {
  float scale[8][2], bias[8][2];
};

// For the 64 outputs of a group from `first` on.
template <typename T>
PATCHCONV_DEVICE Finish finish_of(const ConvCall& call, int group, int first) {
  const ConvEpilogue& epilogue = call.epilogue;
  Finish finish;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int output = first + n * 8 + lane_index() % 4 * 2 + i, channel = group * call.outputs + output;
      const bool there = output < call.outputs;
      finish.scale[n][i] = 1;
      finish.bias[n][i] = 0;
      if (there && epilogue.scale != nullptr) {
        finish.scale[n][i] = static_cast<const float*>(epilogue.scale)[channel];
      }
      if (there && epilogue.bias != nullptr) {
        finish.bias[n][i] = to_float(static_cast<const T*>(epilogue.bias)[channel]);
      }
    }
  }
  return finish;
}

// Stages the sums of a product of 16 positions by 8 outputs, as multiply_matrices() leaves them: of the
// outputs from 8 n on.
PATCHCONV_DEVICE void stage_sums(float* stage, int place, int n, const float (&sums)[4],
                                 const Finish& finish) {
  const int row = lane_index() / 4, pair = lane_index() % 4 * 2;
  float* at = stage + (place + row) * kStagePitch + n * 8 + (pair ^ ((n >> 2 ^ row >> 2) & 1) << 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Vec<float, 2> both;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      both.at[i] = multiply_add(sums[2 * half + i], finish.scale[n][i], finish.bias[n][i]);
    }
    store_whole(at + half * 8 * kStagePitch, both);
  }
}

// The least result.
PATCHCONV_DEVICE float least_of(const ConvEpilogue& epilogue) { return epilogue.relu ? 0 : -kInfinity; }

// The bits of 8 results before they are rounded.
template <typename T>
PATCHCONV_DEVICE uint8_t bits_of(const float (&values)[8]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(passes(to_float(from_float<T>(values[i])))) << i;
  return static_cast<uint8_t>(bits);
}

template <typename T>
PATCHCONV_DEVICE void add_eight(float (&values)[8], const T* from) {
  constexpr int kEach = 4 / sizeof(T);  // per word
#pragma unroll
  for (int begin = 0; begin < 8; begin += 4 * kEach) {
    uint32_t words[4];
    load_words(words, from + begin);
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) {
      if constexpr (kEach == 2) {
        values[begin + i] += to_float(T{static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))});
      } else {
        values[begin + i] += bits_float(words[i]);
      }
    }
  }
}

template <typename T>
PATCHCONV_DEVICE void store_eight(T* to, const float (&values)[8]) {
  if constexpr (sizeof(T) == 2) {
    store_words(to, {pair_of(T(), values[0], values[1]), pair_of(T(), values[2], values[3]),
                     pair_of(T(), values[4], values[5]), pair_of(T(), values[6], values[7])});
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      store_words(to + i, {float_bits(values[i]), float_bits(values[i + 1]), float_bits(values[i + 2]),
                           float_bits(values[i + 3])});
    }
  }
}

// Whether 8 channels of a result whose channels are contiguous, from a multiple of 8 on, lie in whole pieces.
template <typename T>
PATCHCONV_DEVICE bool in_pieces(const ConvTensor& target, const void* residual, int channel) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(static_cast<const T*>(target.data) + channel) |
      (residual != nullptr ? reinterpret_cast<uintptr_t>(static_cast<const T*>(residual) + channel) : 0);
  const int64_t strides = target.image | target.place[0] | target.place[1] | target.place[2];
  return addresses % 16 == 0 && strides % static_cast<int>(16 / sizeof(T)) == 0;
}

// Writes what a warp has staged where channels are contiguous. A lane takes the 8 of them from `channel` on,
// of every fourth position; `count` of them there are, 8 or none.
template <typename T>
PATCHCONV_DEVICE void store_pieces(const ConvCall& call, const float* stage, int channel, int count,
                                   int64_t place) {
  const ConvEpilogue& epilogue = call.epilogue;
  const int lane = lane_index();
  constexpr int kBytes = sizeof(T);
  char* const target = static_cast<char*>(const_cast<void*>(call.target.data)) + channel * kBytes;
  const char* const residual = static_cast<const char*>(epilogue.residual);
  const float least = least_of(epilogue);
  const int64_t mine = place < 0 ? -1 : place * kBytes;
  // Where the first four and the last four channels of a position lie changes with every fourth position.
  const int begin = lane % 8 * 8;
  const float* at[2] = {stage + staged_at(lane / 8, begin), stage + staged_at(lane / 8, begin + 4)};
  for (int first = 0; first < kStagePlaces; first += 8) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int64_t offset = shuffle_from(mine, first + 4 * odd + lane / 8);
      if (count <= 0 || offset < 0) continue;
      float values[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto four = load_whole<Vec<float, 4>>(at[half ^ odd] + 4 * odd * kStagePitch);
#pragma unroll
        for (int j = 0; j < 4; ++j) values[4 * half + j] = four.at[j];
      }
      if (residual != nullptr) {
        add_eight(values, reinterpret_cast<const T*>(residual + channel * kBytes + offset));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = larger(values[j], least);
      store_eight(reinterpret_cast<T*>(target + offset), values);
      if (epilogue.bits != nullptr) epilogue.bits[(offset / kBytes + channel) / 8] = bits_of<T>(values);
    }
    at[0] += 8 * kStagePitch;
    at[1] += 8 * kStagePitch;
  }
}

// Writes the result at an offset, and returns its bit.
template <typename T>
PATCHCONV_DEVICE bool store_one(const ConvCall& call, float value, float least, int64_t offset) {
  const ConvEpilogue& epilogue = call.epilogue;
  if (epilogue.residual != nullptr) value += to_float(static_cast<const T*>(epilogue.residual)[offset]);
  const T result = from_float<T>(larger(value, least));
  static_cast<T*>(const_cast<void*>(call.target.data))[offset] = result;
  return passes(to_float(result));
}

// The same where the 8 channels need not lie in whole pieces, and `count` may be less.
template <typename T>
PATCHCONV_DEVICE void store_channels(const ConvCall& call, const float* stage, int channel, int count,
                                     int64_t place) {
  const float least = least_of(call.epilogue);
#pragma unroll 1
  for (int first = 0; first < kStagePlaces; first += 4) {
    const int i = first + lane_index() / 8;
    const int64_t offset = shuffle_from(place, i) + channel;
    if (offset < channel || count <= 0) continue;
    uint32_t bits = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const float value = stage[staged_at(i, lane_index() % 8 * 8 + j)];
      bits |= static_cast<uint32_t>(store_one<T>(call, value, least, offset + j)) << j;
    }
    if (call.epilogue.bits != nullptr) call.epilogue.bits[offset / 8] = static_cast<uint8_t>(bits);
  }
}

// The same where positions are contiguous. A lane takes one of them.
template <typename T>
PATCHCONV_DEVICE void store_places(const ConvCall& call, const float* stage, int channel, int outputs,
                                   int64_t place) {
  uint8_t* const bits = call.epilogue.bits;
  const float least = least_of(call.epilogue);
  const int lane = lane_index();
  if (bits == nullptr && place < 0) return;
  constexpr int kBytes = sizeof(T);
  const int64_t stride = call.target.channel * kBytes;
  int64_t offset = (place + channel * call.target.channel) * kBytes;
  char* const target = static_cast<char*>(const_cast<void*>(call.target.data));
  const char* const residual = static_cast<const char*>(call.epilogue.residual);
  int begin = 0;
  for (; bits == nullptr && begin + 8 <= outputs; begin += 8) {
    float values[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = load_whole<Vec<float, 4>>(stage + staged_at(lane, begin + 4 * half));
#pragma unroll
      for (int j = 0; j < 4; ++j) values[4 * half + j] = four.at[j];
    }
    if (residual != nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] += to_float(*reinterpret_cast<const T*>(residual + offset + j * stride));
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      *reinterpret_cast<T*>(target + offset) = from_float<T>(larger(values[j], least));
      offset += stride;
    }
  }
#pragma unroll 1
  for (; begin < outputs; ++begin) {
    const int64_t at = offset / kBytes;
    const bool inside = place >= 0 && store_one<T>(call, stage[staged_at(lane, begin)], least, at);
    if (bits != nullptr) {
      const uint32_t word = ballot_of(inside);
      if (place >= 0 && lane % 8 == 0) bits[at / 8] = static_cast<uint8_t>(word >> lane);
    }
    offset += stride;
  }
}

// Writes what a warp has staged, from output `first` of a group on. `place`: the offset in the result of the
// position that has this lane's number, negative if it has none. All lanes take part.
template <typename T>
PATCHCONV_DEVICE void store_stage(const ConvCall& call, const float* stage, int group, int first,
                                  int64_t place) {
  const int channel = group * call.outputs + first;
  const int outputs = call.outputs - first < kStageOutputs ? call.outputs - first : kStageOutputs;
  if (call.target.channel != 1) return store_places<T>(call, stage, channel, outputs, place);
  const int begin = lane_index() % 8 * 8, count = outputs - begin < 8 ? outputs - begin : 8;
  if (outputs % 8 == 0 && in_pieces<T>(call.target, call.epilogue.residual, channel)) {
    store_pieces<T>(call, stage, channel + begin, count, place);
  } else {
    store_channels<T>(call, stage, channel + begin, count, place);
  }
}

}  // namespace patchconv::kernels
