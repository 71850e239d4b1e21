// How a convolution would be computed, from sizes alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tiled/conv.h"

namespace patchconv {

struct ConvQuestion {
  std::vector<int64_t> input;  // batched or not
  std::vector<int64_t> weight;
  std::vector<int64_t> stride, padding, output_padding, dilation;
  int64_t groups;
  bool transposed;
  std::string padding_mode;
  std::optional<std::vector<int64_t>> splits;
  std::vector<int64_t> input_stride, weight_stride;  // empty: contiguous
  std::string dtype, weight_dtype;                   // "float32", ...
  std::string device;                                // "cpu" or "cuda"
  std::string pass;                                  // "fprop", "dgrad" or "wgrad"
};

struct ConvExplanation {
  TilePlan plan;
  NativeKernel kernel;         // used instead of stock operators
  std::vector<int64_t> tiles;  // per spatial dimension of the operator
  std::vector<int64_t> output_size;
  std::string reason;
};

// Raises what the operator would raise for these arguments.
ConvExplanation explain_conv(const ConvQuestion& question);

}  // namespace patchconv
