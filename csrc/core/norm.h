// The elements that a normalisation by channel or by group takes its statistics over, and the activation that
// may follow in the same pass.
#pragma once

#include <cstdint>

namespace patchconv {

// y as a function of z = (x - mean) / sqrt(var + eps) * weight + bias.
enum class Activation : int64_t {
  kNone = 0,  // z
  kRelu = 1,  // z <= 0 ? 0 : z
  kSilu = 2,  // z / (1 + exp(-z))
};

// A tensor of (images, channels, pixels), dense in that order or, with channels_last, as (images, pixels,
// channels). There is one mean and one variance per channel, over all images (groups = 0: batch norm), or per
// image and group of neighbouring channels (group norm; instance norm is groups = channels).
struct NormShape {
  int64_t images = 0, channels = 0, pixels = 0;
  int64_t groups = 0;
  bool channels_last = false;

  int64_t statistics() const { return groups == 0 ? channels : images * groups; }
  int64_t elements() const { return images * channels * pixels; }
  int64_t share() const { return elements() / statistics(); }  // elements of one statistic
};

}  // namespace patchconv
