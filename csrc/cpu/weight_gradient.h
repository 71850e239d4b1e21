// The weight gradient of a pair of tiles as matrix products: for each kernel position, output rows times the
// input rows they met. Needs no buffer besides the sum; accumulates in the tiles' dtype within the BLAS
// library.
#pragma once

#include <ATen/core/Tensor.h>

#include "tiled/conv.h"

namespace patchconv {

// Whether the products are large enough to pay: ungrouped, several channels on both sides.
bool weight_gradient_by_products(const ConvProblem& problem);

// big (N, C, ...) with its padding in it and small (N, K, ...), both dense in channels_last; sum (K, C, ...)
// with the matrices of one kernel position dense.
void add_weight_gradient(const at::Tensor& big, const at::Tensor& small, const ConvProblem& problem,
                         const at::Tensor& sum);

}  // namespace patchconv
