#include "core/conv.h"

#include <algorithm>

namespace patchconv {

ConvProblem::ConvProblem(const ConvSpec& spec, const std::vector<int64_t>& input,
                         const std::vector<int64_t>& weight)
    : ConvSpec(spec),
      lifted(spec.dims.size() == 1),
      batch(input[0]),
      big_channels(weight[1] * spec.groups),
      small_channels(weight[0]) {
  for (size_t d = 0; d < dims.size(); ++d) {
    ConvDim& dim = dims[d];
    dim.kernel = weight[2 + d];
    if (transposed) {
      dim.small = input[2 + d];
      dim.big = dim.big_range({0, dim.small}).size() - dim.pad_before - dim.pad_after + output_padding[d];
    } else {
      dim.big = input[2 + d];
      dim.small = dim.small_size();
    }
  }
  if (lifted) {
    dims = {ConvDim{/*big=*/1, /*small=*/1}, dims[0]};
    if (!splits.empty()) splits = {1, splits[0]};
    if (transposed) output_padding = {0, output_padding[0]};
  }
}

bool ConvProblem::unsplit() const {
  return std::all_of(splits.begin(), splits.end(), [](int64_t pieces) { return pieces <= 1; });
}

bool ConvProblem::stock_serves() const {
  // An output padding of a stride or more makes stock's convolution find more outputs than there were inputs.
  return !tiles_only && mode == PaddingMode::kZeros &&
         std::all_of(dims.begin(), dims.end(), [](const ConvDim& d) {
           return d.pad_before == d.pad_after && d.small == d.small_size();
         });
}

std::vector<int64_t> ConvProblem::big_sizes(int64_t batch_size) const {
  std::vector<int64_t> sizes{batch_size, big_channels};
  for (const ConvDim& d : dims) sizes.push_back(d.big);
  return sizes;
}

std::vector<int64_t> ConvProblem::small_sizes(int64_t batch_size) const {
  std::vector<int64_t> sizes{batch_size, small_channels};
  for (const ConvDim& d : dims) sizes.push_back(d.small);
  return sizes;
}

std::vector<int64_t> ConvProblem::weight_sizes() const {
  std::vector<int64_t> sizes{small_channels, big_channels / groups};
  for (const ConvDim& d : dims) sizes.push_back(d.kernel);
  return sizes;
}

int64_t ConvProblem::kernel_volume() const {
  int64_t volume = 1;
  for (const ConvDim& d : dims) volume *= d.kernel;
  return volume;
}

}  // namespace patchconv
