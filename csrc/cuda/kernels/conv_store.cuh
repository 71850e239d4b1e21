// From a warp's sums to the result. The warp writes the sums of 32 positions and 64 outputs to its own part
// of shared memory, and reads them back in the order of the result's memory: along channels or along
// positions.
#pragma once

#include "cuda/kernels/conv_values.cuh"

namespace patchconv::kernels {

constexpr int kStagePlaces = 32;
constexpr int kStageOutputs = 64;
constexpr int kStagePitch = kStageOutputs + 1;
constexpr int kStageBytes = kStagePlaces * kStagePitch * 4;  // per warp

// Stages the sums of a product of 16 positions by 8 outputs, as multiply_matrices() leaves them.
PATCHCONV_DEVICE void stage_sums(float* stage, int place, int output, const float (&sums)[4]) {
  float* at = stage + (place + lane_index() / 4) * kStagePitch + output + lane_index() % 4 * 2;
  at[0] = sums[0];
  at[1] = sums[1];
  at[8 * kStagePitch] = sums[2];
  at[8 * kStagePitch + 1] = sums[3];
}

// Writes the results of 8 contiguous channels, and one bit for each.
template <typename T>
PATCHCONV_DEVICE void store_channels(const ConvCall& call, const float* sums, int channel, int64_t offset,
                                     int count) {
  constexpr int kPiece = 16 / sizeof(T);
  T* target = static_cast<T*>(const_cast<void*>(call.target.data)) + offset;
  const bool whole = count == 8 && reinterpret_cast<uintptr_t>(target) % 16 == 0;
  uint32_t mine = 0;
#pragma unroll
  for (int begin = 0; begin < 8; begin += kPiece) {
    Vec<T, kPiece> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (begin + i >= count) continue;
      const int at = begin + i;
      piece.at[i] = from_sum<T>(finished<T>(call.epilogue, sums[at], channel + at, offset + at));
      mine |= static_cast<uint32_t>(passes(to_sum(piece.at[i]))) << at;
      if (!whole) target[at] = piece.at[i];
    }
    if (whole) store_whole(target + begin, piece);
  }
  if (call.epilogue.bits != nullptr) call.epilogue.bits[offset / 8] = static_cast<uint8_t>(mine);
}

// Writes what a warp has staged, from output `first` of a group on. place_of(i) is the offset of position i
// in the result, negative if it has none. All lanes take part.
template <typename T, typename PlaceOf>
PATCHCONV_DEVICE void store_stage(const ConvCall& call, const float* stage, int group, int first,
                                  PlaceOf place_of) {
  const int lane = lane_index();
  const int channel = group * call.outputs + first;
  const int outputs = call.outputs - first < kStageOutputs ? call.outputs - first : kStageOutputs;
  if (call.target.channel == 1) {
    for (int item = lane; item < kStagePlaces * kStageOutputs / 8; item += kWarp) {
      const int begin = item % (kStageOutputs / 8) * 8, i = item / (kStageOutputs / 8);
      const int64_t place = place_of(i);
      if (place < 0 || begin >= outputs) continue;
      store_channels<T>(call, stage + i * kStagePitch + begin, channel + begin, place + channel + begin,
                        outputs - begin < 8 ? outputs - begin : 8);
    }
    return;
  }
  const int64_t place = place_of(lane);
  for (int i = 0; i < outputs; ++i) {
    const int64_t offset = place + (channel + i) * call.target.channel;
    bool inside = false;
    if (place >= 0) {
      const Sum<T> sum = finished<T>(call.epilogue, stage[lane * kStagePitch + i], channel + i, offset);
      const T value = from_sum<T>(sum);
      static_cast<T*>(const_cast<void*>(call.target.data))[offset] = value;
      inside = passes(to_sum(value));
    }
    if (call.epilogue.bits == nullptr) continue;
    const uint32_t word = ballot_of(inside);
    if (place >= 0 && lane % 8 == 0) call.epilogue.bits[offset / 8] = static_cast<uint8_t>(word >> lane);
  }
}

}  // namespace patchconv::kernels
