// For norm_backward.cu: the sums that its gradients are made of.
#pragma once

#include "cuda/kernels/norm.h"

namespace patchconv::kernels {

// Writes the parameters' gradients that are asked for. Gives the two sums of each statistic, times the
// weights (Sums of sums.cuh, in the workspace), or nothing where the input's gradient does not need them.
const float* launch_norm_sums(Type type, const NormShape& shape, const NormAffine& affine,
                              Activation activation, const NormBackward& call, Stream stream);

}  // namespace patchconv::kernels
