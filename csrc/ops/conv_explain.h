// How a convolution would be computed, from sizes alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tiled/engine.h"

namespace patchconv {

struct ConvExplanation {
  TilePlan plan;
  NativeKernel kernel;         // used instead of stock operators
  std::vector<int64_t> tiles;  // per spatial dimension of the operator
  std::vector<int64_t> output_size;
  std::string reason;
};

// A tensor of this size, layout (no strides: contiguous) and dtype ("float32", ...) without memory.
at::Tensor stand_in(const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                    const std::string& dtype);

// Raises what the operator would raise for these arguments. `device`: "cpu" or "cuda"; `pass`: "fprop",
// "dgrad" or "wgrad".
ConvExplanation explain_conv(const ConvSpec& spec, const at::Tensor& input, const at::Tensor& weight,
                             const std::string& device, const std::string& pass);

}  // namespace patchconv
