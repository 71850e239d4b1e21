// The sums that the gradients of norm_backward.cu need.
#pragma once

#include "cuda/kernels/norm.h"

namespace patchconv::kernels {

// Writes the gradients of the parameters that are asked for. Returns the two sums of each statistic, times
// the weights (Sums of sums.cuh, in the workspace), or null if the input's gradient does not need them.
const float* launch_norm_sums(Type type, const NormShape& shape, const NormAffine& affine,
                              Activation activation, const NormBackward& call, Stream stream);

}  // namespace patchconv::kernels
