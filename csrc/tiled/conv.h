// Convolutions computed tile by tile: what CPU and CUDA share.
//
// Every operator and every gradient is one of three passes over the relation of core/geometry.h:
//     small = conv(big, weight)        forward of a convolution, input gradient of a transposed one
//     big = conv_transpose(small, weight)   the reverse
//     weight = correlate(big, small)   weight gradient of both
// so the operators need three loops (tiled/passes.h). Results are allocated once at full size; besides them a
// pass keeps one tile of each grid at a time, of the size the plan allows. Accumulation is that of the stock
// operator within a tile; weight gradients of several tiles are summed in float32 or float64.
#pragma once

#include "ops/conv.h"
#include "tiled/engine.h"

namespace patchconv {

// Whole operators: tensors as the dispatcher hands them over (unbatched, 1-D, any strides).
at::Tensor conv_forward(const ConvEngine& engine, const ConvSpec& spec, const at::Tensor& input,
                        const at::Tensor& weight, const OptionalTensor& bias);
ConvGrads conv_backward(const ConvEngine& engine, const ConvSpec& spec, const ConvBackwardArgs& args);
// One launch where this project's kernels run, else the convolution in tiles and then its other parts in
// place. Besides the result only the bits are allocated.
FusedResult conv_fused(const ConvEngine& engine, const ConvSpec& spec, const at::Tensor& input,
                       const at::Tensor& weight, const OptionalTensor& bias, const FusedParts& parts);

}  // namespace patchconv
